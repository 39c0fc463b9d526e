/* Ranking with AVX-512. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include <immintrin.h>

#define KERNELS rank_avx512
#define LANES 8
#define products(a, factor) ((words64)_mm512_mul_epu32((__m512i)(a), _mm512_set1_epi64(factor)))
#define larger(a, b) _mm512_max_ps(a, b)
#define largest(a) _mm512_reduce_max_ps(a)
#define below(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)

#include "rank_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
