/* W8A8 linear layers for CPUs with AVX-512: y = (q(x) · Wᵀ) · s_x · s_w + b.
 *
 * INT8 multiplies codes as they are (VPDPBUSD). FP8 is emulated: E4M3 codes are exact in BF16, so their products are
 * exact in FP32, where they are summed (VDPBF16PS). In both, x is quantized here, one scale per token, and the result
 * is scaled in FP32 and rounded once.
 *
 * Layout. A token and an output are groups of 4 bytes (4 INT8 or 2 BF16), which one instruction multiplies and adds.
 * Weights lie in blocks of 32 outputs, [N/32][groups][32], so that a block is read straight through. FP8 weights stay
 * bytes in memory, because decoding waits for memory; a thread expands a block to BF16 in its cache.
 *
 * Speed. A tile of 12 tokens x 32 outputs stays in 24 of the 32 registers: 14 loads for 24 dot products, hence bound
 * by the latter. While a block is multiplied, the next one is fetched from memory. Blocks go to the OpenMP threads that
 * torch has started.
 */
#include "simd.h"

enum format { INT8, FP8 };
enum { COLUMNS = 32, ROWS = 12, X_BYTES = 384 << 10 }; /* X_BYTES of x stay in the second-level cache */

/* absmax / levels, at least the smallest normal number, as in qurl.quantization. NaN if the token holds NaN or
 * infinity, so that a broken activation shows in all of its outputs. Without their sign, floats are ordered like
 * integers, NaN last. */
INLINE float token_scale(const void *x, int is_bf16, int64_t k, float levels) {
    __m512i most = _mm512_setzero_si512(), magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    int64_t i = 0;
    for (; i + 16 <= k; i += 16) {
        __m512i value = _mm512_castps_si512(load_float(x, is_bf16, i, 0xFFFF));
        most = _mm512_max_epi32(most, _mm512_and_si512(value, magnitude));
    }
    __m512i last = _mm512_castps_si512(load_float(x, is_bf16, i, first(k - i)));
    most = _mm512_max_epi32(most, _mm512_and_si512(last, magnitude));
    int bits = _mm512_reduce_max_epi32(most);
    float absmax, smallest = 1.17549435e-38f;
    memcpy(&absmax, &bits, 4);
    if (bits >= 0x7F800000) return NAN;
    return absmax / levels > smallest ? absmax / levels : smallest;
}

/* Values / scale, at most 127 and a rounding, to codes + 128: VPDPBUSD multiplies unsigned by signed. */
INLINE __m128i int8_codes(__m512 scaled) {
    __m512 sum = _mm512_add_ps(scaled, _mm512_set1_ps(12582912.0f + 128.0f)); /* 1.5 * 2^23: its last bit is 1 */
    return _mm512_cvtepi32_epi8(_mm512_castps_si512(sum));
}

/* Values / scale, at most 448 and a rounding, to E4M3: multiples of 2^-3 of their power of two, at least 2^-6. */
INLINE __m512i fp8_codes(__m512 scaled) {
    __m512i power = _mm512_and_si512(_mm512_castps_si512(scaled), _mm512_set1_epi32(0x7F800000));
    power = _mm512_max_epi32(power, _mm512_set1_epi32((127 - 6) << 23));
    __m512i bits = _mm512_or_si512(_mm512_add_epi32(power, _mm512_set1_epi32(20 << 23)), _mm512_set1_epi32(1 << 22));
    __m512 rounder = _mm512_castsi512_ps(bits); /* 1.5 * 2^20 * power: a sum's last bit is worth 2^-3 * power */
    return _mm512_castps_si512(_mm512_sub_ps(_mm512_add_ps(scaled, rounder), rounder));
}

/* The codes of 16 groups from value `i` on; `left` values remain, beyond which there is code 0. */
INLINE void quantize_groups(enum format format, const void *x, int is_bf16, int64_t i, int64_t left, __m512 divisor,
                            uint8_t *groups) {
    const __m512i high_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                                 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512 scaled[4];
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++)
        if (part < 2 || format == INT8)
            scaled[part] = _mm512_div_ps(load_float(x, is_bf16, i + 16 * part, first(left - 16 * part)), divisor);
    if (format == FP8)
        _mm512_store_si512(groups,
                           _mm512_permutex2var_epi16(fp8_codes(scaled[0]), high_halves, fp8_codes(scaled[1])));
    else
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) _mm_store_si128((__m128i *)groups + part, int8_codes(scaled[part]));
}

/* One token: groups up to a multiple of 16. Returns the scale. */
INLINE float quantize(enum format format, const void *x, int is_bf16, int64_t k, uint8_t *out) {
    float scale = token_scale(x, is_bf16, k, format == INT8 ? 127.0f : 448.0f);
    const __m512 divisor = _mm512_set1_ps(scale);
    const int64_t step = format == INT8 ? 64 : 32; /* values in 16 groups */
    int64_t i = 0;
    for (; i + step <= k; i += step, out += LINE) quantize_groups(format, x, is_bf16, i, step, divisor, out);
    if (i < k) quantize_groups(format, x, is_bf16, i, k - i, divisor, out);
    return scale;
}

/* Four (INT8) or two (BF16) products per lane, added to `sum`. In assembly, because GCC 12 moves half of the sums to
 * memory and back between the intrinsics, which halves the speed. */
INLINE void dot(enum format format, __m512i *sum, __m512i x, __m512i w) {
    if (format == INT8)
        __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(x), "v"(w));
    else
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(*sum) : "v"(x), "v"(w));
}

/* What a block of outputs is computed from. */
struct product {
    const uint8_t *w, *tables;
    const int32_t *x, *start;
    const float *w_scale, *x_scale, *bias;
    void *out;
    int is_bf16;
    int64_t n, groups, stride;
};

/* `rows` tokens from `row` on by COLUMNS outputs from `column` on; `format` and `rows` are constants wherever this is
 * inlined. On its way it fetches a line every `step` bytes from `prefetch` on, one per group. */
INLINE void tile(enum format format, int rows, const struct product *p, int64_t row, int64_t column, const uint8_t *w,
                 const uint8_t *prefetch, int64_t step) {
    const int32_t *x = p->x + row * p->stride, *start = p->start + column;
    int64_t groups = p->groups, stride = p->stride;
    __m512i sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            sum[r][half] = format == INT8 ? _mm512_loadu_si512(start + 16 * half) : _mm512_setzero_si512();
    for (int64_t g = 0; g < groups; g++) {
        __m512i w0 = _mm512_load_si512(w + g * 4 * COLUMNS), w1 = _mm512_load_si512(w + g * 4 * COLUMNS + LINE);
        _mm_prefetch(prefetch + g * step, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            __m512i token = _mm512_set1_epi32(x[r * stride + g]);
            dot(format, &sum[r][0], token, w0);
            dot(format, &sum[r][1], token, w1);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            int64_t c = column + 16 * half, at = (row + r) * p->n + c;
            if (c >= p->n) break;
            __mmask16 mask = first(p->n - c);
            __m512 y = format == INT8 ? _mm512_cvtepi32_ps(sum[r][half]) : _mm512_castsi512_ps(sum[r][half]);
            __m512 scale = _mm512_mul_ps(_mm512_set1_ps(p->x_scale[row + r]), _mm512_loadu_ps(p->w_scale + c));
            y = _mm512_mul_ps(y, scale);
            if (p->bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, p->bias + c));
            if (p->is_bf16)
                _mm256_mask_storeu_epi16((uint16_t *)p->out + at, mask, round_bf16(y));
            else
                _mm512_mask_storeu_ps((float *)p->out + at, mask, y);
        }
}

#ifdef __AVX512VBMI__
/* A block of E4M3 codes to BF16: low and high byte come from two tables of 128, the sign is kept. */
static void expand(const uint8_t *codes, int64_t groups, const uint8_t *tables, uint8_t *out) {
    __m512i low0 = _mm512_loadu_si512(tables), low1 = _mm512_loadu_si512(tables + 64);
    __m512i high0 = _mm512_loadu_si512(tables + 128), high1 = _mm512_loadu_si512(tables + 192);
    for (int64_t g = 0; g < groups; g++) {
        __m512i code = _mm512_load_si512(codes + g * 2 * COLUMNS);
        _mm_prefetch(codes + g * 2 * COLUMNS + 2048, _MM_HINT_T0);
        __m512i low = _mm512_permutex2var_epi8(low0, code, low1), high = _mm512_permutex2var_epi8(high0, code, high1);
        high = _mm512_or_si512(high, _mm512_and_si512(code, _mm512_set1_epi8((char)0x80)));
        _mm512_store_si512(out + g * 4 * COLUMNS, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(out + g * 4 * COLUMNS + LINE, _mm512_unpackhi_epi8(low, high));
    }
}
#endif

/* Tokens from..to by the outputs of a block. */
INLINE void multiply(enum format format, const struct product *p, int64_t from, int64_t to, int64_t block,
                     uint8_t *expanded) {
    int64_t bytes = p->groups * COLUMNS * (format == INT8 ? 4 : 2), column = block * COLUMNS;
    int64_t step = ceil_div(bytes, p->groups * ceil_div(to - from, ROWS));
    const uint8_t *w = p->w + block * bytes, *next = w + bytes;
#ifdef __AVX512VBMI__
    if (format == FP8) expand(w, p->groups, p->tables, expanded), w = expanded;
#endif
#define TILE(R)                                                                                                        \
    case R:                                                                                                            \
        tile(format, R, p, row, column, w, next, step);                                                                \
        break;
    for (int64_t row = from; row < to; row += ROWS, next += step * p->groups)
        switch (to - row < ROWS ? to - row : ROWS) {
            TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
            TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
        }
}

/* A parallel region becomes a function of its own, where `format` would be no constant: hence an instance of each. */
static void multiply_int8(const struct product *p, int64_t from, int64_t to, int64_t block, uint8_t *expanded) {
    multiply(INT8, p, from, to, block, expanded);
}
static float quantize_int8(const void *x, int is_bf16, int64_t k, uint8_t *out) {
    return is_bf16 ? quantize(INT8, x, 1, k, out) : quantize(INT8, x, 0, k, out);
}
static void multiply_fp8(const struct product *p, int64_t from, int64_t to, int64_t block, uint8_t *expanded) {
    multiply(FP8, p, from, to, block, expanded);
}
static float quantize_fp8(const void *x, int is_bf16, int64_t k, uint8_t *out) {
    return is_bf16 ? quantize(FP8, x, 1, k, out) : quantize(FP8, x, 0, k, out);
}

/* x (m, k), BF16 or FP32, row stride ldx; out (m, n) in the type of x; w, start from `pack`; start and w_scale padded
 * to COLUMNS. Returns 1 if there is no memory. */
int linear(int is_fp8, const void *x, int64_t ldx, int is_bf16, int64_t m, int64_t k, const uint8_t *w,
           const int32_t *start, const float *w_scale, const uint8_t *tables, const float *bias, int64_t n, void *out) {
    if (!m) return 0;
    int64_t groups = ceil_div(k, is_fp8 ? 2 : 4), blocks = ceil_div(n, COLUMNS);
    int64_t stride = (ceil_div(groups, 16) | 1) * 16; /* an odd number of cache lines: tokens lie in different sets */
    int64_t chunk = X_BYTES / (4 * stride) / ROWS * ROWS;
    if (chunk < ROWS) chunk = ROWS;
    int32_t *codes = (int32_t *)reserve(0, m * (stride * sizeof(int32_t) + sizeof(float)));
    if (!codes) return 1;
    float *x_scale = (float *)(codes + m * stride);
    struct product p = {w, tables, codes, start, w_scale, x_scale, bias, out, is_bf16, n, groups, stride};
    int failed = 0;
#pragma omp parallel
    {
        uint8_t *expanded = 0;
        if (is_fp8 && !(expanded = reserve(1, groups * 4 * COLUMNS))) failed = 1;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < m; row++)
            x_scale[row] = (is_fp8 ? quantize_fp8 : quantize_int8)((const char *)x + row * ldx * (is_bf16 ? 2 : 4),
                                                                   is_bf16, k, (uint8_t *)(codes + row * stride));
        if (!failed)
#pragma omp for schedule(static) collapse(2)
            for (int64_t from = 0; from < m; from += chunk)
                for (int64_t block = 0; block < blocks; block++) {
                    int64_t to = from + chunk < m ? from + chunk : m;
                    (is_fp8 ? multiply_fp8 : multiply_int8)(&p, from, to, block, expanded);
                }
    }
    return failed;
}

/* Four codes of each of 16 rows, from column `i` on; rows and columns beyond the end hold 0. */
INLINE __m512i four_codes(const uint8_t *codes, int64_t rows, int64_t k, int64_t i) {
    if (i + 4 <= k) {
        __m512i offsets = _mm512_mullo_epi32(_mm512_set1_epi32((int)k),
                                             _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), first(rows), offsets, codes + i, 1);
    }
    int32_t four[16] = {0};
    for (int64_t row = 0; row < rows && row < 16; row++)
        if (i < k) memcpy(four + row, codes + row * k + i, k - i);
    return _mm512_loadu_si512(four);
}

/* Codes (n, k) into blocks, and for INT8 -128 times the sum of each row, which takes the shift of x off again.
 *
 * FP8: a group holds 64 bytes, in the order that `expand` needs: of 8 outputs c, c+16 with 4 each, then the next 8. */
void pack(int is_fp8, const uint8_t *codes, int64_t n, int64_t k, uint8_t *out, int32_t *start) {
    int64_t groups = ceil_div(k, is_fp8 ? 2 : 4), blocks = ceil_div(n, COLUMNS);
    __m512i even = _mm512_setr_epi64(0x0006000400020000, 0x0026002400220020, 0x000E000C000A0008, 0x002E002C002A0028,
                                     0x0016001400120010, 0x0036003400320030, 0x001E001C001A0018, 0x003E003C003A0038);
    __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t row = block * COLUMNS, left = n - row, right = left > 16 ? left - 16 : 0;
        const uint8_t *a = codes + row * k, *b = right ? a + 16 * k : a;
        uint8_t *target = out + row * groups * (is_fp8 ? 2 : 4);
        __m512i sum_a = _mm512_setzero_si512(), sum_b = sum_a, ones = _mm512_set1_epi8(1);
        for (int64_t i = 0; i < k; i += 4) {
            __m512i four_a = four_codes(a, left, k, i), four_b = four_codes(b, right, k, i);
            if (is_fp8) {
                _mm512_store_si512(target + i * COLUMNS, _mm512_permutex2var_epi16(four_a, even, four_b));
                if (i + 2 < k)
                    _mm512_store_si512(target + i * COLUMNS + LINE, _mm512_permutex2var_epi16(four_a, odd, four_b));
            } else {
                _mm512_store_si512(target + i * COLUMNS, four_a);
                _mm512_store_si512(target + i * COLUMNS + LINE, four_b);
                sum_a = _mm512_dpbusd_epi32(sum_a, ones, four_a);
                sum_b = _mm512_dpbusd_epi32(sum_b, ones, four_b);
            }
        }
        __m512i shift = _mm512_set1_epi32(-128);
        _mm512_storeu_si512(start + row, _mm512_mullo_epi32(sum_a, shift));
        _mm512_storeu_si512(start + row + 16, _mm512_mullo_epi32(sum_b, shift));
    }
}
