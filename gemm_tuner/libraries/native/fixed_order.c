/* What the fixed order of additions means, in plain C: the definition that kernels are held to, and
 * what computes where no such kernel is served.
 *
 * A product is acc = fma(x[i, l], w[l, j], acc) from +0, for l from 0 to k - 1. Of weights in groups,
 * that is the sum of a group; these, times their scales, are added from +0, the first group first.
 * Each operation of a step is rounded by itself. The steps are those of the templates in parts/ and
 * of the table in domain/step_table.py; exponentials and error functions say there how exact they
 * are.
 *
 * No instruction that multiplies and adds may stand for two operations of a step. A compiler may use
 * one where the CPU that it compiles for has it, which zig and some systems take as the default. */
#include <stdint.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("O3", "fp-contract=off", "no-trapping-math", "no-math-errno")
#endif

#define EXPORTED __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* The operations of steps: PassOperation of domain/spelling.py; sums of integers come here without
 * offsets. */
enum {
    ADD, MULTIPLY, TAKE_OFFSET, ROUND_AND_ADD, RELU, LEAKY_RELU, CLAMP, HARDSWISH, SIGMOID, SILU,
    TANH, ELU, MISH, GELU_TANH, GELU_ERF,
};
enum { COLUMNS_AT_ONCE = 256 };

typedef union bits {
    float value;
    uint32_t word;
} bits;

typedef union long_bits {
    double value;
    uint64_t word;
} long_bits;

/* x * y + z, rounded once, where no instruction does it. The product is exact in double; the sum is
 * rounded to odd there, so that rounding it to float is as if it were exact. Source: S. Boldo and
 * G. Melquiond, "Emulation of a FMA and correctly rounded sums". */
INLINE float multiply_add(float x, float y, float z) {
    double product = (double)x * y;
    long_bits sum = {.value = product + z};
    double of_z = sum.value - product;
    double error = (product - (sum.value - of_z)) + (z - of_z);
    int is_even = (sum.word & 1) == 0;
    if (is_even && (error > 0.0 || error < 0.0)) {
        sum.word += (error > 0.0) == (sum.value > 0.0) ? 1 : -1;
    }
    return (float)sum.value;
}

/* The sums of a group of weights, times its scales, are added to those of the groups before: two
 * operations. */
static void add_group(int64_t count, const float *sums,
                                                const float *scales, float *y) {
    for (int64_t j = 0; j < count; j++) {
        float scaled = sums[j] * scales[j];
        y[j] = y[j] + scaled;
    }
}

/* y (m, n) is x (m, k) times w (k, n), all dense. Weights in groups of `group` steps of k are
 * numbers of their own type, behind which their scales lie, (groups, n); without, group is 0. */
#define DEFINE_PRODUCT(name, multiply_add)                                                         \
    static void name(int64_t m, int64_t n, int64_t k, int64_t group, const float *x,               \
                     const float *w, float *y) {                                                   \
        int64_t depth = group > 0 ? group : k;                                                     \
        for (int64_t first = 0; first < n; first += COLUMNS_AT_ONCE) {                             \
            int64_t left = n - first, count = left < COLUMNS_AT_ONCE ? left : COLUMNS_AT_ONCE;     \
            for (int64_t i = 0; i < m; i++) {                                                      \
                float *at = y + i * n + first;                                                     \
                for (int64_t j = 0; j < count; j++) {                                              \
                    at[j] = 0.0f;                                                                  \
                }                                                                                  \
                for (int64_t begin = 0; begin < k; begin += depth) {                               \
                    int64_t end = begin + depth < k ? begin + depth : k;                           \
                    float sums[COLUMNS_AT_ONCE] = {0.0f};                                          \
                    for (int64_t l = begin; l < end; l++) {                                        \
                        float element = x[i * k + l];                                              \
                        const float *row = w + l * n + first;                                      \
                        for (int64_t j = 0; j < count; j++) {                                      \
                            sums[j] = multiply_add(element, row[j], sums[j]);                      \
                        }                                                                          \
                    }                                                                              \
                    if (group > 0) {                                                               \
                        add_group(count, sums, w + (k + begin / group) * n + first, at);           \
                    } else {                                                                       \
                        for (int64_t j = 0; j < count; j++) {                                      \
                            at[j] = sums[j];                                                       \
                        }                                                                          \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

DEFINE_PRODUCT(product_on_any_cpu, multiply_add)
__attribute__((target("avx2,fma"))) DEFINE_PRODUCT(product_by_instructions, __builtin_fmaf)

/* With instructions, which must be usable: AVX2 and FMA. */
EXPORTED void fixed_order_product(int64_t m, int64_t n, int64_t k, int64_t group, const float *x,
                                  const float *w, float *y, int32_t uses_instructions) {
    if (uses_instructions) {
        product_by_instructions(m, n, k, group, x, w, y);
    } else {
        product_on_any_cpu(m, n, k, group, x, w, y);
    }
}

/* A NaN in `value` stays: every comparison with it is false. */
INLINE float maximum(float value, float bound) { return bound > value ? bound : value; }
INLINE float minimum(float value, float bound) { return bound < value ? bound : value; }

INLINE float magnitude_of(float value) {
    bits given = {.value = value};
    return (bits){.word = given.word & 0x7fffffff}.value;
}

INLINE float nearest_even(float value) {
    bits sign = {.value = value};
    sign.word &= 0x80000000;
    float magnitude = magnitude_of(value);
    bits whole = {.value = (magnitude + 8388608.0f) - 8388608.0f};
    whole.word |= sign.word;
    return magnitude < 8388608.0f ? whole.value : value;
}

/* e^value is power * (1 + excess). */
typedef struct exponential {
    float power, excess;
} exponential;

INLINE exponential exponential_of(float value) {
    bits shifted = {.value = value * 1.44269504f + 12582912.0f};
    float whole = shifted.value - 12582912.0f;
    float rest = (value - whole * 0.693145752f) - whole * 1.42860677e-6f;
    float series = 1.38825167e-3f;
    series = series * rest + 8.36654752e-3f;
    series = series * rest + 4.16672006e-2f;
    series = series * rest + 1.66665435e-1f;
    series = series * rest + 4.9999997e-1f;
    bits power = {.word = (shifted.word << 23) + 0x3f800000};
    return (exponential){power.value, rest * rest * series + rest};
}

INLINE float exponential_minus_one(float value) {
    exponential decay = exponential_of(maximum(value, -87.0f));
    return decay.power * decay.excess + (decay.power - 1.0f);
}

INLINE float logistic(float value) {
    exponential decay = exponential_of(-minimum(maximum(value, -87.0f), 87.0f));
    float result = 1.0f / (decay.power * decay.excess + decay.power + 1.0f);
    return value < -87.0f ? 0.0f : result;
}

INLINE float hyperbolic_tangent(float value) {
    exponential growth = exponential_of(2.0f * minimum(maximum(value, -10.0f), 10.0f));
    float above_one = growth.power * growth.excess + (growth.power - 1.0f);
    return above_one * (1.0f / (above_one + 2.0f));
}

INLINE float tanh_of_softplus(float value) {
    exponential growth = exponential_of(minimum(maximum(value, -87.0f), 20.0f));
    float power = growth.power * growth.excess + growth.power;
    float above = (power + 2.0f) * power;
    float result = above * (1.0f / (above + 2.0f));
    return value < -87.0f ? 0.0f : result;
}

/* The rises of parts/gelu_polynomial: erf(a / sqrt(2)) / 2, and that of the hyperbolic tangent. */
static const float erf_rise[16] = {
    0.00386261567f, -0.00575806107f, -0.0173016805f, 0.0373662226f,
    0.0164957345f, -0.0983356908f, 0.0633496046f, 0.0955392867f,
    -0.196745694f, 0.0977139026f, 0.120995231f, -0.257117659f,
    0.225942731f, -0.115075402f, 0.0334012546f, 0.495667636f,
};
static const float tanh_rise[16] = {
    0.00299127377f, -0.00119749701f, -0.0182031263f, 0.0198727325f,
    0.0298275277f, -0.0727021098f, 0.0337569863f, 0.0801328868f,
    -0.166269824f, 0.0969995633f, 0.105140552f, -0.251686126f,
    0.229410544f, -0.117265083f, 0.0333455727f, 0.495846242f,
};

INLINE float gelu(float value, const float *rise) {
    float magnitude = magnitude_of(value);
    float u = minimum(magnitude, 5.25f) * 0.380952388f - 1.0f;
    float square = u * u, odd = rise[0], even = rise[1];
    for (int i = 2; i < 16; i += 2) {
        odd = odd * square + rise[i];
        even = even * square + rise[i + 1];
    }
    return magnitude * minimum(odd * u + even, 0.5f) + 0.5f * value;
}

INLINE float keep_nan(float value, float result) { return value == value ? result : value; }

typedef struct fixed_order_step_args {
    int32_t operation;
    float alpha, beta;
    int64_t rows, columns;
    float *values;        /* (rows, columns), dense; the result takes their place */
    const float *operand; /* NULL where a step reads none */
    int64_t row_stride, column_stride; /* of the operand, in elements; 0 where it is the same for all */
} fixed_order_step_args;

#define FOR_EACH_VALUE(expression)                                                                 \
    for (int64_t i = 0; i < args->rows; i++) {                                                     \
        float *values = args->values + i * args->columns;                                          \
        for (int64_t j = 0; j < args->columns; j++) {                                              \
            float value = values[j];                                                               \
            values[j] = (expression);                                                              \
        }                                                                                          \
    }                                                                                              \
    break
#define OPERAND args->operand[i * args->row_stride + j * args->column_stride]

EXPORTED void fixed_order_step(const fixed_order_step_args *args) {
    float alpha = args->alpha, beta = args->beta;
    switch (args->operation) {
    case ADD:
        FOR_EACH_VALUE(value + OPERAND);
    case MULTIPLY:
        FOR_EACH_VALUE(value * OPERAND);
    case ROUND_AND_ADD:
        FOR_EACH_VALUE(nearest_even(value) + OPERAND);
    case RELU:
        FOR_EACH_VALUE(maximum(value, 0.0f));
    case LEAKY_RELU:
        FOR_EACH_VALUE(value < 0.0f ? value * alpha : value);
    case CLAMP:
        FOR_EACH_VALUE(minimum(maximum(value, alpha), beta));
    case HARDSWISH:
        FOR_EACH_VALUE(value * (minimum(maximum(value + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f)));
    case SIGMOID:
        FOR_EACH_VALUE(keep_nan(value, logistic(value)));
    case SILU:
        FOR_EACH_VALUE(value * logistic(value));
    case TANH:
        FOR_EACH_VALUE(keep_nan(value, hyperbolic_tangent(value)));
    case ELU:
        FOR_EACH_VALUE(value < 0.0f ? alpha * exponential_minus_one(value) : value);
    case MISH:
        FOR_EACH_VALUE(value * tanh_of_softplus(value));
    case GELU_TANH:
        FOR_EACH_VALUE(gelu(value, tanh_rise));
    case GELU_ERF:
        FOR_EACH_VALUE(gelu(value, erf_rise));
    }
}
