/* The loops are plain C, which the compiler makes vectors of, once for each of three levels of
 * instructions; all give the same bits, and so does _quantise_by_numpy of activations.py. */
#include "quantise.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
/* gcc takes both sides of a choice only where neither can trap. */
#pragma GCC optimize("O3", "fp-contract=off", "no-trapping-math")
#endif

#include "levels.h"

typedef union bits {
    float value;
    uint32_t word;
    int32_t number;
} bits;

/* The greatest element and 0, and the least element and 0, as the bits of x's type: floats of one
 * sign are in the order of their bits. */
typedef struct ends {
    int32_t greatest;
    uint32_t least;
} ends;

typedef struct mapping {
    float inverse;
    int32_t zero_point;
    bool is_finite;
} mapping;

/* 1.5 * 2^23: the lowest bits of a small number plus this are the nearest integer, ties to even. */
static const bits TURNING = {.value = 12582912.0f};

/* No instruction makes a subnormal number of it, whatever the mode of the CPU. */
static const float LEAST_SCALE = 0x1p-126f;

INLINE float of_bf16(uint16_t element) { return (bits){.word = (uint32_t)element << 16}.value; }

/* Of finite numbers alone. Source: F. Giesen, half_to_float_fast5. */
INLINE float of_f16(uint16_t element) {
    bits normal = {.word = ((uint32_t)(element & 0x7fff) << 13) + ((127 - 15) << 23)};
    bits subnormal = {.word = normal.word + (1 << 23)};
    subnormal.value -= (bits){.word = 113 << 23}.value;
    uint32_t magnitude = element & 0x7c00 ? normal.word : subnormal.word;
    return (bits){.word = magnitude | (uint32_t)(element & 0x8000) << 16}.value;
}

INLINE float load(const void *row, int32_t type, int64_t j) {
    switch (type) {
    case QUANTISE_F16:
        return of_f16(((const uint16_t *)row)[j]);
    case QUANTISE_BF16:
        return of_bf16(((const uint16_t *)row)[j]);
    default:
        return ((const float *)row)[j];
    }
}

INLINE float float_of(uint32_t element, int32_t type) {
    switch (type) {
    case QUANTISE_F16:
        return of_f16((uint16_t)element);
    case QUANTISE_BF16:
        return of_bf16((uint16_t)element);
    default:
        return (bits){.word = element}.value;
    }
}

INLINE ends widen_by_words(const void *row, int64_t columns, ends known) {
    const int32_t *words = row;
    int32_t greatest = known.greatest;
    uint32_t least = known.least;
    for (int64_t j = 0; j < columns; j++) {
        greatest = words[j] > greatest ? words[j] : greatest;
        least = (uint32_t)words[j] > least ? (uint32_t)words[j] : least;
    }
    return (ends){greatest, least};
}

INLINE ends widen_by_halves(const void *row, int64_t columns, ends known) {
    const int16_t *halves = row;
    int16_t greatest = (int16_t)known.greatest;
    uint16_t least = (uint16_t)known.least;
    for (int64_t j = 0; j < columns; j++) {
        greatest = halves[j] > greatest ? halves[j] : greatest;
        least = (uint16_t)halves[j] > least ? (uint16_t)halves[j] : least;
    }
    return (ends){greatest, least};
}

INLINE ends widen(const void *row, int32_t type, int64_t columns, ends known) {
    return type == QUANTISE_F32 ? widen_by_words(row, columns, known) : widen_by_halves(row, columns, known);
}

INLINE int32_t nearest(float value) {
    return (bits){.value = value + TURNING.value}.number - TURNING.number;
}

/* Write the scale and the zero point, and return how to map elements with them. With NaN or
 * infinity among the elements, the scale is NaN. */
INLINE mapping choose(ends found, int32_t type, float *scale, int32_t *zero_point) {
    const uint32_t infinity = type == QUANTISE_F32 ? 0x7f800000 : type == QUANTISE_BF16 ? 0x7f80 : 0x7c00;
    const uint32_t sign = type == QUANTISE_F32 ? 0x80000000 : 0x8000;
    const bool is_finite = (uint32_t)found.greatest < infinity && found.least < sign + infinity;
    float greatest = 0.0f, least = 0.0f;
    if (is_finite) {
        greatest = float_of((uint32_t)found.greatest, type);
        least = found.least > sign ? float_of(found.least, type) : 0.0f;
    }
    float step;
    if (zero_point) {
        step = greatest / 255.0f - least / 255.0f; /* the difference itself may be infinite */
    } else {
        step = (greatest > -least ? greatest : -least) / 127.0f;
    }
    step = step > LEAST_SCALE ? step : LEAST_SCALE;
    mapping made = {.inverse = 1.0f / step, .is_finite = is_finite};
    if (zero_point) {
        *zero_point = made.zero_point = nearest(-least * made.inverse);
    }
    *scale = is_finite ? step : (bits){.word = 0x7fc00000}.value;
    return made;
}

/* No number falls below the range, because rounding keeps the order of numbers, and only an
 * unsigned one may go beyond it, where the zero point was rounded up too. */
INLINE void write(const void *restrict row, int32_t type, int64_t columns, mapping by,
                  uint8_t *restrict y) {
    const int32_t base = TURNING.number - by.zero_point;
    for (int64_t j = 0; j < columns; j++) {
        int32_t number =
            (bits){.value = load(row, type, j) * by.inverse + TURNING.value}.number - base;
        y[j] = (uint8_t)(number < 255 ? number : 255);
    }
}

INLINE void write_row(const quantise_call *call, int32_t type, const void *row, int64_t i,
                      mapping by) {
    uint8_t *y = call->y + i * call->y_distance;
    if (by.is_finite) {
        write(row, type, call->columns, by, y);
    } else {
        memset(y, 0, (size_t)call->columns);
    }
}

INLINE const void *row_of(const quantise_call *call, int32_t type, int64_t i) {
    const int64_t size_bytes = type == QUANTISE_F32 ? 4 : 2;
    return (const char *)call->x + i * call->x_distance * size_bytes;
}

INLINE void quantise(const quantise_call *call, int32_t type) {
    const ends none = {0, 0};
    mapping by = {0};
    if (call->is_one_scale) {
        ends of_all = none;
        for (int64_t i = 0; i < call->rows; i++) {
            of_all = widen(row_of(call, type, i), type, call->columns, of_all);
        }
        by = choose(of_all, type, call->scales, call->zero_points);
    }
    for (int64_t i = 0; i < call->rows; i++) {
        const void *row = row_of(call, type, i);
        if (!call->is_one_scale) {
            int32_t *zero_point = call->zero_points ? call->zero_points + i : NULL;
            by = choose(widen(row, type, call->columns, none), type, call->scales + i, zero_point);
        }
        write_row(call, type, row, i, by);
    }
}

FOR_EACH_LEVEL(quantise_f32, (const quantise_call *call), quantise(call, QUANTISE_F32))
FOR_EACH_LEVEL(quantise_bf16, (const quantise_call *call), quantise(call, QUANTISE_BF16))
FOR_EACH_LEVEL(quantise_f16, (const quantise_call *call), quantise(call, QUANTISE_F16))

void quantise_rows(const quantise_call *call) {
    switch (call->x_type) {
    case QUANTISE_F16:
        quantise_f16(call);
        break;
    case QUANTISE_BF16:
        quantise_bf16(call);
        break;
    default:
        quantise_f32(call);
    }
}
