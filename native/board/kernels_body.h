/* The body that every instruction set shares, included once in each of their files. Vectors of 16 are the compiler's:
 * where a register is narrower it takes several. Before it, a file defines
 *   NAME                                       of the table
 *   some_rows(m, x, row, panel, y, y_row, rows)  one panel for `rows` rows, at most BLOCK; rows is a constant there
 */
#include <math.h>
#include <string.h>

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* whatever takes or returns a vector is inlined */
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16), aligned(1), may_alias));

#define MOST 32639.0f /* of an activation in fixed point: 127 * 256 + 127 */
#define INLINE static inline __attribute__((always_inline))

INLINE float sum_of(f32x16 v) {
    float s[16];
    memcpy(s, &v, sizeof s);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++)
            s[i] = s[i] + s[i + width];
    return s[0];
}

INLINE f32x16 larger(f32x16 a, f32x16 b) {
    i32x16 mask = a > b;
    return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b));
}

INLINE f32x16 nearest(f32x16 x) { /* to an integer, ties to even, for |x| < 2^22 */
    const f32x16 magic = (f32x16){} + 12582912.0f;
    return (x + magic) - magic;
}

/* e^x for x in [-87, 88], relative error below 2e-7: 2^n e^r with |r| <= ln 2 / 2, a polynomial of Cephes' expf. */
INLINE f32x16 exponential(f32x16 x) {
    x = larger(x, (f32x16){} - 87.0f);
    x = -larger(-x, (f32x16){} - 88.0f);
    const f32x16 n = nearest(x * 1.44269504f);
    const f32x16 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    const i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    return p * (f32x16)power;
}

static void product(
    const board_matrix *m, const fixed *x, int32_t rows, int32_t first, int32_t end, float *y, int64_t y_row
) {
    for (int32_t panel = first; panel < end; panel++) {
        const int32_t blocks = (rows + BLOCK - 1) / BLOCK;
        for (int32_t block = 0, row = 0; block < blocks; block++) {
            const int32_t here = (rows - row + blocks - block - 1) / (blocks - block); /* as even as can be */
            switch (here) {
#define CASE(n) case n: if (n <= BLOCK) some_rows(m, x, row, panel, y, y_row, n); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
            }
            row += here;
        }
        if (m->bias)
            for (int32_t row = 0; row < rows; row++) {
                loose *at = (loose *)(y + row * y_row + panel * PANEL);
                *at = *at + *(const loose *)(m->bias + panel * PANEL);
            }
    }
}

static void fix(const float *x, int32_t row, fixed *out) {
    const int32_t group = out->group, groups = out->k / group;
    int8_t *planes = out->planes + (int64_t)row * out->k * 2;
    for (int32_t g = 0; g < groups; g++, x += group) {
        f32x16 most = {};
        for (int32_t i = 0; i < group; i += 16) {
            const f32x16 v = *(const loose *)(x + i);
            most = larger(most, larger(v, -v));
        }
        float peak = 0;
        for (int32_t i = 0; i < 16; i++)
            peak = most[i] > peak ? most[i] : peak;
        const float inverse = peak > 1e-30f ? MOST / peak : 0.0f;
        i32x16 sum = {};
        for (int32_t i = 0; i < group; i += 16, planes += 32) {
            const f32x16 v = *(const loose *)(x + i) * inverse;
            /* Infinities and NaNs, of a damaged file's weights, have no integer of their own, and not the same everywhere. */
            const f32x16 held = -larger(-larger(v, (f32x16){} - MOST), (f32x16){} - MOST);
            const i32x16 a = __builtin_convertvector(nearest(held), i32x16);
            const i32x16 high = (a + 128) >> 8, low = a - high * 256;
            sum += a;
            const i32x4 h = (i32x4)__builtin_convertvector(high, i8x16), l = (i32x4)__builtin_convertvector(low, i8x16);
            *(i32x4 *)planes = __builtin_shufflevector(h, l, 0, 4, 1, 5);
            *(i32x4 *)(planes + 16) = __builtin_shufflevector(h, l, 2, 6, 3, 7);
        }
        int32_t total = 0;
        for (int32_t i = 0; i < 16; i++)
            total += sum[i];
        out->scales[row * groups + g] = peak > 1e-30f ? peak / MOST : 0.0f;
        out->sums[row * groups + g] = total;
    }
}

static void norm(const float *x, const float *weight, float epsilon, int32_t n, float *out) {
    f32x16 squares = {};
    for (int32_t i = 0; i < n; i += 16) {
        const f32x16 v = *(const loose *)(x + i);
        squares += v * v;
    }
    const float scale = 1.0f / sqrtf(sum_of(squares) / (float)n + epsilon);
    for (int32_t i = 0; i < n; i += 16)
        *(loose *)(out + i) = (*(const loose *)(x + i) * scale) * *(const loose *)(weight + i);
}

static void gated(float *gate, const float *up, int32_t n) {
    for (int32_t i = 0; i < n; i += 16) {
        const f32x16 v = *(const loose *)(gate + i);
        *(loose *)(gate + i) = v / (exponential(-v) + 1.0f) * *(const loose *)(up + i);
    }
}

/* Softmax without its division first: weights e^(s - max) are summed beside the values that they weigh. */
static void attend(
    const cache *c, int32_t kv_head, const float *query, int32_t total, int32_t behind, const uint8_t *seen, float *scores,
    float *out
) {
    const int32_t width = c->head_dim, blocks = (total + 15) / 16, open = total - behind;
    const float scale = 1.0f / sqrtf((float)width);
    const float *keys = c->keys + (int64_t)kv_head * c->capacity * width;
    const float *values = c->values + (int64_t)kv_head * c->capacity * width;
    const float hidden = -3.0e38f;
    f32x16 most = (f32x16){} + hidden;
    for (int32_t b = 0; b < blocks; b++) {
        f32x16 s[4] = {};
        for (int32_t d = 0; d < width; d += 4, keys += 64) /* four sums, so that one does not wait for the other */
            for (int32_t i = 0; i < 4; i++)
                s[i] += *(const f32x16 *)(keys + i * 16) * query[d + i];
        f32x16 score = ((s[0] + s[1]) + (s[2] + s[3])) * scale;
        if ((b + 1) * 16 > open)
            for (int32_t i = 0; i < 16; i++) {
                const int32_t slot = b * 16 + i;
                if (slot >= total || (slot >= open && seen && !seen[slot - open]))
                    score[i] = hidden;
            }
        most = larger(most, score);
        *(loose *)(scores + b * 16) = score;
    }
    float peak = hidden;
    for (int32_t i = 0; i < 16; i++)
        peak = most[i] > peak ? most[i] : peak;
    f32x16 sums = {};
    for (int32_t b = 0; b < blocks; b++) {
        const f32x16 score = *(const loose *)(scores + b * 16);
        f32x16 e = exponential(score - peak);
        e = (f32x16)((i32x16)e & (score > hidden));
        sums += e;
        *(loose *)(scores + b * 16) = e;
    }
    const float share = 1.0f / sum_of(sums);
    for (int32_t d = 0; d < width; d += 32) {
        const int32_t second = width - d > 16 ? 16 : 0;
        f32x16 a = {}, b = {};
        for (int32_t slot = 0; slot < total; slot++) {
            const float e = scores[slot];
            const float *at = values + (int64_t)slot * width + d;
            a += *(const loose *)at * e;
            b += *(const loose *)(at + second) * e;
        }
        *(loose *)(out + d) = a * share;
        if (second)
            *(loose *)(out + d + 16) = b * share;
    }
}

const kernels NAME(kernels) = {ISA, product, fix, norm, gated, attend};
