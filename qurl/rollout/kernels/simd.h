/* What the kernels share: 16 values at a time in FP32, read from and rounded to BF16 or FP32. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { LINE = 64 }; /* bytes of a cache line */

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Per thread, grown when needed and kept: fresh memory would be cleared by the system page by page. */
static uint8_t *reserve(int which, size_t size) {
    static __thread uint8_t *memory[2];
    static __thread size_t sizes[2];
    if (size > sizes[which]) {
        free(memory[which]);
        memory[which] = aligned_alloc(LINE, ceil_div(size, LINE) * LINE);
        sizes[which] = memory[which] ? size : 0;
    }
    return memory[which];
}

INLINE __mmask16 first(int64_t count) {
    return count >= 16 ? 0xFFFF : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

INLINE __m512 load_float(const void *x, int is_bf16, int64_t i, __mmask16 mask) {
    if (is_bf16) {
        __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + i);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    return _mm512_maskz_loadu_ps(mask, (const float *)x + i);
}

/* Rounded to bfloat16, half to even; NaN stays NaN. */
INLINE __m256i round_bf16(__m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

/* e^x to 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. 0 and infinity where e^x is, NaN
 * for NaN, which the second operand of min and max lets through. */
static inline __m512 exp_ps(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));
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
