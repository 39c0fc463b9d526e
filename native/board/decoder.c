/* A decoder of the llama and qwen2 families for a handful of rows.
 *
 * Why C: a pass reads every weight once, so its time is the memory's as long as nothing else takes any: no copy of a weight,
 * no allocation, no thread that has to be called. Threads take panels of a product one after the other, whoever is free,
 * so that a core which somebody else uses for a while delays only the panels that it holds. What is between two products
 * is done by the last thread to finish the one before.
 *
 * Which thread computes what, and how many there are, changes no bit (kernels.h).
 */
#include "internal.h"
#include "kernels.h"
#include "team.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MOST_THREADS = 64 };

typedef struct {
    const int32_t *ids, *positions, *wanted;
    const uint8_t *seen;
    int32_t rows, start, behind, num_wanted;
} pass;

struct board_decoder {
    const board_model *model;
    const kernels *use;
    team *team;
    int32_t capacity, threads;
    cache *cache; /* [layers] */
    void *memory; /* all that follows, and what the caches point to */
    size_t size;
    float *x;        /* [rows][hidden]: the residual */
    float *y;        /* [rows][widest]: what a product gave */
    float *up;       /* [rows][inner] */
    float *attended; /* [rows][heads * head_dim] */
    float *logits;   /* [rows][head.n] */
    float *scores;   /* [threads][capacity] */
    fixed fixed;     /* the rows that the next product takes */
    pass pass;
    int32_t next; /* piece of work that nobody has taken yet */
    int32_t layer;
};

const kernels *board_kernels(void) {
    switch (isa()) {
#if defined(__x86_64__)
    case ISA_AVX2:
        return &kernels_avx2;
    case ISA_AVX512:
        return &kernels_avx512;
#elif defined(__aarch64__)
    case ISA_NEON:
        return &kernels_neon;
    case ISA_DOTPROD:
        return &kernels_dotprod;
#endif
    default:
        return &kernels_scalar;
    }
}

static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

int32_t board_most_rows(void) { return MOST_ROWS; }

/* -- what is between the products: by one thread, while the others wait ------------------------------------------------- */

static void fix_rows(board_decoder *d, const float *from, int32_t from_row, const board_matrix *for_whom, int32_t rows) {
    d->fixed.k = for_whom->k;
    d->fixed.group = for_whom->group;
    for (int32_t row = 0; row < rows; row++)
        d->use->fix(from + (int64_t)row * from_row, row, &d->fixed);
    d->next = 0;
}

/* The residual, normed, for a product. */
static void normed(board_decoder *d, const float *weight, const board_matrix *for_whom) {
    const board_model *m = d->model;
    for (int32_t row = 0; row < d->pass.rows; row++)
        d->use->norm(d->x + (int64_t)row * m->hidden, weight, m->epsilon, m->hidden, d->y + (int64_t)row * m->hidden);
    fix_rows(d, d->y, m->hidden, for_whom, d->pass.rows);
}

static void add_to_residual(board_decoder *d) {
    const int64_t count = (int64_t)d->pass.rows * d->model->hidden;
    for (int64_t i = 0; i < count; i++)
        d->x[i] = d->x[i] + d->y[i];
}

static void embed(board_decoder *d) {
    const board_model *m = d->model;
    const board_matrix *e = &m->embedding;
    const int32_t groups = e->k / e->group;
    const float unit = e->bits == 4 ? 1.0f / ZERO_STEPS : 1.0f;
    for (int32_t row = 0; row < d->pass.rows; row++) {
        const int64_t id = d->pass.ids[row];
        const uint8_t *packed = e->packed + id * e->k * e->bits / 8, *zeros = e->zeros + id * groups;
        float *x = d->x + (int64_t)row * m->hidden;
        for (int32_t i = 0; i < e->k; i++) {
            const int32_t q = e->bits == 8 ? packed[i] : (packed[i / 2] >> i % 2 * 4 & 15) * ZERO_STEPS;
            x[i] = (float)(q - zeros[i / e->group]) * (board_half(e->scales[id * groups + i / e->group]) * unit);
        }
    }
    normed(d, m->layer[0].attention_norm, &m->layer[0].queries);
}

static int32_t width_of_qkv(const board_model *m) {
    return m->layer->queries.n + m->layer->kv.n;
}

static void turn(const board_model *m, float *head, int32_t position) { /* rotary embedding, halves */
    const int32_t half = m->head_dim / 2;
    const float *cos = m->cos + (int64_t)position * half, *sin = m->sin + (int64_t)position * half;
    for (int32_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Queries are turned in place, keys and values go to their slots. */
static void remember(void *shared) {
    board_decoder *d = shared;
    const board_model *m = d->model;
    const cache *c = &d->cache[d->layer];
    const int32_t width = m->head_dim;
    for (int32_t row = 0; row < d->pass.rows; row++) {
        float *at = d->y + (int64_t)row * width_of_qkv(m);
        const int32_t slot = d->pass.start + row;
        for (int32_t head = 0; head < m->heads + m->kv_heads; head++)
            turn(m, at + head * width, d->pass.positions[row]);
        const float *key = at + m->heads * width, *value = key + m->kv_heads * width;
        for (int32_t head = 0; head < m->kv_heads; head++, key += width, value += width) {
            float *block = c->keys + ((int64_t)head * d->capacity + slot / 16 * 16) * width + slot % 16;
            for (int32_t i = 0; i < width; i++)
                block[i * 16] = key[i];
            memcpy(c->values + ((int64_t)head * d->capacity + slot) * width, value, (size_t)width * sizeof *value);
        }
    }
    d->next = 0;
}

static void fix_attended(void *shared) {
    board_decoder *d = shared;
    const board_matrix *out = &d->model->layer[d->layer].out;
    fix_rows(d, d->attended, out->k, out, d->pass.rows);
}

static void to_mlp(void *shared) {
    board_decoder *d = shared;
    const board_layer *layer = &d->model->layer[d->layer];
    add_to_residual(d);
    normed(d, layer->mlp_norm, &layer->gate);
}

static void fix_gated(void *shared) {
    board_decoder *d = shared;
    const board_matrix *down = &d->model->layer[d->layer].down;
    fix_rows(d, d->y, down->k, down, d->pass.rows);
}

static void to_next_layer(void *shared) {
    board_decoder *d = shared;
    const board_model *m = d->model;
    add_to_residual(d);
    if (++d->layer < m->layers) {
        normed(d, m->layer[d->layer].attention_norm, &m->layer[d->layer].queries);
        return;
    }
    for (int32_t i = 0; i < d->pass.num_wanted; i++)
        d->use->norm(d->x + (int64_t)d->pass.wanted[i] * m->hidden, m->norm, m->epsilon, m->hidden, d->y + (int64_t)i * m->hidden);
    fix_rows(d, d->y, m->hidden, &m->head, d->pass.num_wanted);
}

/* -- what all threads do ------------------------------------------------------------------------------------------------ */

typedef struct {
    int32_t first, end;
} span;

/* What this thread does next of `count`, `at_once` of them; 0 where nothing is left. */
static int take(board_decoder *d, int32_t count, int32_t at_once, span *part) {
    part->first = __atomic_fetch_add(&d->next, at_once, __ATOMIC_RELAXED);
    part->end = least(part->first + at_once, count);
    return part->first < count;
}

static int take_panels(board_decoder *d, int32_t panels, span *part) {
    return take(d, panels, most(1, panels / (d->threads * 8)), part);
}

static void product(board_decoder *d, const board_matrix *m, int32_t rows, float *y) {
    for (span part; take_panels(d, m->n / PANEL, &part);)
        d->use->product(m, &d->fixed, rows, part.first, part.end, y, m->n);
}

static void queries_keys_values(board_decoder *d, const board_layer *layer) {
    const int32_t width = width_of_qkv(d->model), split = layer->queries.n / PANEL, rows = d->pass.rows;
    for (span part; take_panels(d, width / PANEL, &part);) {
        if (part.first < split)
            d->use->product(&layer->queries, &d->fixed, rows, part.first, least(part.end, split), d->y, width);
        if (part.end > split) {
            float *y = d->y + layer->queries.n;
            d->use->product(&layer->kv, &d->fixed, rows, most(part.first, split) - split, part.end - split, y, width);
        }
    }
}

static void gate_and_up(board_decoder *d, const board_layer *layer) {
    const int32_t n = layer->gate.n;
    for (span part; take_panels(d, n / PANEL, &part);) {
        d->use->product(&layer->gate, &d->fixed, d->pass.rows, part.first, part.end, d->y, n);
        d->use->product(&layer->up, &d->fixed, d->pass.rows, part.first, part.end, d->up, n);
        for (int32_t row = 0; row < d->pass.rows; row++) {
            const int64_t at = (int64_t)row * n + part.first * PANEL;
            d->use->gated(d->y + at, d->up + at, (part.end - part.first) * PANEL);
        }
    }
}

static void attend(board_decoder *d, int32_t thread) {
    const board_model *m = d->model;
    const pass *p = &d->pass;
    for (span part; take(d, p->rows * m->heads, 1, &part);) {
        const int32_t row = part.first / m->heads, head = part.first % m->heads;
        const int32_t total = p->seen ? p->start + p->rows : p->start + row + 1;
        d->use->attend(
            &d->cache[d->layer], head / (m->heads / m->kv_heads), d->y + (int64_t)row * width_of_qkv(m) + head * m->head_dim,
            total, p->seen ? p->behind : 0, p->seen ? p->seen + (int64_t)row * p->behind : NULL,
            d->scores + (int64_t)thread * d->capacity, d->attended + ((int64_t)row * m->heads + head) * m->head_dim
        );
    }
}

static void work(void *shared, int32_t thread) {
    board_decoder *d = shared;
    const board_model *m = d->model;
    for (int32_t i = 0; i < m->layers; i++) {
        const board_layer *layer = &m->layer[i];
        queries_keys_values(d, layer);
        team_meet(d->team, remember, d);
        attend(d, thread);
        team_meet(d->team, fix_attended, d);
        product(d, &layer->out, d->pass.rows, d->y);
        team_meet(d->team, to_mlp, d);
        gate_and_up(d, layer);
        team_meet(d->team, fix_gated, d);
        product(d, &layer->down, d->pass.rows, d->y);
        team_meet(d->team, to_next_layer, d);
    }
    if (d->pass.num_wanted)
        product(d, &m->head, d->pass.num_wanted, d->logits);
}

/* -- the interface ------------------------------------------------------------------------------------------------------ */

static int fits(const board_decoder *d, const pass *p) {
    if (p->rows < 1 || p->rows > MOST_ROWS || p->start < 0 || p->start > d->capacity - p->rows)
        return 0;
    if (p->behind < 0 || p->behind > p->start + p->rows || p->num_wanted < 0 || p->num_wanted > p->rows)
        return 0;
    for (int32_t i = 0; i < p->rows; i++)
        if (p->ids[i] < 0 || p->ids[i] >= d->model->vocab || p->positions[i] < 0 || p->positions[i] >= d->model->context)
            return 0;
    for (int32_t i = 0; i < p->num_wanted; i++)
        if (p->wanted[i] < 0 || p->wanted[i] >= p->rows)
            return 0;
    return 1;
}

const float *board_decoder_run(
    board_decoder *d, int32_t rows, const int32_t *ids, const int32_t *positions, int32_t start, const uint8_t *seen,
    int32_t behind, int32_t num_wanted, const int32_t *wanted
) {
    d->pass = (pass){ids, positions, wanted, seen, rows, start, behind, num_wanted};
    if (!fits(d, &d->pass))
        return NULL;
    d->layer = 0;
    embed(d);
    team_run(d->team, work, d);
    return d->logits;
}

int32_t board_decoder_move(board_decoder *d, int32_t count, const int32_t *slots, int32_t first) {
    const int32_t width = d->model->head_dim;
    for (int32_t i = 0; i < count; i++)
        if (first < 0 || slots[i] < first + i || slots[i] >= d->capacity || (i && slots[i] <= slots[i - 1]))
            return -1;
    for (int32_t layer = 0; layer < d->model->layers; layer++)
        for (int32_t head = 0; head < d->model->kv_heads; head++) {
            float *keys = d->cache[layer].keys + (int64_t)head * d->capacity * width;
            float *values = d->cache[layer].values + (int64_t)head * d->capacity * width;
            for (int32_t i = 0; i < count; i++) {
                const int64_t from = slots[i], to = first + i;
                if (from == to)
                    continue;
                for (int32_t j = 0; j < width; j++)
                    keys[to / 16 * 16 * width + j * 16 + to % 16] = keys[from / 16 * 16 * width + j * 16 + from % 16];
                memcpy(values + to * width, values + from * width, (size_t)width * sizeof *values);
            }
        }
    return 0;
}

/* Takes `count` values of `size` bytes each at the next line; where base is NULL only counts. */
static void *place(char *base, size_t *used, size_t count, size_t size) {
    void *at = base ? base + *used : NULL;
    *used += (count * size + 63) / 64 * 64;
    return at;
}

static size_t lay_out(board_decoder *d, char *base) {
    const board_model *m = d->model;
    const board_layer *l = m->layer;
    const size_t rows = MOST_ROWS, slots = (size_t)d->capacity * m->kv_heads * m->head_dim;
    const int32_t widest = most(most(width_of_qkv(m), l->gate.n), m->hidden), deepest = most(most(m->hidden, l->down.k), l->out.k);
    size_t used = 0;
    d->x = place(base, &used, rows * m->hidden, sizeof(float));
    d->y = place(base, &used, rows * widest, sizeof(float));
    d->up = place(base, &used, rows * l->up.n, sizeof(float));
    d->attended = place(base, &used, rows * l->out.k, sizeof(float));
    d->fixed.planes = place(base, &used, rows * deepest * 2, 1);
    d->fixed.scales = place(base, &used, rows * deepest / 32, sizeof(float));
    d->fixed.sums = place(base, &used, rows * deepest / 32, sizeof(int32_t));
    d->scores = place(base, &used, (size_t)d->threads * d->capacity, sizeof(float));
    d->logits = place(base, &used, rows * m->head.n, sizeof(float));
    for (int32_t i = 0; i < m->layers; i++) {
        float *keys = place(base, &used, slots, sizeof(float)), *values = place(base, &used, slots, sizeof(float));
        if (base)
            d->cache[i] = (cache){m->head_dim, d->capacity, keys, values};
    }
    return used;
}

board_decoder *board_decoder_alloc(const board_model *model, int32_t capacity, int32_t threads) {
    if (capacity < 1 || threads < 1 || threads > MOST_THREADS)
        return NULL;
    board_decoder *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->model = model;
    d->use = board_kernels();
    d->capacity = (capacity + 15) / 16 * 16;
    d->threads = threads;
    d->cache = calloc((size_t)model->layers, sizeof *d->cache);
    d->size = lay_out(d, NULL);
    /* Pages that were never written cost nothing, so the cache is paid for only as the text grows: as long as they are
       small ones, since the heads lie far apart. */
    void *memory = mmap(NULL, d->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    d->memory = memory == MAP_FAILED ? NULL : memory;
#ifdef MADV_NOHUGEPAGE
    if (d->memory)
        madvise(d->memory, d->size, MADV_NOHUGEPAGE); /* a kernel without huge pages refuses, which does no harm */
#endif
    d->team = team_alloc(threads);
    if (!d->cache || !d->memory || !d->team) {
        board_decoder_free(d);
        return NULL;
    }
    lay_out(d, d->memory);
    return d;
}

void board_decoder_free(board_decoder *d) {
    if (!d)
        return;
    team_free(d->team);
    if (d->memory)
        munmap(d->memory, d->size);
    free(d->cache);
    free(d);
}

void board_product(const board_matrix *matrix, int32_t rows, const float *x, float *y) {
    const kernels *use = board_kernels();
    const int32_t groups = matrix->k / matrix->group;
    int8_t planes[matrix->k * 2];
    float scales[groups];
    int32_t sums[groups];
    fixed one = {planes, scales, sums, matrix->k, matrix->group};
    for (int32_t row = 0; row < rows; row++) {
        use->fix(x + (int64_t)row * matrix->k, 0, &one);
        use->product(matrix, &one, 1, 0, matrix->n / PANEL, y + (int64_t)row * matrix->n, matrix->n);
    }
}
