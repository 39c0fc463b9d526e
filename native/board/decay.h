/* exp(x) for x <= 0 on LANES doubles at once, LANES being the includer's: to about a unit in the last place, and to the
 * same bits on every processor and for any LANES. Cloud and board need no more of it: docs/sampling.md. */
#ifndef OUTRIDER_DECAY_H
#define OUTRIDER_DECAY_H

#include <stdint.h>

#define DEEP 64.0         /* nothing is told apart below -DEEP */
#define WEIGHT_ONE 0x1p32 /* the weight of the best token in top-p; all weights are integers */
#define ROUNDER 0x1.8p52  /* what is added to it is rounded to an integer, and stands in the last bits */

typedef uint64_t words64 __attribute__((vector_size(LANES * 8)));
typedef double reals __attribute__((vector_size(LANES * 8)));

/* x = k log 2 + r with |r| <= log(2) / 2; exp(r) by Taylor's polynomial, whose next term is below 2^-57. */
static inline __attribute__((always_inline)) reals decay(reals x) {
    const reals none = {0}, deep = none - DEEP;
    const words64 within = (words64)(x > deep);
    x = (reals)(((words64)x & within) | ((words64)deep & ~within));
    const reals shifted = x * 0x1.71547652b82fep0 + ROUNDER, k = shifted - ROUNDER;
    const reals r = (x - k * 0x1.62e42fefa38p-1) - k * 0x1.ef35793c7673p-45;
    reals sum = none + 1.0 / 6227020800.0;
    sum = sum * r + 1.0 / 479001600.0;
    sum = sum * r + 1.0 / 39916800.0;
    sum = sum * r + 1.0 / 3628800.0;
    sum = sum * r + 1.0 / 362880.0;
    sum = sum * r + 1.0 / 40320.0;
    sum = sum * r + 1.0 / 5040.0;
    sum = sum * r + 1.0 / 720.0;
    sum = sum * r + 1.0 / 120.0;
    sum = sum * r + 1.0 / 24.0;
    sum = sum * r + 1.0 / 6.0;
    sum = sum * r + 0.5;
    sum = (r + r * r * sum) + 1.0;
    return (reals)((words64)sum + ((words64)shifted << 52));
}

/* Weights in top-p of tokens that lie so far below the peak. */
static inline __attribute__((always_inline)) reals weight(reals below) {
    return (decay(below) * WEIGHT_ONE + ROUNDER) - ROUNDER;
}

#endif
