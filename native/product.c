/* Rows times a weight matrix: x [rows][in] * weight [out][in]^T + bias. float32.
 *
 * Why C: a server's step has some dozens of rows. A library made for thousands reaches a third of the processor's
 * speed there; here the weights are read once, in the order in which they lie, for up to ROWS rows in registers.
 * Each output is the sum over `in` in its order, with fused multiply-adds: a row's bits depend on no other row.
 *
 * The weight lies in panels, [out / PANEL][in][PANEL], the last one filled up with zeros. The twin is `F.linear`.
 */

#include <stdint.h>
#include <string.h>

#ifndef __clang__ /* which takes the sums of vectors as they are written in any case */
#pragma GCC optimize("no-associative-math")
#endif

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 12 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 3 };
#else
enum { LANES = 4, ROWS = 2 };
#endif
enum { PANEL = 32, VECTORS = PANEL / LANES, LINE = 64 };

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4)));
typedef void (*run_in_parallel)(void (*)(void *), void *, unsigned threads, unsigned flags); /* libgomp's GOMP_parallel */

typedef struct {
    const float *x, *weight, *bias; /* bias: [out], or NULL */
    float *y;                       /* dense */
    int64_t rows, in, out, x_row;   /* x_row: floats from a row of x to the next */
    int64_t next;
} product_job;

static inline __attribute__((always_inline)) void some_rows(
    const product_job *job, int64_t row, int64_t panel, const char *ahead, int64_t step, const int rows
) {
    const int64_t in = job->in, x_row = job->x_row;
    const float *x = job->x + row * x_row;
    const vector *w = (const vector *)(job->weight + panel * in * PANEL);
    vector sum[ROWS][VECTORS];
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < n; i++)
    EACH(r, rows)
        EACH(v, VECTORS)
            sum[r][v] = (vector){0};
    for (int64_t k = 0; k < in; k++, w += VECTORS) {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + LINE, 0, 2);
        ahead += step;
        EACH(r, rows) {
            const float one = x[r * x_row + k];
            EACH(v, VECTORS)
                sum[r][v] += one * w[v];
        }
    }
    const int64_t first = panel * PANEL, left = job->out - first;
    EACH(r, rows) {
        float *y = job->y + (row + r) * job->out + first;
        if (left >= PANEL) {
            EACH(v, VECTORS)
                *(loose *)(y + v * LANES) = job->bias ? sum[r][v] + *(const loose *)(job->bias + first + v * LANES) : sum[r][v];
        } else {
            float last[PANEL];
            memcpy(last, sum[r], sizeof last);
            for (int64_t i = 0; i < left; i++)
                y[i] = last[i] + (job->bias ? job->bias[first + i] : 0.0f);
        }
    }
}

/* next: the panel after this one, whose memory is asked for meanwhile, each block of rows for its part. */
static void one_panel(const product_job *job, int64_t panel, int64_t next) {
    const int64_t blocks = (job->rows + ROWS - 1) / ROWS, size = job->in * PANEL * 4;
    const char *ahead = (const char *)job->weight + next * size;
    for (int64_t block = 0, row = 0; block < blocks; block++) {
        const int64_t rows = (job->rows - row + blocks - block - 1) / (blocks - block); /* as even as can be */
        switch (rows) {
#define CASE(n) case n: if (n <= ROWS) some_rows(job, row, panel, ahead + block * size / blocks, size / job->in / blocks, n); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
        row += rows;
    }
}

static void work(void *shared) {
    product_job *job = shared;
    const int64_t panels = (job->out + PANEL - 1) / PANEL;
    int64_t panel = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    while (panel < panels) {
        const int64_t next = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        one_panel(job, panel, next < panels ? next : panel);
        panel = next;
    }
}

void product_run(product_job *job, run_in_parallel parallel, unsigned threads) {
    job->next = 0;
    if (parallel && threads > 1)
        parallel(work, job, threads, 0);
    else
        work(job);
}
