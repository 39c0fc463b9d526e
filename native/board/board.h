/* What the board's library offers: read by the compiler and, as it stands, by cffi. Only plain declarations;
 * lines that begin with a # are the compiler's alone. Arrays are dense, shapes stand in brackets. */
#ifndef OUTRIDER_BOARD_H
#define OUTRIDER_BOARD_H
#include <stdint.h>
#pragma GCC visibility push(default)

/* Why the latest call on this thread that returned an error did so: one clause, valid until the next one. */
const char *board_error(void);

/* Take an instruction set by its name (scalar, avx2, avx512, neon, dotprod), or the best there is for NULL.
 * 0, or -1 where this processor or this build has no such set. Not while another thread is in the library. */
int board_use(const char *name);

/* The name of the set that is in use. */
const char *board_isa(void);

/* -- noise.c: docs/sampling.md ---------------------------------------------------------------------------------- */

/* The Gumbel numbers of 32-bit words [m], multiples of 2^-20. */
void noise_of(const uint32_t *words, int64_t m, double *numbers);

/* The Gumbel numbers of token ids [m] at a position. */
void noise_at(uint64_t seed, uint64_t position, const int32_t *ids, int64_t m, double *numbers);

/* -- rank.c: the tokens most likely to be drawn -------------------------------------------------------------------- */

/* Room for logits [most]. NULL where there is no memory. Used by one thread at a time. */
typedef struct ranker ranker;
ranker *ranker_alloc(int32_t most);
void ranker_free(ranker *r);

/* What `protocol.sampling.rank` gives: at most n of the tokens that logits [m] are of, best first, with their
 * probabilities. ids: [m], ascending, the tokens' own; NULL where logit i is of token i. n, m >= 1; temperature 0 is
 * greedy, top_k 0 and top_p 1 are off. How many there are, or -1 for logits from which no token can be chosen. */
int32_t ranker_rank(ranker *r, const float *logits, const int32_t *ids, int32_t m, uint64_t seed, uint64_t position,
                    double temperature, int32_t top_k, double top_p, int32_t n, int32_t *best, double *probability);

#pragma GCC visibility pop
#endif
