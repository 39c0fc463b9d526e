/* AVX-512 with VNNI: 64 products of 8 bits an instruction. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,prefer-vector-width=512")
#endif
#include "kernels.h"
#include <immintrin.h>

enum { BLOCK = 8 };
#define ISA "avx512"
#define NAME(what) what##_avx512

static inline __attribute__((always_inline)) __m512i four(const int8_t *planes) {
    int32_t word;
    __builtin_memcpy(&word, planes, 4);
    return _mm512_set1_epi32(word);
}

static inline __attribute__((always_inline)) void some_rows(
    const board_matrix *m, const fixed *x, int32_t row, int32_t panel, float *y, int64_t y_row, const int rows
) {
    const int32_t k = m->k, group = m->group, groups = k / group;
    const uint16_t *scales = m->scales + (int64_t)panel * groups * PANEL;
    const uint8_t *zeros = m->zeros + (int64_t)panel * groups * PANEL;
    const int8_t *planes = x->planes + (int64_t)row * k * 2; /* of the first row; the others follow k * 2 bytes apart */
    const float *row_scales = x->scales + row * groups;
    const int32_t *row_sums = x->sums + row * groups;
    const int32_t shift = m->bits == 4 ? ZERO_SHIFT : 0;
    const float unit = 1.0f / (float)(1 << shift);
    const __m512i nibble = _mm512_set1_epi8(15);
    const uint8_t *w = m->packed + (int64_t)panel * k * PANEL * m->bits / 8;
    __m512 sum[8];
    EACH(r, rows) sum[r] = _mm512_setzero_ps();
    for (int32_t g = 0; g < groups; g++) {
        __m512i high[8], low[8];
        EACH(r, rows) high[r] = low[r] = _mm512_setzero_si512();
        if (m->bits == 4) {
            __m512i high2[8], low2[8]; /* where rows are few, shorter chains of sums */
            EACH(r, rows) high2[r] = low2[r] = _mm512_setzero_si512();
            for (int32_t step = 0; step < group; step += 8, w += 64, planes += 16) {
                __builtin_prefetch(w + AHEAD);
                const __m512i both = _mm512_loadu_si512(w);
                const __m512i a = _mm512_and_si512(both, nibble);
                const __m512i b = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
                EACH(r, rows) {
                    const int8_t *at = planes + (int64_t)r * k * 2;
                    high[r] = _mm512_dpbusd_epi32(high[r], a, four(at));
                    low[r] = _mm512_dpbusd_epi32(low[r], a, four(at + 4));
                    if (rows <= 3) {
                        high2[r] = _mm512_dpbusd_epi32(high2[r], b, four(at + 8));
                        low2[r] = _mm512_dpbusd_epi32(low2[r], b, four(at + 12));
                    } else {
                        high[r] = _mm512_dpbusd_epi32(high[r], b, four(at + 8));
                        low[r] = _mm512_dpbusd_epi32(low[r], b, four(at + 12));
                    }
                }
            }
            if (rows <= 3)
                EACH(r, rows) {
                    high[r] = _mm512_add_epi32(high[r], high2[r]);
                    low[r] = _mm512_add_epi32(low[r], low2[r]);
                }
        } else {
            for (int32_t step = 0; step < group; step += 4, w += 64, planes += 8) {
                __builtin_prefetch(w + AHEAD);
                const __m512i a = _mm512_loadu_si512(w);
                EACH(r, rows) {
                    const int8_t *at = planes + (int64_t)r * k * 2;
                    high[r] = _mm512_dpbusd_epi32(high[r], a, four(at));
                    low[r] = _mm512_dpbusd_epi32(low[r], a, four(at + 4));
                }
            }
        }
        __builtin_prefetch(scales + g * PANEL + AHEAD / 8);
        __builtin_prefetch(zeros + g * PANEL + AHEAD / 8);
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + g * PANEL)));
        const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(zeros + g * PANEL)));
        EACH(r, rows) {
            const __m512i all = _mm512_slli_epi32(_mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]), shift);
            const __m512i bias = _mm512_mullo_epi32(zero, _mm512_set1_epi32(row_sums[r * groups + g]));
            const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(row_scales[r * groups + g] * unit));
            sum[r] = _mm512_add_ps(sum[r], _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(all, bias)), by));
        }
    }
    EACH(r, rows) _mm512_storeu_ps(y + (row + r) * y_row + panel * PANEL, sum[r]);
}

#include "kernels_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
