/* The exponential of a float, in operations that compilers make vectors of; those of finish.c and
 * softmax.c differ in what they do at the ends of the range.
 *
 * Source: Cephes, expf.c. */
#ifndef GEMM_TUNER_EXPONENTIAL_H
#define GEMM_TUNER_EXPONENTIAL_H

#include "levels.h"

#include <stdint.h>

typedef union bits {
    float value;
    uint32_t word;
} bits;

/* e^x is (excess + 1) * 2^power. */
typedef struct exponential_parts {
    float excess;
    int32_t power;
} exponential_parts;

INLINE exponential_parts exponential_of(float x) {
    float turned = x * 1.44269504f + 12582912.0f; /* its lowest bits are the exponent */
    float exponent = turned - 12582912.0f;
    float rest = x - exponent * 0.693359375f + exponent * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    return (exponential_parts){
        .excess = sum * rest * rest + rest,
        .power = (int32_t)((bits){.value = turned}.word - 0x4b400000u), /* of any x */
    };
}

/* 2^power, for -126 <= power <= 127. */
INLINE float power_of_two(int32_t power) {
    return (bits){.word = ((uint32_t)power + 127) << 23}.value;
}

#endif
