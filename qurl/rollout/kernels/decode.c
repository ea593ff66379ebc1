/* What a decode step needs besides its products, for CPUs with AVX-512: attention, SwiGLU and sampling. In FP32; what
 * comes in and goes out is BF16 or FP32. */
#include "simd.h"

/* out (m, d) = silu(x[:, :d]) * x[:, d:] in FP32, rounded once; x (m, 2 d), contiguous, BF16 or FP32 like out. */
void silu_and_mul(const void *x, int is_bf16, int64_t m, int64_t d, void *out) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < m; row++)
        for (int64_t i = 0; i < d; i += 16) {
            __mmask16 mask = first(d - i);
            __m512 gate = load_float(x, is_bf16, row * 2 * d + i, mask);
            __m512 up = load_float(x, is_bf16, row * 2 * d + d + i, mask);
            __m512 denominator = _mm512_add_ps(_mm512_set1_ps(1.0f), exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            __m512 y = _mm512_mul_ps(_mm512_div_ps(gate, denominator), up);
            if (is_bf16)
                _mm256_mask_storeu_epi16((uint16_t *)out + row * d + i, mask, round_bf16(y));
            else
                _mm512_mask_storeu_ps((float *)out + row * d + i, mask, y);
        }
}

/* Scores of `heads` query heads, a constant at most 4, against the 32 tokens whose keys k[i * block + token] begin at
 * `at`. On its way it fetches their values. */
INLINE void scores(int heads, const float *q, int64_t d, const void *k, int is_bf16, int64_t at, int64_t block,
                   const char *values, float *out, int64_t ld) {
    __m512 sum[4][2];
    for (int h = 0; h < heads; h++) sum[h][0] = sum[h][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < d; i++) {
        __m512 k0 = load_float(k, is_bf16, at + i * block, 0xFFFF);
        __m512 k1 = load_float(k, is_bf16, at + i * block + 16, 0xFFFF);
        _mm_prefetch(values + i * LINE, _MM_HINT_T0);
        for (int h = 0; h < heads; h++) {
            __m512 query = _mm512_set1_ps(q[h * d + i]);
            sum[h][0] = _mm512_fmadd_ps(query, k0, sum[h][0]);
            sum[h][1] = _mm512_fmadd_ps(query, k1, sum[h][1]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(out + h * ld + 16 * half, sum[h][half]);
}

/* Adds the values v[token * d + i] of `count` tokens from `at` on to 32 outputs of `heads` heads, weighted. */
INLINE void add_values(int heads, const float *weight, int64_t ld, int64_t count, const void *v, int is_bf16,
                       int64_t at, int64_t d, float *out) {
    __m512 sum[4][2];
    for (int h = 0; h < heads; h++)
        for (int half = 0; half < 2; half++) sum[h][half] = _mm512_loadu_ps(out + h * d + 16 * half);
    for (int64_t token = 0; token < count; token++) {
        __m512 v0 = load_float(v, is_bf16, at + token * d, 0xFFFF);
        __m512 v1 = load_float(v, is_bf16, at + token * d + 16, 0xFFFF);
        for (int h = 0; h < heads; h++) {
            __m512 own = _mm512_set1_ps(weight[h * ld + token]);
            sum[h][0] = _mm512_fmadd_ps(own, v0, sum[h][0]);
            sum[h][1] = _mm512_fmadd_ps(own, v1, sum[h][1]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(out + h * d + 16 * half, sum[h][half]);
}

/* Scores to weights e^(score - highest), and zeros up to a multiple of 32 tokens; returns the sum of the weights. */
INLINE float softmax(float *score, int64_t length) {
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < length; i += 16)
        most = _mm512_mask_max_ps(most, first(length - i), most, _mm512_loadu_ps(score + i));
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < length; i += 16) {
        __m512 weight = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(score + i), most));
        weight = _mm512_maskz_mov_ps(first(length - i), weight);
        _mm512_storeu_ps(score + i, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    return _mm512_reduce_add_ps(sum);
}

/* vLLM's paged cache of a layer, in its layout for AVX-512: keys [d][token], then values [token][d], for each block of
 * `tokens` (a multiple of 32) and each head. Strides in elements. */
struct cache {
    char *data;
    int64_t block_stride, head_stride, tokens, d;
};

/* Where the tokens of a sequence lie in it. */
struct place {
    const int32_t *blocks;
    int64_t head;
};

INLINE int64_t keys_at(const struct cache *c, struct place p, int64_t token) {
    return p.blocks[token / c->tokens] * c->block_stride + p.head * c->head_stride;
}

/* Out (heads, d) of `heads` query heads, a constant, that share the keys and values at `here`. `score` has a row of `ld`
 * for each. Keys lie far apart in memory, so those of the `next` place to attend to are fetched on the way. */
INLINE void attend(int heads, const struct cache *c, int is_bf16, struct place here, struct place next, int64_t length,
                   const float *q, float *score, int64_t ld, float *out) {
    int64_t size = is_bf16 ? 2 : 4, d = c->d, keys = c->tokens * d;
    for (int64_t from = 0; from < length; from += 32) {
        int64_t at = keys_at(c, here, from), within = from % c->tokens;
        const char *values = c->data + (at + keys + within * d) * size;
        scores(heads, q, d, c->data, is_bf16, at + within, c->tokens, values, score + from, ld);
    }
    float sum[4];
    for (int h = 0; h < heads; h++) sum[h] = softmax(score + h * ld, length);
    memset(out, 0, heads * d * sizeof(float));
    for (int64_t from = 0; from < length; from += c->tokens) {
        int64_t count = length - from < c->tokens ? length - from : c->tokens, at = keys_at(c, here, from) + keys;
        const char *key = c->data + keys_at(c, next, from) * size;
        for (int64_t i = 0; i < d; i += 32) {
            for (int64_t row = i; row < i + 32; row++)
                for (int64_t byte = 0; byte < count * size; byte += LINE)
                    _mm_prefetch(key + row * c->tokens * size + byte, _MM_HINT_T0);
            add_values(heads, score + from, ld, count, c->data, is_bf16, at + i, d, out + i);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int64_t i = 0; i < d; i++) out[h * d + i] /= sum[h];
}

/* A new token of a sequence: its key and value go to `slot`, then `group` heads attend to all `length` tokens. */
INLINE int attend_group(const struct cache *c, int is_bf16, struct place here, struct place next, int64_t length,
                        int64_t slot, const char *q, const char *k, const char *v, int64_t group, float scale,
                        char *out) {
    int64_t size = is_bf16 ? 2 : 4, d = c->d, ld = ceil_div(length, 32) * 32;
    float *query = (float *)reserve(0, group * (2 * d + ld) * sizeof(float));
    if (!query) return 1;
    float *result = query + group * d, *score = result + group * d;
    if (slot >= 0) { /* else padding */
        int64_t at = slot / c->tokens * c->block_stride + here.head * c->head_stride, within = slot % c->tokens;
        for (int64_t i = 0; i < d; i++) memcpy(c->data + (at + i * c->tokens + within) * size, k + i * size, size);
        memcpy(c->data + (at + (c->tokens + within) * d) * size, v, d * size);
    }
    for (int64_t i = 0; i < group * d; i += 16)
        _mm512_storeu_ps(query + i, _mm512_mul_ps(load_float(q, is_bf16, i, 0xFFFF), _mm512_set1_ps(scale)));
#define ATTEND(H)                                                                                                      \
    case H:                                                                                                            \
        attend(H, c, is_bf16, here, next, length, query + h * d, score, ld, result + h * d);                           \
        break;
    for (int64_t h = 0; h < group; h += 4)
        switch (group - h < 4 ? group - h : 4) { ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) }
    for (int64_t i = 0; i < group * d; i += 16)
        if (is_bf16)
            _mm256_storeu_si256((__m256i *)(out + i * size), round_bf16(_mm512_loadu_ps(result + i)));
        else
            _mm512_storeu_ps(out + i * size, _mm512_loadu_ps(result + i));
    return 0;
}

/* As in w8a8.c: a parallel region becomes a function of its own, where `is_bf16` would be no constant. */
static int attend_bf16(const struct cache *c, struct place here, struct place next, int64_t length, int64_t slot,
                       const char *q, const char *k, const char *v, int64_t group, float scale, char *out) {
    return attend_group(c, 1, here, next, length, slot, q, k, v, group, scale, out);
}
static int attend_fp32(const struct cache *c, struct place here, struct place next, int64_t length, int64_t slot,
                       const char *q, const char *k, const char *v, int64_t group, float scale, char *out) {
    return attend_group(c, 0, here, next, length, slot, q, k, v, group, scale, out);
}

/* One new token of each of m sequences: its key and value (m, kv_heads * d) go to its slot, then out (m, heads * d) is
 * the attention of its query to the `lengths` tokens of its sequence, itself included, whose blocks are rows of `table`.
 * d is a multiple of 32. Row strides of q, k, v and table are theirs. Returns 1 if there is no memory. */
int decode_attention(const char *q, int64_t ldq, const char *k, int64_t ldk, const char *v, int64_t ldv, int is_bf16,
                     int64_t m, int64_t heads, int64_t kv_heads, int64_t d, float scale, char *data,
                     int64_t block_stride, int64_t head_stride, int64_t tokens, const int32_t *table, int64_t ldt,
                     const int32_t *lengths, const int64_t *slots, char *out) {
    struct cache cache = {data, block_stride, head_stride, tokens, d};
    int64_t group = heads / kv_heads, size = is_bf16 ? 2 : 4;
    int failed = 0;
#pragma omp parallel for schedule(guided) reduction(| : failed)
    for (int64_t item = 0; item < m * kv_heads; item++) {
        int64_t row = item / kv_heads, head = item % kv_heads, after = item + 1 < m * kv_heads ? item + 1 : item;
        struct place here = {table + row * ldt, head}, next = {table + after / kv_heads * ldt, after % kv_heads};
        failed |= (is_bf16 ? attend_bf16 : attend_fp32)(
            &cache, here, next, lengths[row], slots[row], q + (row * ldq + head * group * d) * size,
            k + (row * ldk + head * d) * size, v + (row * ldv + head * d) * size, group, scale,
            out + (row * heads + head * group) * d * size);
    }
    return failed;
}

/* e^(x / t - most) of 16 logits; 0 where that is below the normal numbers, so for -inf too. */
static inline __m512 weights_of(const void *x, int is_bf16, int64_t i, __mmask16 mask, __m512 t, __m512 most) {
    __m512 z = _mm512_sub_ps(_mm512_div_ps(load_float(x, is_bf16, i, mask), t), most);
    __mmask16 counts = mask & ~_mm512_cmp_ps_mask(z, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    return _mm512_maskz_mov_ps(counts, exp_ps(z));
}

/* Draw a token per row of logits (m, v), row stride ld, by inversion: the first whose cumulative probability at temperature
 * t exceeds u in [0, 1). Also its log-prob and its rank (1 for the likeliest). NaN among the logits makes the log-prob NaN.
 * Sums are FP64 over FP32 sums of blocks; one block is then searched entry by entry. */
void sample(const void *logits, int is_bf16, int64_t m, int64_t v, int64_t ld, const float *temperature,
            const double *uniform, int64_t *token, float *logp, int64_t *rank) {
    enum { BLOCK = 256 };
    int64_t blocks = (v + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic)
    for (int64_t row = 0; row < m; row++) {
        int64_t origin = row * ld;
        __m512 t = _mm512_set1_ps(temperature[row]), most = _mm512_set1_ps(-INFINITY);
        for (int64_t i = 0; i < v; i += 16) {
            __mmask16 mask = first(v - i);
            most = _mm512_mask_max_ps(most, mask, most, load_float(logits, is_bf16, origin + i, mask));
        }
        most = _mm512_div_ps(_mm512_set1_ps(_mm512_reduce_max_ps(most)), t);
        double *ends = (double *)reserve(0, blocks * sizeof(double)), total = 0;
        token[row] = 0, rank[row] = 0, logp[row] = NAN;
        if (!ends) continue;
        for (int64_t b = 0; b < blocks; b++) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = b * BLOCK; i < v && i < (b + 1) * BLOCK; i += 16)
                sum = _mm512_add_ps(sum, weights_of(logits, is_bf16, origin + i, first(v - i), t, most));
            ends[b] = total += _mm512_reduce_add_ps(sum);
        }
        double target = uniform[row] * total;
        int64_t block = 0;
        while (block < blocks - 1 && ends[block] <= target) block++;
        while (block > 0 && ends[block] == ends[block - 1]) block--; /* u * total may round up to the total */
        double start = block ? ends[block - 1] : 0, width = ends[block] - start, inner = 0, sum = 0;
        float weight[BLOCK];
        int64_t count = v - block * BLOCK < BLOCK ? v - block * BLOCK : BLOCK, chosen = -1;
        for (int64_t i = 0; i < count; i += 16)
            _mm512_mask_storeu_ps(weight + i, first(count - i),
                                  weights_of(logits, is_bf16, origin + block * BLOCK + i, first(count - i), t, most));
        for (int64_t i = 0; i < count; i++) inner += weight[i];
        double within = (target - start) / width * inner;
        for (int64_t i = 0; i < count; i++) {
            if (weight[i] > 0) chosen = i;
            if ((sum += weight[i]) > within && weight[i] > 0) break;
        }
        if (chosen < 0 || !(total > 0)) continue;
        int64_t index = origin + block * BLOCK + chosen;
        __m512 z = _mm512_div_ps(load_float(logits, is_bf16, index, 1), t);
        float own = _mm512_cvtss_f32(z);
        for (int64_t i = 0; i < v; i += 16) {
            __mmask16 mask = first(v - i);
            __m512 other = _mm512_div_ps(load_float(logits, is_bf16, origin + i, mask), t);
            rank[row] += __builtin_popcount(_mm512_mask_cmp_ps_mask(mask, other, _mm512_set1_ps(own), _CMP_GE_OQ));
        }
        token[row] = block * BLOCK + chosen;
        logp[row] = (float)((double)own - (double)_mm512_cvtss_f32(most) - log(total));
    }
}
