/* The softmax of rows of scores, between the two products of attention that libraries compute.
 *
 * A weight is zero below e^-87. Loops over a row are simple, so that compilers make vectors of them.
 * Threads take rows in turns: with `causal`, later ones are longer.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#pragma GCC optimize("O3", "no-trapping-math", "no-math-errno")

enum { LANES = 16 }; /* greatest scores and sums of a row that are kept side by side */

#define EXPORTED __attribute__((visibility("default")))
#include "exponential.h"
#include "levels.h"
#include "team.h"

typedef struct softmax_call {
    int64_t m, n;
    float *scores; /* and then the weights */
    int64_t distance;
    float scale;
    const float *add; /* or NULL */
    int64_t add_distance;
    int64_t behind; /* row i sees i + behind keys, and n at most */
    finish_team team;
} softmax_call;

INLINE float weight_of(float x) {
    exponential_parts parts = exponential_of(x);
    float weight = power_of_two(parts.power) * (parts.excess + 1.0f);
    return x < -87.0f ? 0.0f : weight;
}

INLINE void row_of(const softmax_call *call, int64_t row) {
    float *scores = call->scores + row * call->distance;
    const float *add = call->add ? call->add + row * call->add_distance : NULL;
    const int64_t visible = row + call->behind;
    const int64_t seen = visible < 0 ? 0 : visible < call->n ? visible : call->n;
    if (add) {
        for (int64_t j = 0; j < seen; j++) {
            scores[j] = scores[j] * call->scale + add[j];
        }
    } else if (call->scale != 1.0f) {
        for (int64_t j = 0; j < seen; j++) {
            scores[j] *= call->scale;
        }
    }
    float maxima[LANES], totals[LANES];
    for (int i = 0; i < LANES; i++) {
        maxima[i] = -INFINITY;
        totals[i] = 0.0f;
    }
    const int64_t whole = seen / LANES * LANES;
    for (int64_t j = 0; j < whole; j += LANES) {
        for (int i = 0; i < LANES; i++) {
            maxima[i] = scores[j + i] > maxima[i] ? scores[j + i] : maxima[i];
        }
    }
    float greatest = -INFINITY, total = 0.0f;
    for (int64_t j = whole; j < seen; j++) {
        greatest = scores[j] > greatest ? scores[j] : greatest;
    }
    for (int i = 0; i < LANES; i++) {
        greatest = maxima[i] > greatest ? maxima[i] : greatest;
    }
    const float offset = greatest == -INFINITY ? 0.0f : greatest;
    for (int64_t j = 0; j < seen; j++) {
        scores[j] = weight_of(scores[j] - offset);
    }
    for (int64_t j = 0; j < whole; j += LANES) {
        for (int i = 0; i < LANES; i++) {
            totals[i] += scores[j + i];
        }
    }
    for (int64_t j = whole; j < seen; j++) {
        total += scores[j];
    }
    for (int i = 0; i < LANES; i++) {
        total += totals[i];
    }
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    for (int64_t j = 0; j < seen; j++) {
        scores[j] *= factor;
    }
    memset(scores + seen, 0, (size_t)(call->n - seen) * sizeof(float));
}

INLINE void rows_from(const softmax_call *call, int64_t first, int64_t step) {
    for (int64_t row = first; row < call->m; row += step) {
        row_of(call, row);
    }
}

FOR_EACH_LEVEL(softmax_part, (const softmax_call *call, int64_t first, int64_t step),
               rows_from(call, first, step))

static void softmax_own_part(void *argument) {
    const softmax_call *call = argument;
    softmax_part(call, call->team.thread(), call->team.threads());
}

/* Make weights of the scores. */
EXPORTED void softmax_rows(const softmax_call *call) {
    if (call->team.parallel != NULL && call->m > 1) {
        call->team.parallel(softmax_own_part, (void *)call, 0, 0);
        return;
    }
    softmax_part(call, 0, 1);
}
