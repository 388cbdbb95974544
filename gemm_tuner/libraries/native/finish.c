/* What remains of an epilogue after a product of a library: one pass over its results.
 *
 * A strip of a row is converted to floats, goes through all steps while it lies in the L1 cache,
 * and is converted to the type of y. With no steps, the pass converts a matrix; with rows that lie
 * 0 elements apart, it spreads one row over a matrix. The loops are plain C, which the compiler
 * makes vectors of, once for each of three levels of instructions.
 *
 * Hyperbolic tangent near 0: Cephes, tanhf.c. Error function:
 * Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26, its error at most 1.5e-7. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
/* gcc takes both sides of a choice only where neither can trap: without that, AVX2 has no vectors. */
#pragma GCC optimize("O3", "no-trapping-math", "no-math-errno")
#endif

#define EXPORTED __attribute__((visibility("default")))
#include "exponential.h"
#include "levels.h"
#include "team.h"

/* Element types by their numbers in oneDNN. */
enum { F16 = 1, BF16 = 2, F32 = 3, S32 = 4, S8 = 5, U8 = 6 };
/* The operations of steps: PassOperation of domain/spelling.py. */
enum {
    ADD, MULTIPLY, TAKE_OFFSET, ROUND_AND_ADD, RELU, LEAKY_RELU, CLAMP, HARDSWISH, SIGMOID, SILU,
    TANH, ELU, MISH, GELU_TANH, GELU_ERF,
};
enum { NOTHING, SCALAR, ROW, COLUMN, MATRIX }; /* the shape of an operand */
enum { MAX_STEPS = 16, STRIP = 512 };

typedef struct finish_step {
    int32_t operation;
    int32_t shape;
    int32_t type; /* of the operand */
    float alpha, beta;
    int64_t distance; /* between the rows of a matrix, in elements */
    const void *operand;
} finish_step;

typedef struct finish_call {
    int64_t m, n;
    const void *sums;
    int64_t sums_distance; /* between rows, in elements, as that of y */
    void *y;
    int64_t y_distance;
    int32_t sums_type, y_type;
    int32_t *sums_of_w; /* (n,), for offsets */
    const void *w; /* bytes whose sums are found in each call, or NULL where they are known */
    int64_t k, w_distance;
    int32_t w_type, w_is_kn; /* else it is (n, k) */
    finish_team team;
    int32_t step_count;
    finish_step steps[MAX_STEPS];
} finish_call;

INLINE float of_bf16(uint16_t element) {
    return (bits){.word = (uint32_t)element << 16}.value;
}

INLINE uint16_t to_bf16(float value) {
    bits given = {.value = value};
    uint32_t rounded = given.word + 0x7fff + (given.word >> 16 & 1);
    return (uint16_t)((value != value ? given.word | 0x400000 : rounded) >> 16);
}

/* Half precision, in integers: no compiler's runtime is needed. Source: F. Giesen, "Float->half
 * variants", float_to_half_fast3_rtne and half_to_float_fast5. */
INLINE float of_f16(uint16_t element) {
    uint32_t shifted = (uint32_t)(element & 0x7fff) << 13, exponent = shifted & 0x0f800000;
    bits normal = {.word = shifted + ((127 - 15) << 23)};
    bits subnormal = {.word = normal.word + (1 << 23)};
    subnormal.value -= (bits){.word = 113 << 23}.value;
    uint32_t infinite = normal.word + ((128 - 16) << 23);
    uint32_t magnitude = exponent == 0 ? subnormal.word : normal.word;
    magnitude = exponent == 0x0f800000 ? infinite : magnitude;
    return (bits){.word = magnitude | (uint32_t)(element & 0x8000) << 16}.value;
}

INLINE uint16_t to_f16(float value) {
    bits given = {.value = value};
    uint32_t sign = given.word & 0x80000000, magnitude = given.word ^ sign;
    bits magic = {.word = ((127 - 15) + (23 - 10) + 1) << 23}, sum = {.word = magnitude};
    sum.value += magic.value;
    uint32_t subnormal = sum.word - magic.word;
    uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t half = magnitude < (113 << 23) ? subnormal : normal;
    half = magnitude >= ((127 + 16) << 23) ? special : half;
    return (uint16_t)(half | sign >> 16);
}

INLINE float exponential(float x) {
    /* Keeps NaN; below the range it is about 1e-38, above it infinity. */
    x = x < -87.3f ? -87.3f : x;
    x = x > 89.0f ? 89.0f : x;
    exponential_parts parts = exponential_of(x);
    int32_t half = parts.power >> 1; /* 2^128 is no float, but two factors may make infinity */
    float low = power_of_two(half), high = power_of_two(parts.power - half);
    return x != x ? x : (parts.excess + 1.0f) * low * high;
}

/* e^x - 1 for x <= 0, near 0 as exact as elsewhere. */
INLINE float exponential_minus_one(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 0.0f ? 0.0f : x;
    exponential_parts parts = exponential_of(x);
    float scale = power_of_two(parts.power);
    return scale * parts.excess + (scale - 1.0f);
}

/* x tanh(ln(1 + e^x)), without a difference: 0 times infinity is NaN. */
INLINE float mish(float x) {
    float decay = exponential(-x);
    return x * (1.0f / (decay + 0.5f + 0.5f / (1.0f + 2.0f * decay)));
}

INLINE float logistic(float x) {
    return 1.0f / (1.0f + exponential(-x));
}

INLINE float hyperbolic_tangent(float x) {
    float square = x * x;
    float near = -5.70498872745e-3f;
    near = near * square + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    float magnitude = x < 0.0f ? -x : x;
    float far = 1.0f - 2.0f / (exponential(2.0f * magnitude) + 1.0f);
    far = x < 0.0f ? -far : far;
    return magnitude < 0.625f ? near : far;
}

INLINE float gelu_erf(float x) {
    float magnitude = (x < 0.0f ? -x : x) * 0.7071067811865476f;
    float t = 1.0f / (1.0f + 0.3275911f * magnitude);
    float sum = 1.061405429f;
    sum = sum * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    float tail = sum * t * exponential(-magnitude * magnitude) * 0.5f;
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

INLINE float nearest(float value) {
    /* Integers from 2^23 on have no fraction. */
    float magnitude = value < 0.0f ? -value : value;
    float rounded = value < 0.0f ? (value - 8388608.0f) + 8388608.0f
                                 : (value + 8388608.0f) - 8388608.0f;
    return magnitude < 8388608.0f ? rounded : value;
}

#define FOR_STRIP(expression)                                                                      \
    for (int64_t j = 0; j < count; j++) {                                                          \
        (expression);                                                                              \
    }

/* Write `count` elements as floats, from number `first` on. */
INLINE void load(float *strip, const void *elements, int32_t type, int64_t first, int64_t count) {
    switch (type) {
    case F16: {
        const uint16_t *from = (const uint16_t *)elements + first;
        FOR_STRIP(strip[j] = of_f16(from[j]));
        break;
    }
    case BF16: {
        const uint16_t *from = (const uint16_t *)elements + first;
        FOR_STRIP(strip[j] = of_bf16(from[j]));
        break;
    }
    case S32: {
        const int32_t *from = (const int32_t *)elements + first;
        FOR_STRIP(strip[j] = (float)from[j]);
        break;
    }
    case S8: {
        const int8_t *from = (const int8_t *)elements + first;
        FOR_STRIP(strip[j] = from[j]);
        break;
    }
    case U8: {
        const uint8_t *from = (const uint8_t *)elements + first;
        FOR_STRIP(strip[j] = from[j]);
        break;
    }
    default: {
        const float *from = (const float *)elements + first;
        FOR_STRIP(strip[j] = from[j]);
    }
    }
}

INLINE float saturated(float value, float least, float greatest) {
    float kept = value > least ? value : least; /* NaN is the least */
    return kept < greatest ? kept : greatest;
}

INLINE void store(void *elements, const float *strip, int32_t type, int64_t first, int64_t count) {
    switch (type) {
    case F16: {
        uint16_t *to = (uint16_t *)elements + first;
        FOR_STRIP(to[j] = to_f16(strip[j]));
        break;
    }
    case BF16: {
        uint16_t *to = (uint16_t *)elements + first;
        FOR_STRIP(to[j] = to_bf16(strip[j]));
        break;
    }
    case S8: {
        int8_t *to = (int8_t *)elements + first;
        FOR_STRIP(to[j] = (int8_t)(int32_t)nearest(saturated(strip[j], -128.0f, 127.0f)));
        break;
    }
    case U8: {
        uint8_t *to = (uint8_t *)elements + first;
        FOR_STRIP(to[j] = (uint8_t)(int32_t)nearest(saturated(strip[j], 0.0f, 255.0f)));
        break;
    }
    default: {
        float *to = (float *)elements + first;
        FOR_STRIP(to[j] = strip[j]);
    }
    }
}

/* Apply a step to a strip; `operand` is a strip too, or its first element is for all. */
INLINE void apply(float *strip, const finish_step *step, const float *operand, int64_t count) {
    float alpha = step->alpha, beta = step->beta, one = operand[0];
    int is_one = step->shape == SCALAR || step->shape == COLUMN;
    switch (step->operation) {
    case ADD:
        if (is_one) {
            FOR_STRIP(strip[j] += one);
        } else {
            FOR_STRIP(strip[j] += operand[j]);
        }
        break;
    case MULTIPLY:
        if (is_one) {
            FOR_STRIP(strip[j] *= one);
        } else {
            FOR_STRIP(strip[j] *= operand[j]);
        }
        break;
    case ROUND_AND_ADD:
        FOR_STRIP(strip[j] = nearest(strip[j]) + one);
        break;
    case RELU: /* a NaN stays */
        FOR_STRIP(strip[j] = strip[j] < 0.0f ? 0.0f : strip[j]);
        break;
    case LEAKY_RELU:
        FOR_STRIP(strip[j] = strip[j] < 0.0f ? strip[j] * alpha : strip[j]);
        break;
    case CLAMP:
        FOR_STRIP(strip[j] = strip[j] < alpha ? alpha : strip[j]);
        FOR_STRIP(strip[j] = strip[j] > beta ? beta : strip[j]);
        break;
    case HARDSWISH:
        for (int64_t j = 0; j < count; j++) {
            float value = strip[j], gate = value + 3.0f;
            gate = gate < 0.0f ? 0.0f : gate;
            gate = gate > 6.0f ? 6.0f : gate;
            strip[j] = value * (gate * (1.0f / 6.0f));
        }
        break;
    case SIGMOID:
        FOR_STRIP(strip[j] = logistic(strip[j]));
        break;
    case SILU:
        FOR_STRIP(strip[j] = strip[j] * logistic(strip[j]));
        break;
    case TANH:
        FOR_STRIP(strip[j] = hyperbolic_tangent(strip[j]));
        break;
    case ELU: /* a NaN stays */
        FOR_STRIP(strip[j] =
                      strip[j] < 0.0f ? alpha * exponential_minus_one(strip[j]) : strip[j]);
        break;
    case MISH:
        FOR_STRIP(strip[j] = mish(strip[j]));
        break;
    case GELU_TANH:
        for (int64_t j = 0; j < count; j++) {
            float value = strip[j];
            float inner = 0.7978845608028654f * (value + 0.044715f * value * value * value);
            strip[j] = value * logistic(2.0f * inner);
        }
        break;
    default:
        FOR_STRIP(strip[j] = gelu_erf(strip[j]));
    }
}

/* Write `count` sums of integers, from number `first` on: they may be in floats too. */
INLINE void load_sums(int32_t *sums, const finish_call *call, int64_t first, int64_t count) {
    if (call->sums_type == S32) {
        const int32_t *from = (const int32_t *)call->sums + first;
        FOR_STRIP(sums[j] = from[j]);
    } else {
        const float *from = (const float *)call->sums + first;
        FOR_STRIP(sums[j] = (int32_t)from[j]);
    }
}

/* Return how many steps take an offset off the sums: they come first, and are of integers. */
INLINE int32_t take_offsets(const finish_call *call, int64_t row, int64_t first, int64_t count,
                            int32_t *sums) {
    load_sums(sums, call, row * call->sums_distance + first, count);
    int32_t number = 0;
    for (; number < call->step_count; number++) {
        const finish_step *step = &call->steps[number];
        if (step->operation != TAKE_OFFSET) {
            break;
        }
        const int32_t *offsets = step->operand, *sums_of_w = call->sums_of_w + first;
        uint32_t offset = (uint32_t)offsets[step->shape == COLUMN ? row : 0];
        FOR_STRIP(sums[j] = (int32_t)((uint32_t)sums[j] - offset * (uint32_t)sums_of_w[j]));
    }
    return number;
}

INLINE void finish_strip(const finish_call *call, int64_t row, int64_t first, int64_t count) {
    _Alignas(64) float strip[STRIP], operand[STRIP];
    int32_t number = 0;
    int takes_offset = call->step_count > 0 && call->steps[0].operation == TAKE_OFFSET;
    if (call->sums_type == S32 || call->y_type == S32 || takes_offset) {
        _Alignas(64) int32_t sums[STRIP];
        number = take_offsets(call, row, first, count, sums);
        if (call->y_type == S32) {
            memcpy((int32_t *)call->y + row * call->y_distance + first, sums, 4 * (size_t)count);
            return;
        }
        FOR_STRIP(strip[j] = (float)sums[j]);
    } else {
        load(strip, call->sums, call->sums_type, row * call->sums_distance + first, count);
    }
    for (; number < call->step_count; number++) {
        const finish_step *step = &call->steps[number];
        int64_t from = 0, length = 1;
        switch (step->shape) {
        case NOTHING:
            length = 0;
            break;
        case COLUMN:
            from = row;
            break;
        case ROW:
            from = first;
            length = count;
            break;
        case MATRIX:
            from = row * step->distance + first;
            length = count;
            break;
        default:
            break;
        }
        operand[0] = 0.0f;
        load(operand, step->operand, step->type, from, length);
        apply(strip, step, operand, count);
    }
    store(call->y, strip, call->y_type, row * call->y_distance + first, count);
}

INLINE void finish_between(const finish_call *call, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        for (int64_t first = 0; first < call->n; first += STRIP) {
            int64_t left = call->n - first;
            finish_strip(call, row, first, left < STRIP ? left : STRIP);
        }
    }
}

FOR_EACH_LEVEL(finish_part, (const finish_call *call, int64_t begin, int64_t end),
               finish_between(call, begin, end))

static void finish_own_part(void *argument) {
    const finish_call *call = argument;
    int64_t thread = call->team.thread(), threads = call->team.threads();
    finish_part(call, call->m * thread / threads, call->m * (thread + 1) / threads);
}

INLINE void sum_bytes(const finish_call *call, int64_t begin, int64_t end, int is_signed) {
    const int8_t *w = call->w;
    const uint8_t *unsigned_w = call->w;
    if (call->w_is_kn) {
        memset(call->sums_of_w + begin, 0, (size_t)(end - begin) * sizeof(int32_t));
        for (int64_t p = 0; p < call->k; p++) {
            const int64_t row = p * call->w_distance;
            for (int64_t column = begin; column < end; column++) {
                call->sums_of_w[column] += is_signed ? w[row + column] : unsigned_w[row + column];
            }
        }
        return;
    }
    for (int64_t column = begin; column < end; column++) {
        const int64_t row = column * call->w_distance;
        int32_t sum = 0;
        for (int64_t p = 0; p < call->k; p++) {
            sum += is_signed ? w[row + p] : unsigned_w[row + p];
        }
        call->sums_of_w[column] = sum;
    }
}

INLINE void sums_between(const finish_call *call, int64_t begin, int64_t end) {
    if (call->w_type == S8) {
        sum_bytes(call, begin, end, 1);
    } else {
        sum_bytes(call, begin, end, 0);
    }
}

FOR_EACH_LEVEL(sums_part, (const finish_call *call, int64_t begin, int64_t end),
               sums_between(call, begin, end))

static void sums_own_part(void *argument) {
    const finish_call *call = argument;
    int64_t thread = call->team.thread(), threads = call->team.threads();
    sums_part(call, call->n * thread / threads, call->n * (thread + 1) / threads);
}

/* Write y. */
EXPORTED void finish_rows(const finish_call *call) {
    if (call->w != NULL && call->team.parallel != NULL) {
        call->team.parallel(sums_own_part, (void *)call, 0, 0);
    } else if (call->w != NULL) {
        sums_part(call, 0, call->n);
    }
    if (call->team.parallel != NULL && call->m > 1) {
        call->team.parallel(finish_own_part, (void *)call, 0, 0);
        return;
    }
    finish_part(call, 0, call->m);
}

/* The size of its argument: a caller of another version has another. */
#ifdef SOURCE_SHA256 /* of this file, where it is built with the package */
EXPORTED const char finish_source_sha256[] = SOURCE_SHA256;
#endif
