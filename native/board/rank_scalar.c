/* Ranking on any processor. */
#define KERNELS rank_scalar
#define LANES 1
#define products(a, factor) (((a) & 0xFFFFFFFFu) * (uint64_t)(factor))
#define larger(a, b) ((floats){largest(((floats){(a)[0], (b)[0]})), largest(((floats){(a)[1], (b)[1]}))})
#define largest(a) ((a)[0] > (a)[1] ? (a)[0] : (a)[1])
#define below(a, b) (((a)[0] < (b)[0]) | ((a)[1] < (b)[1]) << 1)
#include "rank_body.h"
