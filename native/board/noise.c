/* The noise that target and drafters share, one token at a time; `protocol/noise.py` is the twin.
 *
 * Any logarithm that is good to a few units in the last place rounds every word to the same multiple of 2^-20. */

#include <math.h>

#include "board.h"
#include "noise.h"

noise noise_start(uint64_t seed, uint64_t position) {
    noise made = {.low = (uint32_t)position, .high = (uint32_t)(position >> 32)};
    for (uint32_t i = 0; i < PHILOX_ROUNDS; i++) {
        made.key[i][0] = (uint32_t)seed + i * 0x9E3779B9u;
        made.key[i][1] = (uint32_t)(seed >> 32) + i * 0xBB67AE85u;
    }
    return made;
}

uint32_t noise_word(const noise *from, int32_t id) {
    uint32_t c[4] = {(uint32_t)id / 4, from->low, from->high, 0};
    for (int i = 0; i < PHILOX_ROUNDS; i++) {
        const uint64_t p0 = (uint64_t)c[0] * PHILOX_M0, p1 = (uint64_t)c[2] * PHILOX_M1;
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ from->key[i][0];
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ from->key[i][1];
        c[3] = (uint32_t)p0;
    }
    return c[id & 3];
}

double noise_number(uint32_t word) {
    const double uniform = (word + 0.5) * 0x1p-32;
    return rint(-log(-log(uniform)) * 0x1p20) * 0x1p-20;
}

void noise_of(const uint32_t *words, int64_t m, double *numbers) {
    for (int64_t i = 0; i < m; i++)
        numbers[i] = noise_number(words[i]);
}

void noise_at(uint64_t seed, uint64_t position, const int32_t *ids, int64_t m, double *numbers) {
    const noise from = noise_start(seed, position);
    for (int64_t i = 0; i < m; i++)
        numbers[i] = noise_number(noise_word(&from, ids[i]));
}
