/* A compact decoder for the llama and qwen2 families: rows of a tree against one cache, weights of 4 or 8 bits as they lie
 * in a mapped file. See decoder.c. */
#ifndef OUTRIDER_DECODER_H
#define OUTRIDER_DECODER_H
#include <stdint.h>
#pragma GCC visibility push(default)

/* Weights w[n][k] = (q - zero) * scale in groups along k, the zero points of four bits in sixteenths; what is laid out how stands in kernels.h. */
typedef struct {
    int32_t n, k, bits, group; /* n: outputs, a multiple of 16; k: inputs, a multiple of group; bits: 4 or 8; group: of 32 */
    const uint8_t *packed;
    const uint16_t *scales; /* float16 */
    const uint8_t *zeros;
    const float *bias; /* [n], or NULL */
} board_matrix;

typedef struct {
    const float *attention_norm, *mlp_norm; /* [hidden] */
    board_matrix queries, kv, out, gate, up, down; /* kv: keys, below them values; of the group that queries have */
} board_layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, inner, vocab;
    int32_t context;         /* positions in cos and sin */
    float epsilon;           /* of the norms */
    board_matrix embedding;  /* by rows: packed [vocab][k bits / 8], scales and zeros [vocab][k / group] */
    board_matrix head;       /* n: of the ids in its list */
    const float *norm;       /* [hidden] */
    const float *cos, *sin;  /* [context][head_dim / 2] */
    const board_layer *layer; /* [layers] */
} board_model;

typedef struct board_decoder board_decoder;

/* Rows of one pass at most. */
int32_t board_most_rows(void);

/* A cache of `capacity` slots and `threads` threads, the caller's among them; NULL where memory or threads cannot be had.
 * The model and all that it points to must outlive it. */
board_decoder *board_decoder_alloc(const board_model *model, int32_t capacity, int32_t threads);
void board_decoder_free(board_decoder *decoder);

/* Evaluate rows into the slots start .. start + rows - 1. A row sees the slots before `start + rows - behind`, and of the
 * `behind` slots after them those where seen[row][slot] is not 0; where `seen` is NULL, all before it and itself.
 * wanted: rows whose logits are computed. Returns them, [num_wanted][head.n], overwritten by the next pass; NULL where
 * an argument is out of range. */
const float *board_decoder_run(board_decoder *decoder, int32_t rows, const int32_t *ids, const int32_t *positions,
                               int32_t start, const uint8_t *seen, int32_t behind, int32_t num_wanted,
                               const int32_t *wanted);

/* Bring what lies at `slots` (ascending, each at or after its place) to first, first + 1, ...; -1 where one is out of range. */
int32_t board_decoder_move(board_decoder *decoder, int32_t count, const int32_t *slots, int32_t first);

/* One product, for tests: y[rows][n] of x[rows][k]. */
void board_product(const board_matrix *matrix, int32_t rows, const float *x, float *y);
#pragma GCC visibility pop
#endif
