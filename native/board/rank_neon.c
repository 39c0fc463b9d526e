/* Ranking with NEON, which every 64-bit ARM has. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define KERNELS rank_neon
#define LANES 2
#define products(a, factor) ((words64)vmull_u32(vmovn_u64((uint64x2_t)(a)), vdup_n_u32(factor)))
#define larger(a, b) ((floats)vmaxq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define largest(a) vmaxvq_f32((float32x4_t)(a))
#define below(a, b) vaddvq_u32(vandq_u32(vcltq_f32((float32x4_t)(a), (float32x4_t)(b)), (uint32x4_t){1, 2, 4, 8}))

#include "rank_body.h"
#endif
