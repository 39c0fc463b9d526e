/* The plain way, for any processor. */
#include "kernels.h"

enum { BLOCK = 4 };
#define ISA "scalar"
#define NAME(what) what##_scalar

float board_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    union { uint32_t bits; float value; } to = {sign | (exponent + 112) << 23 | fraction << 13};
    if (exponent == 0)
        to.value = (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    else if (exponent == 31)
        to.bits = sign | 0x7f800000 | fraction << 13;
    return to.value;
}

static inline void some_rows(
    const board_matrix *m, const fixed *x, int32_t row, int32_t panel, float *y, int64_t y_row, const int rows
) {
    const int32_t groups = m->k / m->group, per = m->bits == 4 ? 2 : 1; /* inputs a byte */
    const uint8_t *w = m->packed + (int64_t)panel * m->k * PANEL / per;
    const uint16_t *scales = m->scales + (int64_t)panel * groups * PANEL;
    const uint8_t *zeros = m->zeros + (int64_t)panel * groups * PANEL;
    const int32_t steps = m->bits == 4 ? ZERO_STEPS : 1;
    const float unit = 1.0f / (float)steps;
    for (int r = 0; r < rows; r++) {
        const int8_t *planes = x->planes + (int64_t)(row + r) * m->k * 2;
        const uint8_t *at = w;
        float sum[PANEL] = {0};
        for (int32_t g = 0; g < groups; g++) {
            int32_t total[PANEL] = {0};
            for (int32_t step = 0; step < m->group / 4 / per; step++, at += 64)
                for (int half_step = 0; half_step < per; half_step++, planes += 8)
                    for (int o = 0; o < PANEL; o++)
                        for (int i = 0; i < 4; i++) {
                            const int32_t q = per == 1 ? at[o * 4 + i] : at[o * 4 + i] >> 4 * half_step & 15;
                            total[o] += q * (planes[i] * 256 + planes[4 + i]);
                        }
            for (int o = 0; o < PANEL; o++) {
                const float scale = board_half(scales[g * PANEL + o]) * (x->scales[(row + r) * groups + g] * unit);
                const int32_t exact = total[o] * steps - zeros[g * PANEL + o] * x->sums[(row + r) * groups + g];
                sum[o] = sum[o] + (float)exact * scale;
            }
        }
        for (int o = 0; o < PANEL; o++)
            y[(row + r) * y_row + panel * PANEL + o] = sum[o];
    }
}

#include "kernels_body.h"
