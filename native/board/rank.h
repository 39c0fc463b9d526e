/* What rank.c has of each instruction set: whole passes over the logits, in chunks of CHUNK tokens.
 *
 * Every set gives the same bits: the sums have ACCUMULATORS partial sums each, in the order of the tokens. */
#ifndef OUTRIDER_RANK_H
#define OUTRIDER_RANK_H

#include <stdint.h>

#include "noise.h"

enum { CHUNK = 32, ACCUMULATORS = 16 };

typedef struct {
    /* maxima [m / CHUNK, rounded up]: the greatest logit of each chunk. The greatest of all, NaN where there is one. */
    float (*peaks)(const float *logits, int32_t m, float *maxima);

    /* The sum over all tokens of exp(logit / temperature - peak), and of their weights in top-p. Chunks whose greatest
     * logit is below `floor` are left out. */
    double (*mass)(const float *logits, const float *maxima, int32_t m, float floor, double temperature, double peak);
    double (*weights)(const float *logits, const float *maxima, int32_t m, float floor, double temperature, double peak);

    /* Bit i of the result: logit i of logits [CHUNK] is at least `floor`. */
    uint32_t (*reach)(const float *logits, float floor);

    /* words [CHUNK]: those of the CHUNK tokens from id `first` on, a multiple of CHUNK; or of ids [CHUNK]. Bit i of
     * the result: token i may reach `least`, its logit times `slope` and its noise together. */
    uint32_t (*near)(const float *logits, const noise *from, int32_t first, const int32_t *ids, float slope, float least,
                     uint32_t *words);
} rank_kernels;

extern const rank_kernels rank_scalar, rank_avx2, rank_avx512, rank_neon;

#endif
