/* W8A8 linear layers (and SwiGLU) for CPUs with AVX-512: y = (q(x) · Wᵀ) · s_x · s_w + b.
 *
 * INT8 multiplies codes as they are (VPDPBUSD). FP8 is emulated: E4M3 codes are exact in BF16, so their products are exact
 * in FP32, where they are summed (VDPBF16PS). In both, x is quantized here, one scale per token, and the result is
 * scaled in FP32 and rounded once.
 *
 * Both see a row of x and a column of W as groups of 4 bytes (4 INT8 or 2 BF16), which one instruction multiplies and
 * adds. Weights lie in blocks of 32 outputs, [N/32][groups][32][4 bytes], so that a block is read straight through. A tile
 * of 12 tokens x 32 outputs stays in 24 of the 32 registers: 14 loads for 24 dot products, hence bound by the latter.
 * Blocks go to the OpenMP threads that torch has started.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { COLUMNS = 32, ROWS = 12, CHUNK = 16 * ROWS }; /* CHUNK tokens of x stay in the second-level cache */

static __thread char *scratch;
static __thread size_t scratch_size;

static char *reserve(size_t size) {
    if (size > scratch_size) {
        free(scratch);
        scratch = aligned_alloc(64, (size + 63) / 64 * 64);
        scratch_size = scratch ? size : 0;
    }
    return scratch;
}

static inline __m512 load_float(const void *x, int is_bf16, int64_t i, __mmask16 mask) {
    if (is_bf16) {
        __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + i);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    return _mm512_maskz_loadu_ps(mask, (const float *)x + i);
}

static inline __mmask16 tail(int64_t left) { return left >= 16 ? 0xFFFF : (__mmask16)((1u << left) - 1); }

/* NaN if the row holds NaN or infinity, so that a broken activation shows in all of its token's outputs: the maximum alone
 * would drop NaN, and infinity would become the largest code. */
static float absmax_row(const void *x, int is_bf16, int64_t start, int64_t k) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 nan = 0;
    for (int64_t i = 0; i < k; i += 16) {
        __m512 value = load_float(x, is_bf16, start + i, tail(k - i));
        nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, _mm512_abs_ps(value));
    }
    float largest = _mm512_reduce_max_ps(most);
    return nan || largest == INFINITY ? NAN : largest;
}

/* Rounded to bfloat16, half to even, in the low 16 bits of each lane; NaN stays NaN. */
static inline __m512i round_bf16(__m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
}

/* Scale of a token: absmax / levels, at least the smallest normal number, as in qurl.quantization. */
static inline float token_scale(float absmax, float levels) {
    float scale = absmax / levels;
    return scale > 1.17549435e-38f || scale != scale ? scale : 1.17549435e-38f;
}

/* INT8: codes + 128, because VPDPBUSD multiplies unsigned by signed; padding is code 0. */
static float quantize_int8(const void *x, int is_bf16, int64_t start, int64_t k, int64_t bytes, uint8_t *out) {
    float scale = token_scale(absmax_row(x, is_bf16, start, k), 127.0f);
    __m512 divisor = _mm512_set1_ps(scale);
    memset(out, 128, bytes);
    for (int64_t i = 0; i < k; i += 16) {
        __mmask16 mask = tail(k - i);
        __m512i code = _mm512_cvt_roundps_epi32(_mm512_div_ps(load_float(x, is_bf16, start + i, mask), divisor),
                                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_mask_storeu_epi8(out + i, mask, _mm512_cvtepi32_epi8(_mm512_add_epi32(code, _mm512_set1_epi32(128))));
    }
    return scale;
}

/* FP8: values rounded to E4M3 (3 bits of mantissa; multiples of 2^-9 below 2^-6) and kept as BF16; padding is 0. */
static float quantize_fp8(const void *x, int is_bf16, int64_t start, int64_t k, int64_t bytes, uint8_t *out) {
    float scale = token_scale(absmax_row(x, is_bf16, start, k), 448.0f);
    __m512 divisor = _mm512_set1_ps(scale), largest = _mm512_set1_ps(448.0f);
    __m512 to_multiple = _mm512_set1_ps(24576.0f); /* 1.5 * 2^14: adding it rounds to multiples of 2^-9 */
    uint16_t *codes = (uint16_t *)out;
    memset(out, 0, bytes);
    for (int64_t i = 0; i < k; i += 16) {
        __mmask16 mask = tail(k - i);
        __m512 value = _mm512_div_ps(load_float(x, is_bf16, start + i, mask), divisor);
        __m512i bits = _mm512_castps_si512(value);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
        bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFFF)));
        __m512 normal = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(~0xFFFFF)));
        __m512 small = _mm512_sub_ps(_mm512_add_ps(value, to_multiple), to_multiple);
        __mmask16 is_small = _mm512_cmp_ps_mask(_mm512_abs_ps(value), _mm512_set1_ps(0.015625f), _CMP_LT_OQ);
        __m512 code = _mm512_mask_mov_ps(normal, is_small, small);
        code = _mm512_max_ps(_mm512_min_ps(code, largest), _mm512_sub_ps(_mm512_setzero_ps(), largest));
        _mm256_mask_storeu_epi16(codes + i, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(code), 16)));
    }
    return scale;
}

/* One tile: `rows` tokens by COLUMNS outputs. `rows` is a constant wherever this is inlined. */
#define TILE(NAME, VECTOR, START, DOT, TO_FLOAT)                                                                       \
    static inline __attribute__((always_inline)) void NAME(                                                            \
        int rows, int64_t groups, const uint8_t *a, int64_t stride, const uint8_t *w, const int32_t *start,            \
        const float *x_scale, const float *w_scale, const float *bias, void *out, int out_bf16, int64_t ldo,           \
        int64_t columns) {                                                                                             \
        VECTOR acc[ROWS][2];                                                                                           \
        _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++) acc[r][0] = START(start), acc[r][1] = START(start + 16); \
        for (int64_t g = 0; g < groups; g++) {                                                                         \
            __m512i w0 = _mm512_load_si512(w + g * 4 * COLUMNS), w1 = _mm512_load_si512(w + g * 4 * COLUMNS + 64);     \
            _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++) {                                                  \
                int32_t four;                                                                                          \
                memcpy(&four, a + r * stride + g * 4, 4);                                                              \
                __m512i x = _mm512_set1_epi32(four);                                                                   \
                acc[r][0] = DOT(acc[r][0], x, w0);                                                                     \
                acc[r][1] = DOT(acc[r][1], x, w1);                                                                     \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)                                                        \
            _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {                                                                     \
                int64_t n = 16 * half;                                                                                 \
                if (n >= columns) break;                                                                               \
                __mmask16 mask = tail(columns - n);                                                                    \
                __m512 scale = _mm512_mul_ps(_mm512_set1_ps(x_scale[r]), _mm512_maskz_loadu_ps(mask, w_scale + n));    \
                __m512 y = _mm512_mul_ps(TO_FLOAT(acc[r][half]), scale);                                               \
                if (bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, bias + n));                                 \
                if (out_bf16)                                                                                          \
                    _mm256_mask_storeu_epi16((uint16_t *)out + r * ldo + n, mask, _mm512_cvtepi32_epi16(round_bf16(y))); \
                else                                                                                                   \
                    _mm512_mask_storeu_ps((float *)out + r * ldo + n, mask, y);                                        \
            }                                                                                                          \
    }

#define INT8_START(start) _mm512_loadu_si512(start)
#define INT8_DOT(acc, x, w) _mm512_dpbusd_epi32(acc, x, w)
TILE(tile_int8, __m512i, INT8_START, INT8_DOT, _mm512_cvtepi32_ps)

#ifdef __AVX512BF16__
#define FP8_START(start) _mm512_setzero_ps()
#define FP8_DOT(acc, x, w) _mm512_dpbf16_ps(acc, (__m512bh)(x), (__m512bh)(w))
#define FP8_FLOAT(acc) acc
TILE(tile_fp8, __m512, FP8_START, FP8_DOT, FP8_FLOAT)
#endif

/* x (m, k), BF16 or FP32, row stride ldx; out (m, n) in the type of x; start and w_scale padded to COLUMNS. */
#define LINEAR(NAME, QUANTIZE, TILE_NAME)                                                                              \
    int NAME(const void *x, int64_t ldx, int is_bf16, int64_t m, int64_t k, const uint8_t *w, const int32_t *start,    \
             const float *w_scale, const float *bias, int64_t n, int64_t groups, void *out) {                          \
        int64_t stride = groups * 4, blocks = (n + COLUMNS - 1) / COLUMNS, chunks = (m + CHUNK - 1) / CHUNK;           \
        if (!m) return 0;                                                                                              \
        size_t codes_size = (size_t)(m * stride + 63) / 64 * 64;                                                       \
        char *memory = reserve(codes_size + m * sizeof(float));                                                        \
        if (!memory) return 1;                                                                                         \
        uint8_t *codes = (uint8_t *)memory;                                                                            \
        float *x_scale = (float *)(memory + codes_size);                                                               \
        int64_t item = is_bf16 ? 2 : 4;                                                                                \
        _Pragma("omp parallel") {                                                                                      \
            _Pragma("omp for schedule(static)") for (int64_t row = 0; row < m; row++) x_scale[row] =                   \
                QUANTIZE(x, is_bf16, row * ldx, k, stride, codes + row * stride);                                      \
            _Pragma("omp for schedule(static) collapse(2)") for (int64_t chunk = 0; chunk < chunks; chunk++) for (     \
                int64_t block = 0; block < blocks; block++) {                                                          \
                int64_t first = chunk * CHUNK, last = first + CHUNK < m ? first + CHUNK : m, column = block * COLUMNS; \
                /* Tiles of nearly equal height: a low one has too few sums to hide the latency of an instruction. */     \
                int64_t tiles = (last - first + ROWS - 1) / ROWS;                                                      \
                for (int64_t tile = 0, row = first, rows; tile < tiles; tile++, row += rows) {                         \
                    rows = (last - row + tiles - tile - 1) / (tiles - tile);                                           \
                    const uint8_t *wb = w + column * stride;                                                           \
                    const float *bb = bias ? bias + column : 0;                                                        \
                    char *ob = (char *)out + (row * n + column) * item;                                                \
                    switch (rows) {                                                                                    \
                        CASES(TILE_NAME)                                                                               \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }
#define CASE(TILE_NAME, R)                                                                                             \
    case R:                                                                                                            \
        TILE_NAME(R, groups, codes + row * stride, stride, wb, start + column, x_scale + row, w_scale + column, bb,    \
                  ob, is_bf16, n, n - column);                                                                         \
        break;
#define CASES(T)                                                                                                       \
    CASE(T, 1) CASE(T, 2) CASE(T, 3) CASE(T, 4) CASE(T, 5) CASE(T, 6) CASE(T, 7) CASE(T, 8) CASE(T, 9) CASE(T, 10)     \
    CASE(T, 11) CASE(T, 12)

LINEAR(linear_int8, quantize_int8, tile_int8)
#ifdef __AVX512BF16__
LINEAR(linear_fp8, quantize_fp8, tile_fp8)
#endif

/* e^x to 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; x is limited to where e^x is normal. */
static inline __m512 exp_ps(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* out (m, d) = silu(x[:, :d]) * x[:, d:] in FP32, rounded once; x (m, 2 d), contiguous, BF16 or FP32 like out. */
void silu_and_mul(const void *x, int is_bf16, int64_t m, int64_t d, void *out) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < m; row++)
        for (int64_t i = 0; i < d; i += 16) {
            __mmask16 mask = tail(d - i);
            __m512 gate = load_float(x, is_bf16, row * 2 * d + i, mask);
            __m512 up = load_float(x, is_bf16, row * 2 * d + d + i, mask);
            __m512 denominator = _mm512_add_ps(_mm512_set1_ps(1.0f), exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            __m512 y = _mm512_mul_ps(_mm512_div_ps(gate, denominator), up);
            if (is_bf16)
                _mm256_mask_storeu_epi16((uint16_t *)out + row * d + i, mask, _mm512_cvtepi32_epi16(round_bf16(y)));
            else
                _mm512_mask_storeu_ps((float *)out + row * d + i, mask, y);
        }
}

/* Codes (n, k) into blocks, padded with zeros. `expand` is 0 for INT8, else the BF16 bits of each of the 256 E4M3 codes. */
void pack(const uint8_t *codes, int64_t n, int64_t k, int64_t groups, const uint16_t *expand, uint8_t *out, int32_t *start) {
    int64_t stride = groups * 4, blocks = (n + COLUMNS - 1) / COLUMNS, per_group = expand ? 2 : 4;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        uint8_t *target = out + block * COLUMNS * stride;
        memset(target, 0, COLUMNS * stride);
        for (int64_t c = 0; c < COLUMNS && block * COLUMNS + c < n; c++) {
            const uint8_t *row = codes + (block * COLUMNS + c) * k;
            int32_t sum = 0;
            for (int64_t g = 0; g * per_group < k; g++) {
                uint8_t *four = target + (g * COLUMNS + c) * 4;
                int64_t left = k - g * per_group < per_group ? k - g * per_group : per_group;
                for (int64_t i = 0; i < left; i++) {
                    uint8_t code = row[g * per_group + i];
                    if (expand)
                        memcpy(four + 2 * i, expand + code, 2);
                    else
                        four[i] = code, sum += (int8_t)code;
                }
            }
            start[block * COLUMNS + c] = -128 * sum; /* x is shifted by 128: take 128 * Σ w off again */
        }
    }
}
