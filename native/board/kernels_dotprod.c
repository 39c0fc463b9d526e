/* ARMv8.2 with dot products (Cortex-A76, A78AE): 16 products of 8 bits an instruction. */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>

#define ISA "dotprod"
#define NAME(what) what##_dotprod
#define add_four(sum, w, a, lane) (sum = vdotq_laneq_s32(sum, w, a, lane))

#include "neon_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
