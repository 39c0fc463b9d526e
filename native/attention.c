/* Attention of a step's few new rows, each session's over its own keys: one call a layer for all sessions.
 *
 * Why C: a step of a server has a row or a chain of some rows for each of many sessions. With one library call for
 * each session and layer, making the calls takes longer than what they do. The twin is `attend` of
 * cloud/engines/ragged.py, which long chunks of a prompt still take.
 *
 * The softmax runs over blocks of keys with a running maximum (Milakov and Gimelshein, 1805.02867). float32.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 64, MOST_QUERIES = 128, MOST_WIDTH = 256 };

typedef void (*run_in_parallel)(void (*)(void *), void *, unsigned threads, unsigned flags); /* libgomp's GOMP_parallel */

/* One session's rows. sees: [rows][rows], whether a row sees a new row; NULL: each row sees those up to itself. */
typedef struct {
    float *kv;           /* [layers][2][slots][key_heads][width] */
    int64_t slots;       /* of the slab */
    int64_t past;        /* slots before the new rows' */
    int64_t start, rows; /* the new rows among all rows of the pass */
    const uint8_t *sees;
} attention_span;

/* query, key, value: [rows][heads][width], the heads of a row side by side, rows `*_row` floats apart; out: dense. */
typedef struct {
    const attention_span *spans;
    int64_t num_spans, layer, key_heads, groups, width;
    const float *query, *key, *value;
    int64_t query_row, key_row, value_row;
    float *out;
    float scale;
    int64_t next;
} attention_job;

static inline float exp_of_negative(float x) {
    /* 2^n * 2^f for x / ln 2 = n + f, |f| <= 1/2, by Taylor's polynomial in f * ln 2; below -87 it is 0. */
    float n = rintf(x * 1.44269504f);
    float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * f + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    union { int32_t i; float f; } power = {.i = ((int32_t)(n < -126.0f ? -126.0f : n) + 127) << 23};
    return x < -87.0f ? 0.0f : p * power.f;
}

static inline __attribute__((always_inline)) void one_head(
    const attention_job *job, const attention_span *span, int64_t head, const int64_t width
) {
    const int64_t groups = job->groups, queries = span->rows * groups, slot = job->key_heads * width;
    float *keys = span->kv + job->layer * 2 * span->slots * slot + head * width;
    float *values = keys + span->slots * slot;
    for (int64_t r = 0; r < span->rows; r++) {
        memcpy(keys + (span->past + r) * slot, job->key + (span->start + r) * job->key_row + head * width, width * 4);
        memcpy(values + (span->past + r) * slot, job->value + (span->start + r) * job->value_row + head * width, width * 4);
    }
    float most[MOST_QUERIES], sum[MOST_QUERIES], mixed[MOST_QUERIES * width];
    for (int64_t i = 0; i < queries; i++) {
        most[i] = -INFINITY;
        sum[i] = 0.0f;
    }
    memset(mixed, 0, queries * width * 4);
    const int64_t end = span->past + span->rows;
    for (int64_t from = 0; from < end; from += BLOCK) {
        for (int64_t i = 0; i < queries; i++) {
            const int64_t r = i / groups;
            const float *q = job->query + (span->start + r) * job->query_row + (head * groups + i % groups) * width;
            int64_t to = from + BLOCK < end ? from + BLOCK : end;
            if (!span->sees && to > span->past + r + 1)
                to = span->past + r + 1;
            if (to <= from)
                continue;
            const int64_t count = to - from;
            const float *restrict k = keys + from * slot, *restrict v = values + from * slot;
            float score[BLOCK], top = most[i];
            for (int64_t j = 0; j < count; j++) {
                float dot = 0.0f;
                for (int64_t d = 0; d < width; d++)
                    dot += q[d] * k[j * slot + d];
                score[j] = dot * job->scale;
            }
            if (span->sees)
                for (int64_t j = 0; j < count; j++)
                    if (from + j >= span->past && !span->sees[r * span->rows + from + j - span->past])
                        score[j] = -INFINITY;
            for (int64_t j = 0; j < count; j++)
                top = score[j] > top ? score[j] : top;
            if (top == -INFINITY)
                continue; /* it sees nothing in this block, nor before */
            const float faded = most[i] == -INFINITY ? 0.0f : exp_of_negative(most[i] - top);
            float total = 0.0f;
            for (int64_t j = 0; j < count; j++) {
                score[j] = exp_of_negative(score[j] - top);
                total += score[j];
            }
            sum[i] = sum[i] * faded + total;
            most[i] = top;
            float *restrict m = mixed + i * width;
            float sums[width];
            for (int64_t d = 0; d < width; d++)
                sums[d] = m[d] * faded;
            for (int64_t j = 0; j < count; j++)
                for (int64_t d = 0; d < width; d++)
                    sums[d] += score[j] * v[j * slot + d];
            memcpy(m, sums, width * 4);
        }
    }
    for (int64_t i = 0; i < queries; i++) {
        float *out = job->out + ((span->start + i / groups) * job->key_heads * groups + head * groups + i % groups) * width;
        for (int64_t d = 0; d < width; d++)
            out[d] = mixed[i * width + d] / sum[i];
    }
}

static void work(void *shared) {
    attention_job *job = shared;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (task >= job->num_spans * job->key_heads)
            return;
        const attention_span *span = job->spans + task / job->key_heads;
        switch (job->width) {
        case 64: one_head(job, span, task % job->key_heads, 64); break;
        case 128: one_head(job, span, task % job->key_heads, 128); break;
        default: one_head(job, span, task % job->key_heads, job->width);
        }
    }
}

/* Puts the new rows' keys and values into the slabs and writes out [rows][heads][width] for the rows of all spans. */
void attention_run(attention_job *job, run_in_parallel parallel, unsigned threads) {
    job->next = 0;
    if (parallel && threads > 1)
        parallel(work, job, threads, 0);
    else
        work(job);
}
