/* What the two NEON files share. Before it, a file defines
 *   add_four(sum, w, a, lane)  to sum [4 outputs] the products of w [4 outputs][4] with the four inputs in a lane of a
 * The bytes of a panel are 16 outputs, four registers. Weights of 8 bits are shifted into int8 and so are their zeros. */
#include "kernels.h"
#include <arm_neon.h>

enum { BLOCK = 2 };

static inline __attribute__((always_inline)) void some_rows(
    const board_matrix *m, const fixed *x, int32_t row, int32_t panel, float *y, int64_t y_row, const int rows
) {
    const int32_t k = m->k, group = m->group, groups = k / group;
    const uint16_t *scales = m->scales + (int64_t)panel * groups * PANEL;
    const uint8_t *zeros = m->zeros + (int64_t)panel * groups * PANEL;
    const int8_t *planes = x->planes + (int64_t)row * k * 2;
    const uint8_t *w = m->packed + (int64_t)panel * k * PANEL * m->bits / 8;
    const int32_t shift = m->bits == 4 ? ZERO_SHIFT : 0;
    const float unit = 1.0f / (float)(1 << shift);
    const int32_t shifted = m->bits == 8 ? 128 : 0;
    float32x4_t sum[2][4]; /* [row][quarter of the panel] */
    EACH(r, rows) EACH(o, 4) sum[r][o] = vdupq_n_f32(0);
    for (int32_t g = 0; g < groups; g++) {
        int32x4_t high[2][4], low[2][4];
        EACH(r, rows) EACH(o, 4) high[r][o] = low[r][o] = vdupq_n_s32(0);
        if (m->bits == 4)
            for (int32_t step = 0; step < group; step += 8, w += 64, planes += 16) {
                int8x16_t a[2];
                EACH(r, rows) a[r] = vld1q_s8(planes + (int64_t)r * k * 2);
                __builtin_prefetch(w + AHEAD);
                EACH(o, 4) {
                    const uint8x16_t both = vld1q_u8(w + o * 16);
                    const int8x16_t first = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
                    const int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
                    EACH(r, rows) {
                        add_four(high[r][o], first, a[r], 0);
                        add_four(low[r][o], first, a[r], 1);
                        add_four(high[r][o], second, a[r], 2);
                        add_four(low[r][o], second, a[r], 3);
                    }
                }
            }
        else
            for (int32_t step = 0; step < group; step += 8, w += 128, planes += 16) {
                int8x16_t a[2];
                EACH(r, rows) a[r] = vld1q_s8(planes + (int64_t)r * k * 2);
                __builtin_prefetch(w + AHEAD);
                __builtin_prefetch(w + AHEAD + 64);
                EACH(o, 4) {
                    const int8x16_t first = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + o * 16), vdupq_n_u8(128)));
                    const int8x16_t second = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 64 + o * 16), vdupq_n_u8(128)));
                    EACH(r, rows) {
                        add_four(high[r][o], first, a[r], 0);
                        add_four(low[r][o], first, a[r], 1);
                        add_four(high[r][o], second, a[r], 2);
                        add_four(low[r][o], second, a[r], 3);
                    }
                }
            }
        EACH(o, 4) {
            const float32x4_t scale = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(scales + g * PANEL + o * 4)));
            int32_t zero[4];
            EACH(i, 4) zero[i] = zeros[g * PANEL + o * 4 + i] - shifted;
            EACH(r, rows) {
                const int32x4_t sum_of = vaddq_s32(vshlq_n_s32(high[r][o], 8), low[r][o]);
                const int32x4_t all = vshlq_s32(sum_of, vdupq_n_s32(shift));
                const int32x4_t exact = vmlsq_n_s32(all, vld1q_s32(zero), x->sums[(row + r) * groups + g]);
                const float32x4_t by = vmulq_n_f32(scale, x->scales[(row + r) * groups + g] * unit);
                sum[r][o] = vaddq_f32(sum[r][o], vmulq_f32(vcvtq_f32_s32(exact), by));
            }
        }
    }
    EACH(r, rows) EACH(o, 4) vst1q_f32(y + (row + r) * y_row + panel * PANEL + o * 4, sum[r][o]);
}

#include "kernels_body.h"
