/* What a transformer block does to rows between its products. float32.
 *
 * Why C: of these a step has hundreds, each on a few kilobytes. A library runs a norm as seven operations, and what
 * surrounds each of them takes longer than its arithmetic. The twin is `Torch` of cloud/engines/elementwise.py.
 */

#include <math.h>
#include <stdint.h>

/* out [rows][width] = x / sqrt(mean(x^2) + eps) * weight, each row by itself. */
void elementwise_norm(
    const float *restrict x, const float *restrict weight, float *restrict out, int64_t rows, int64_t width, float eps
) {
    for (int64_t r = 0; r < rows; r++, x += width, out += width) {
        float sum = 0.0f;
        for (int64_t i = 0; i < width; i++)
            sum += x[i] * x[i];
        const float scale = 1.0f / sqrtf(sum / width + eps);
        for (int64_t i = 0; i < width; i++)
            out[i] = x[i] * scale * weight[i];
    }
}

/* Turns the first `heads` heads of each of x [rows][row] in place by cos, sin [rows][width]: pairs (i, i + width / 2),
 * the first half of sin negated. */
void elementwise_rotate(
    float *restrict x, const float *restrict cos, const float *restrict sin, int64_t rows, int64_t row, int64_t heads,
    int64_t width
) {
    const int64_t half = width / 2;
    for (int64_t r = 0; r < rows; r++, x += row, cos += width, sin += width)
        for (int64_t h = 0; h < heads; h++) {
            float *restrict first = x + h * width, *restrict second = first + half;
            for (int64_t i = 0; i < half; i++) {
                const float a = first[i], b = second[i];
                first[i] = a * cos[i] + b * sin[i];
                second[i] = b * cos[half + i] + a * sin[half + i];
            }
        }
}
