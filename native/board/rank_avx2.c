/* Ranking with AVX2. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#include <immintrin.h>

#define KERNELS rank_avx2
#define LANES 4
#define products(a, factor) ((words64)_mm256_mul_epu32((__m256i)(a), _mm256_set1_epi64x(factor)))
#define larger(a, b) _mm256_max_ps(a, b)
#define below(a, b) _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ))

static inline __attribute__((always_inline)) float largest(__m256 a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#include "rank_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
