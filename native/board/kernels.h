/* What the decoder computes with, once for each instruction set. All of them give the same bits: products of integers are
 * exact in any order, and every float32 step is written out, unfused, in an order that does not depend on the width of a
 * vector.
 *
 * A matrix lies in panels of 16 outputs. In a panel, 64 bytes hold for each output four bytes of inputs:
 *   4 bits: the low halves are inputs 0..3, the high halves 4..7 of a step of 8;
 *   8 bits: inputs 0..3 of a step of 4.
 * scales and zeros: [panel][group][16]. A zero point of four bits counts sixteenths of a level: sums are multiplied by 16
 * before it is taken off, and the scale divided by 16, both of which are exact.
 *
 * A row of activations is 16-bit block fixed point: in each group of inputs x = a * scale with |a| <= 32639, and a is
 * 256 * high + low with both in int8, so that a 16-bit product is two of 8 bits. */
#ifndef OUTRIDER_KERNELS_H
#define OUTRIDER_KERNELS_H
#include "decoder.h"
#include <stddef.h>

#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; i++)

/* AHEAD: bytes of a matrix that are asked for before they are needed. The processor's own prefetching ends with a page;
 * with this one a pass over weights that are in no cache takes 0.6 to 0.8 of the time. */
enum { PANEL = 16, MOST_ROWS = 64, AHEAD = 2048, ZERO_SHIFT = 4, ZERO_STEPS = 1 << ZERO_SHIFT };

/* planes: [rows][k / 4][high, low][4]; scales: [rows][groups]; sums: of a, [rows][groups]. */
typedef struct {
    int8_t *planes;
    float *scales;
    int32_t *sums;
    int32_t k, group;
} fixed;

typedef struct {
    int32_t head_dim, capacity;
    float *keys;   /* [kv_heads][capacity / 16][head_dim][16] */
    float *values; /* [kv_heads][capacity][head_dim] */
} cache;

typedef struct {
    const char *name;
    /* Panels first .. end - 1 of y[rows][y_row] = fixed rows times the matrix, plus its bias. */
    void (*product)(const board_matrix *m, const fixed *x, int32_t rows, int32_t first, int32_t end, float *y, int64_t y_row);
    /* Row `row` of `out` from x[out->k]. */
    void (*fix)(const float *x, int32_t row, fixed *out);
    /* out[n] = x / rms(x) * weight. */
    void (*norm)(const float *x, const float *weight, float epsilon, int32_t n, float *out);
    /* gate[n] = silu(gate) * up. */
    void (*gated)(float *gate, const float *up, int32_t n);
    /* out[head_dim]: what a query reads in the slots 0 .. total - 1 of a head, of the last `behind` where seen is not 0.
     * scores: scratch, [total rounded up to 16]. */
    void (*attend)(const cache *c, int32_t kv_head, const float *query, int32_t total, int32_t behind, const uint8_t *seen,
                   float *scores, float *out);
} kernels;

extern const kernels kernels_scalar;
#if defined(__x86_64__)
extern const kernels kernels_avx2, kernels_avx512;
#elif defined(__aarch64__)
extern const kernels kernels_neon, kernels_dotprod;
#endif

/* float16 to float32. */
float board_half(uint16_t h);

/* Those of the set in use. */
const kernels *board_kernels(void);
#endif
