/* The shared noise, as the sources that need it see it. Philox4x32-10: J. K. Salmon et al., SC 2011. */
#ifndef OUTRIDER_NOISE_H
#define OUTRIDER_NOISE_H

#include <stdint.h>

enum { PHILOX_ROUNDS = 10 };
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u

/* A seed's round keys, and the counter's words that are a position's. */
typedef struct {
    uint32_t key[PHILOX_ROUNDS][2];
    uint32_t low, high;
} noise;

noise noise_start(uint64_t seed, uint64_t position);

/* The word of a token. */
uint32_t noise_word(const noise *from, int32_t id);

/* The Gumbel number of a word. */
double noise_number(uint32_t word);

#endif
