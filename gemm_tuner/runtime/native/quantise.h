/* Rows of floats to bytes: one pass over a row finds its ends, and one writes it while it lies in
 * the L1 cache. */
#ifndef GEMM_TUNER_QUANTISE_H
#define GEMM_TUNER_QUANTISE_H

#include <stdint.h>

/* The types of x. */
enum { QUANTISE_F32, QUANTISE_BF16, QUANTISE_F16 };

typedef struct quantise_call {
    int64_t rows, columns;
    const void *x;
    int64_t x_distance; /* between rows, in elements, as that of y */
    uint8_t *y;
    int64_t y_distance;
    float *scales;        /* one for each row, or one for all */
    int32_t *zero_points; /* as many, for unsigned bytes; NULL for signed ones */
    int32_t x_type;
    int32_t is_one_scale;
} quantise_call;

/* Write y, the scales and the zero points. */
void quantise_rows(const quantise_call *call);

#endif
