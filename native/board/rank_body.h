/* The kernels of rank.h, on vectors of LANES * 8 bytes. Who includes it says first
 *
 *   KERNELS                the table's name
 *   LANES                  64-bit lanes of a vector
 *   products(a, factor)    words64: the lanes' lower halves times a word
 *   larger(a, b)           floats: of each lane the larger
 *   largest(a)             the largest lane
 *   below(a, b)            bit i: a[i] < b[i] */

#include <string.h>

#include "decay.h"
#include "rank.h"

enum { FLOATS = 2 * LANES, BLOCKS = CHUNK / 4 }; /* Philox gives the words of four tokens */

typedef float floats __attribute__((vector_size(LANES * 8)));
typedef int32_t ints __attribute__((vector_size(LANES * 8)));
typedef uint32_t words32 __attribute__((vector_size(LANES * 8)));
typedef float half_floats __attribute__((vector_size(LANES * 4)));

static inline __attribute__((always_inline)) floats load(const float *x) {
    floats loaded;
    memcpy(&loaded, x, sizeof loaded);
    return loaded;
}

/* CHUNK logits from `start` on; those that are not there are minus infinity. */
static inline __attribute__((always_inline)) const float *whole(const float *logits, int32_t start, int32_t m, float *room) {
    if (m - start >= CHUNK)
        return logits + start;
    for (int i = 0; i < CHUNK; i++)
        room[i] = i < m - start ? logits[start + i] : -__builtin_inff();
    return room;
}

static float peaks(const float *logits, int32_t m, float *maxima) {
    float peak = -__builtin_inff(), room[CHUNK];
    ints unequal = {0};
    for (int32_t start = 0; start < m; start += CHUNK) {
        const float *x = whole(logits, start, m, room);
        floats most = load(x);
        for (int i = 0; i < CHUNK; i += FLOATS) {
            const floats some = load(x + i);
            unequal |= some != some;
            most = larger(some, most);
        }
        const float found = largest(most);
        maxima[start / CHUNK] = found;
        peak = found > peak ? found : peak;
    }
    int any = 0;
    for (int i = 0; i < FLOATS; i++)
        any |= unequal[i];
    return any ? __builtin_nanf("") : peak;
}

static inline __attribute__((always_inline)) double sum_of(
    const float *logits, const float *maxima, int32_t m, float floor, double temperature, double peak,
    const int weights, const int divide
) {
    reals sums[ACCUMULATORS / LANES] = {0};
    float room[CHUNK];
    for (int32_t start = 0; start < m; start += CHUNK) {
        if (maxima[start / CHUNK] < floor)
            continue;
        const float *x = whole(logits, start, m, room);
        for (int i = 0; i < CHUNK; i += LANES) {
            half_floats some;
            memcpy(&some, x + i, sizeof some);
            const reals logit = __builtin_convertvector(some, reals), under = (divide ? logit / temperature : logit) - peak;
            sums[i % ACCUMULATORS / LANES] += weights ? weight(under) : decay(under);
        }
    }
    double sum = 0;
    for (int i = 0; i < ACCUMULATORS; i++)
        sum += sums[i / LANES][i % LANES];
    return sum;
}

static double mass(const float *logits, const float *maxima, int32_t m, float floor, double temperature, double peak) {
    if (temperature == 1) /* a division takes as long as a third of the rest */
        return sum_of(logits, maxima, m, floor, 1, peak, 0, 0);
    return sum_of(logits, maxima, m, floor, temperature, peak, 0, 1);
}

static double weights(const float *logits, const float *maxima, int32_t m, float floor, double temperature, double peak) {
    if (temperature == 1)
        return sum_of(logits, maxima, m, floor, 1, peak, 1, 0);
    return sum_of(logits, maxima, m, floor, temperature, peak, 1, 1);
}

static uint32_t reach(const float *logits, float floor) {
    const floats least = (floats){0} + floor;
    uint32_t found = 0;
    for (int i = 0; i < CHUNK; i += FLOATS)
        found |= (uint32_t)below(load(logits + i), least) << i;
    return ~found;
}

/* Of LANES blocks: c[0] comes with their numbers, and c goes with their words in the lanes' lower halves. */
static inline __attribute__((always_inline)) void philox(const noise *from, words64 c[4]) {
    c[1] = (words64){0} + from->low;
    c[2] = (words64){0} + from->high;
    c[3] = (words64){0};
    for (int i = 0; i < PHILOX_ROUNDS; i++) {
        const words64 p0 = products(c[0], PHILOX_M0), p1 = products(c[2], PHILOX_M1);
        c[0] = (p1 >> 32) ^ c[1] ^ (uint64_t)from->key[i][0];
        c[1] = p1;
        c[2] = (p0 >> 32) ^ c[3] ^ (uint64_t)from->key[i][1];
        c[3] = p0;
    }
}

static inline __attribute__((always_inline)) void words_from(const noise *from, int32_t first, uint32_t *words) {
    words64 lane = {0};
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    for (int b = 0; b < BLOCKS; b += LANES) {
        words64 c[4] = {lane + ((uint32_t)first / 4 + b)};
        philox(from, c);
        const words64 low = (words64){0} + 0xFFFFFFFFu;
        const words64 even = (c[0] & low) | (c[1] << 32), odd = (c[2] & low) | (c[3] << 32);
        for (int i = 0; i < LANES; i++) {
            const uint64_t pair[2] = {even[i], odd[i]};
            memcpy(words + 4 * (b + i), pair, sizeof pair);
        }
    }
}

static inline __attribute__((always_inline)) void words_of(const noise *from, const int32_t *ids, uint32_t *words) {
    for (int t = 0; t < CHUNK; t += LANES) {
        words64 c[4] = {{0}};
        uint64_t lanes[4][LANES];
        for (int i = 0; i < LANES; i++)
            c[0][i] = (uint32_t)ids[t + i] / 4;
        philox(from, c);
        memcpy(lanes, c, sizeof lanes);
        for (int i = 0; i < LANES; i++)
            words[t + i] = (uint32_t)lanes[ids[t + i] & 3][i];
    }
}

/* -log(-log u) <= -log(1 - u), and log2(x) is at least what its exponent and fraction say as one number. */
static uint32_t near(
    const float *logits, const noise *from, int32_t first, const int32_t *ids, float slope, float least, uint32_t *words
) {
    if (ids)
        words_of(from, ids, words);
    else
        words_from(from, first, words);
    const float two = 0.69314718f, step = 0x1p-23f * two; /* log 2, and of it what a float's last bit is worth */
    const floats bound = (floats){0} + least;
    uint32_t out = 0;
    for (int i = 0; i < CHUNK; i += FLOATS) {
        words32 some;
        memcpy(&some, words + i, sizeof some);
        const floats left = __builtin_convertvector((ints)(~some >> 1), floats); /* (1 - u) 2^31 */
        const floats most = (31 + 127) * two - __builtin_convertvector((ints)left, floats) * step;
        out |= (uint32_t)below(load(logits + i) * slope + most, bound) << i;
    }
    return ~out;
}

const rank_kernels KERNELS = {peaks, mass, weights, reach, near};
