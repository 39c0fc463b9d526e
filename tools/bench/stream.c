/* Reads memory from end to end, as fast as a core can ask for it: what weights that are read once a token cannot beat.
   C, because NumPy's sums compute more than they read. */

#include <stddef.h>
#include <stdint.h>

/* words: [num]; ahead: bytes that are asked for before they are needed, 0 leaves it to the processor. */
uint64_t stream_read(const uint64_t *words, size_t num, size_t ahead)
{
    uint64_t sums[32] = {0};
    for (size_t i = 0; i + 32 <= num; i += 32) {
        if (ahead)
            for (int line = 0; line < 4; line++)
                __builtin_prefetch((const char *)(words + i) + ahead + 64 * line);
        for (int j = 0; j < 32; j++)
            sums[j] += words[i + j];
    }
    uint64_t sum = 0;
    for (int j = 0; j < 32; j++)
        sum += sums[j];
    return sum;
}
