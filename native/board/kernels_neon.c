/* ARMv8.0 (Cortex-A53, A72): products of 8 bits to 16, added in pairs to 32. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define ISA "neon"
#define NAME(what) what##_neon
#define add_four(sum, w, a, lane) (sum = plus_four(sum, w, vdupq_laneq_s32(vreinterpretq_s32_s8(a), lane)))

static inline __attribute__((always_inline)) int32x4_t plus_four(int32x4_t sum, int8x16_t w, int32x4_t four) {
    const int8x16_t a = vreinterpretq_s8_s32(four);
    const int32x4_t first = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(a))); /* [output 0, 0, 1, 1] */
    const int32x4_t second = vpaddlq_s16(vmull_high_s8(w, a));
    return vaddq_s32(sum, vpaddq_s32(first, second));
}

#include "neon_body.h"
#endif
