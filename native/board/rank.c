/* The tokens most likely to be drawn, of a whole vocabulary; `protocol.sampling.rank` is the twin.
 *
 * Why C: a vocabulary has 150,000 tokens and a drafter ranks it for every guess. Most tokens cannot be among the best,
 * which bounds show before any logarithm is taken: of a chunk's greatest logit, of the noise of a word.
 * What a bound leaves out never changes the result. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "board.h"
#include "internal.h"
#define LANES 1
#include "decay.h"
#include "rank.h"

#define WEIGHTLESS 24.0 /* below the peak, weights are 0 */
static const double DEPTHS[] = {7, 11, 15, 19, INFINITY}; /* below the peak: most nuclei end above the first ones */
#define NOTHING 50.0   /* below the peak: no sum of probabilities shows whether 2^21 such tokens are in it */
#define MARGIN 1e-6    /* relative, of bounds that are computed in float32 */
#define MOST_SLOPE 1e30f

/* An item of a selection. key: the greatest value first, then the lowest place, as one ascending integer. */
typedef struct {
    uint64_t key;
    double weight;
} item;

typedef struct {
    double score;
    int32_t id;
    float value; /* the logit */
} guess;

struct ranker {
    const rank_kernels *kernels;
    float *maxima; /* [chunks] */
    item *items;   /* [most] */
    guess *heap;   /* [most] the best so far, the worst of them at the root */
    float *values; /* [most + CHUNK] the survivors' logits */
    int32_t *ids;  /* [most + CHUNK] and ids */
    int32_t num, room;
};

ranker *ranker_alloc(int32_t most) {
    ranker *r = calloc(1, sizeof *r);
    if (r == NULL)
        return NULL;
    const size_t chunks = most / CHUNK + 1, all = (size_t)most + CHUNK;
    r->maxima = malloc(chunks * sizeof *r->maxima);
    r->items = malloc(all * sizeof *r->items);
    r->heap = malloc(all * sizeof *r->heap);
    r->values = malloc(all * sizeof *r->values);
    r->ids = malloc(all * sizeof *r->ids);
    if (r->maxima && r->items && r->heap && r->values && r->ids)
        return r;
    ranker_free(r);
    return NULL;
}

void ranker_free(ranker *r) {
    if (r == NULL)
        return;
    free(r->maxima);
    free(r->items);
    free(r->heap);
    free(r->values);
    free(r->ids);
    free(r);
}

static const rank_kernels *kernels(void) {
    switch (isa()) {
#if defined(__x86_64__)
    case ISA_AVX512:
        return &rank_avx512;
    case ISA_AVX2:
        return &rank_avx2;
#elif defined(__aarch64__)
    case ISA_NEON:
    case ISA_DOTPROD:
        return &rank_neon;
#endif
    default:
        return &rank_scalar;
    }
}

/* -- the best n so far ------------------------------------------------------------------------------------------- */

static int is_worse(const guess *a, const guess *b) {
    return a->score < b->score || (a->score == b->score && a->id > b->id);
}

static void sink(guess *heap, int32_t num, int32_t at) {
    const guess one = heap[at];
    for (int32_t child; (child = 2 * at + 1) < num; at = child) {
        child += child + 1 < num && is_worse(&heap[child + 1], &heap[child]);
        if (!is_worse(&heap[child], &one))
            break;
        heap[at] = heap[child];
    }
    heap[at] = one;
}

static void offer(ranker *r, double score, int32_t id, float value) {
    const guess one = {score, id, value};
    if (r->num == r->room) {
        if (is_worse(&r->heap[0], &one)) {
            r->heap[0] = one;
            sink(r->heap, r->num, 0);
        }
        return;
    }
    int32_t at = r->num++;
    for (; at && is_worse(&one, &r->heap[(at - 1) / 2]); at = (at - 1) / 2)
        r->heap[at] = r->heap[(at - 1) / 2];
    r->heap[at] = one;
}

/* Best first, where the heap was. */
static void sort(ranker *r) {
    for (int32_t left = r->num; left > 1;) {
        const guess worst = r->heap[0];
        r->heap[0] = r->heap[--left];
        r->heap[left] = worst;
        sink(r->heap, left, 0);
    }
}

/* -- which tokens take part ------------------------------------------------------------------------------------- */

static uint64_t key_of(float value, int32_t place) {
    value += 0.0f; /* makes one zero of two */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)~ascending << 32 | (uint32_t)place;
}

static int32_t place_of(item one) {
    return (int32_t)(uint32_t)one.key;
}

static uint64_t median(uint64_t a, uint64_t b, uint64_t c) {
    return a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
}

/* Bring to the front, in no order, the items that weights of less than `share` come before in the order of their keys:
 * how many they are. */
static int32_t cut(item *items, int32_t num, double share) {
    int32_t first = 0;
    double before = 0; /* the weights before `first`, all of which stay */
    while (num - first > 1) {
        const uint64_t pivot = median(items[first].key, items[first + (num - first) / 2].key, items[num - 1].key);
        int32_t low = first, high = num - 1;
        double left = before;
        for (;;) { /* keys below the pivot go to the left; it is one of them, and no key is there twice */
            while (items[low].key < pivot)
                left += items[low++].weight;
            while (items[high].key > pivot)
                high--;
            if (low >= high)
                break;
            const item one = items[low];
            items[low] = items[high];
            items[high] = one;
        }
        if (left >= share)
            num = low; /* the pivot stays out, and so does what is behind it */
        else {
            before = left + items[low].weight;
            first = low + 1;
            if (before >= share)
                return first;
        }
    }
    return first + (num - first == 1 && before < share);
}

/* All items above minus infinity, with a logit of at least `floor`. */
static int32_t gather(ranker *r, const float *logits, int32_t m, float floor) {
    int32_t num = 0;
    for (int32_t start = 0; start < m; start += CHUNK) {
        if (r->maxima[start / CHUNK] < floor)
            continue;
        uint32_t found = UINT32_MAX >> (m - start < CHUNK ? CHUNK - (m - start) : 0);
        if (found == UINT32_MAX)
            found = r->kernels->reach(logits + start, floor);
        for (; found; found &= found - 1) {
            const int32_t i = start + __builtin_ctz(found);
            r->items[num].key = key_of(logits[i], i);
            num += logits[i] >= floor && logits[i] > -INFINITY;
        }
    }
    return num;
}

/* A logit that at least k tokens reach: the k-th greatest of the chunks' greatest. */
static float reached_by(ranker *r, int32_t chunks, int32_t k) {
    if (k >= chunks)
        return -INFINITY;
    for (int32_t c = 0; c < chunks; c++)
        r->items[c] = (item){key_of(r->maxima[c], c), 1};
    const int32_t kept = cut(r->items, chunks, k);
    float floor = INFINITY;
    for (int32_t i = 0; i < kept; i++)
        floor = fminf(floor, r->maxima[place_of(r->items[i])]);
    return floor;
}

static double weigh(ranker *r, const float *logits, int32_t num, double temperature, double peak) {
    double sum = 0;
    for (int32_t i = 0; i < num; i++)
        sum += r->items[i].weight = weight((reals){logits[place_of(r->items[i])] / temperature - peak})[0];
    return sum;
}

/* What top-k, then top-p leave: that many items, in no order. */
static int32_t survivors(
    ranker *r, const float *logits, int32_t m, double temperature, double peak, int32_t top_k, double top_p
) {
    if (top_k) {
        int32_t num = gather(r, logits, m, reached_by(r, (m + CHUNK - 1) / CHUNK, top_k));
        for (int32_t i = 0; i < num; i++)
            r->items[i].weight = 1;
        num = cut(r->items, num, top_k);
        return top_p < 1 ? cut(r->items, num, top_p * weigh(r, logits, num, temperature, peak)) : num;
    }
    const float weightless = (float)((peak - WEIGHTLESS) * temperature);
    const double share = top_p * r->kernels->weights(logits, r->maxima, m, weightless, temperature, peak);
    int32_t num = 0;
    double sum = 0;
    for (size_t i = 0; i < sizeof DEPTHS / sizeof *DEPTHS && sum < share; i++) {
        num = gather(r, logits, m, (float)((peak - DEPTHS[i]) * temperature));
        sum = weigh(r, logits, num, temperature, peak);
    }
    return cut(r->items, num, share);
}

/* -- the ranking ------------------------------------------------------------------------------------------------ */

static void rank_greedy(ranker *r, const float *logits, const int32_t *ids, int32_t m) {
    for (int32_t start = 0; start < m; start += CHUNK) {
        if (r->num == r->room && r->maxima[start / CHUNK] <= r->heap[0].value)
            continue; /* equals come later, and lose */
        const int32_t end = m - start < CHUNK ? m : start + CHUNK;
        for (int32_t i = start; i < end; i++)
            if (logits[i] > -INFINITY)
                offer(r, logits[i], ids ? ids[i] : i, logits[i]);
    }
}

static void rank_noised(
    ranker *r, const float *logits, const int32_t *ids, int32_t m, const noise *from, double temperature
) {
    const double most_noise = noise_number(UINT32_MAX);
    const float slope = (float)(1 / temperature);
    const int is_plain = slope <= MOST_SLOPE;
    float floor = -INFINITY, least = -INFINITY; /* a logit, a score: what is below them cannot be among the best */
    for (int32_t start = 0; start < m; start += CHUNK) {
        if (r->maxima[start / CHUNK] < floor)
            continue;
        float chunk[CHUNK];
        int32_t padded[CHUNK];
        uint32_t words[CHUNK];
        const float *x = logits + start;
        const int32_t *own = ids ? ids + start : NULL, num = m - start < CHUNK ? m - start : CHUNK;
        if (num < CHUNK) {
            for (int i = 0; i < CHUNK; i++) {
                chunk[i] = i < num ? x[i] : -INFINITY;
                padded[i] = own && i < num ? own[i] : 0;
            }
            x = chunk;
            own = own ? padded : NULL;
        }
        uint32_t found = r->kernels->near(x, from, start, own, is_plain ? slope : 1, is_plain ? least : -INFINITY, words);
        for (; found; found &= found - 1) {
            const int i = __builtin_ctz(found);
            if (x[i] > -INFINITY)
                offer(r, (double)x[i] / temperature + noise_number(words[i]), own ? own[i] : start + i, x[i]);
        }
        if (r->num == r->room) {
            const double worst = r->heap[0].score, slack = MARGIN * fabs(worst) + 1e-3;
            least = (float)(worst - slack);
            floor = (float)((worst - most_noise - slack) * temperature - MARGIN * fabs(worst * temperature));
        }
    }
}

int32_t ranker_rank(
    ranker *r, const float *logits, const int32_t *ids, int32_t m, uint64_t seed, uint64_t position, double temperature,
    int32_t top_k, double top_p, int32_t n, int32_t *best, double *probability
) {
    r->kernels = kernels();
    const double divisor = temperature > 0 ? temperature : 1;
    const double peak = (double)r->kernels->peaks(logits, m, r->maxima) / divisor;
    if (!isfinite(peak))
        return fail(-1, "the greatest of %d logits over the temperature %g is %g", m, divisor, peak);
    if (temperature > 0 && (top_k || top_p < 1)) {
        const int32_t num = survivors(r, logits, m, divisor, peak, top_k, top_p);
        for (int32_t i = 0; i < num; i++) {
            const int32_t place = place_of(r->items[i]);
            r->values[i] = logits[place];
            r->ids[i] = ids ? ids[place] : place;
        }
        logits = r->values, ids = r->ids, m = num;
        r->kernels->peaks(logits, m, r->maxima);
    }
    r->num = 0;
    r->room = n < m ? n : m;
    if (temperature > 0) {
        const noise from = noise_start(seed, position);
        rank_noised(r, logits, ids, m, &from, temperature);
    } else
        rank_greedy(r, logits, ids, m);
    sort(r);
    const float floor = (float)((peak - NOTHING) * divisor);
    const double all = r->kernels->mass(logits, r->maxima, m, floor, divisor, peak);
    for (int32_t i = 0; i < r->num; i++) {
        best[i] = r->heap[i].id;
        probability[i] = exp((double)r->heap[i].value / divisor - peak) / all;
    }
    return r->num;
}
