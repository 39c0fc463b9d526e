/* AVX2, for x86 without VNNI: products of 8 bits are added in pairs to 16, which hold the sum of 32 inputs. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#include "kernels.h"
#include <immintrin.h>

enum { BLOCK = 2 };
#define ISA "avx2"
#define NAME(what) what##_avx2
#define INLINED static inline __attribute__((always_inline))

INLINED __m256i four(const int8_t *planes) {
    int32_t word;
    __builtin_memcpy(&word, planes, 4);
    return _mm256_set1_epi32(word);
}

/* Both halves of a byte as bytes: `shift` 0 or 4. */
INLINED __m256i halves(const uint8_t *w, int shift) {
    const __m256i both = _mm256_loadu_si256((const __m256i *)w);
    return _mm256_and_si256(shift ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}

INLINED void some_rows(
    const board_matrix *m, const fixed *x, int32_t row, int32_t panel, float *y, int64_t y_row, const int rows
) {
    const int32_t k = m->k, group = m->group, groups = k / group;
    const uint16_t *scales = m->scales + (int64_t)panel * groups * PANEL;
    const uint8_t *zeros = m->zeros + (int64_t)panel * groups * PANEL;
    const int8_t *planes = x->planes + (int64_t)row * k * 2;
    const uint8_t *w = m->packed + (int64_t)panel * k * PANEL * m->bits / 8;
    const int32_t shift = m->bits == 4 ? ZERO_SHIFT : 0;
    const float unit = 1.0f / (float)(1 << shift);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 sum[2][2]; /* [row][half of the panel] */
    EACH(r, rows) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int32_t g = 0; g < groups; g++) {
        __m256i total[2][2];
        EACH(r, rows) total[r][0] = total[r][1] = _mm256_setzero_si256();
        for (int32_t part = 0; part < group; part += 32) {
            __m256i pairs[2][2][2], upper[2][2][2]; /* [row][plane][half], 16 bits; upper: of the high half bytes of 8 bits */
            EACH(r, rows) EACH(p, 2) EACH(h, 2) pairs[r][p][h] = upper[r][p][h] = _mm256_setzero_si256();
            const int32_t bytes = m->bits == 4 ? 4 : 8; /* times 64: of 32 inputs */
            for (int32_t step = 0; step < bytes; step++, w += 64) {
                __builtin_prefetch(w + AHEAD);
                EACH(h, 2) {
                    const __m256i a = halves(w + h * 32, 0), b = halves(w + h * 32, 4);
                    EACH(r, rows) EACH(p, 2) {
                        const int8_t *at = planes + (int64_t)r * k * 2 + p * 4;
                        pairs[r][p][h] = _mm256_add_epi16(pairs[r][p][h], _mm256_maddubs_epi16(a, four(at)));
                        if (m->bits == 4)
                            pairs[r][p][h] = _mm256_add_epi16(pairs[r][p][h], _mm256_maddubs_epi16(b, four(at + 8)));
                        else
                            upper[r][p][h] = _mm256_add_epi16(upper[r][p][h], _mm256_maddubs_epi16(b, four(at)));
                    }
                }
                planes += m->bits == 4 ? 16 : 8;
            }
            EACH(r, rows) EACH(h, 2) {
                __m256i both[2];
                EACH(p, 2) {
                    both[p] = _mm256_madd_epi16(pairs[r][p][h], ones);
                    if (m->bits == 8)
                        both[p] = _mm256_add_epi32(both[p], _mm256_slli_epi32(_mm256_madd_epi16(upper[r][p][h], ones), 4));
                }
                const __m256i here = _mm256_add_epi32(_mm256_slli_epi32(both[0], 8), both[1]);
                total[r][h] = _mm256_add_epi32(total[r][h], here);
            }
        }
        EACH(h, 2) {
            const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + g * PANEL + h * 8)));
            const __m256i zero = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(zeros + g * PANEL + h * 8)));
            EACH(r, rows) {
                const __m256i bias = _mm256_mullo_epi32(zero, _mm256_set1_epi32(x->sums[(row + r) * groups + g]));
                const __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(x->scales[(row + r) * groups + g] * unit));
                const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_slli_epi32(total[r][h], shift), bias));
                sum[r][h] = _mm256_add_ps(sum[r][h], _mm256_mul_ps(exact, by));
            }
        }
    }
    EACH(r, rows) EACH(h, 2) _mm256_storeu_ps(y + (row + r) * y_row + panel * PANEL + h * 8, sum[r][h]);
}

#include "kernels_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
