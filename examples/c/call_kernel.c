/* Load a gemm-tuner kernel library in plain C, call it and check what it computes.
 *
 *     gemm-tuner sweep M N K --epilogue bias+relu
 *     gemm-tuner source M N K --epilogue bias+relu --binary kernel.so --header gemm_tuner.h
 *     cc -O2 -std=c11 -I. call_kernel.c -o call_kernel -ldl -lm
 *     ./call_kernel ./kernel.so M N K
 *
 * kernel.so must hold a kernel for the problem `f32 MxNxK nk bias+relu`, that is
 * y = relu(x @ w.T + bias) with x (M, K), w (N, K), bias (N) and y (M, N), all row-major; or for the
 * same with `matmul` in front (gemm-tuner sweep --operation matmul ...), which gets w in each call.
 */
#include "gemm_tuner.h"

#include <dlfcn.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The functions of a kernel library that a caller needs. */
typedef struct {
    uint32_t (*abi_version)(void);
    const char *(*describe)(void);
    uint64_t (*packed_weight_bytes)(void);
    int32_t (*pack_weights)(const gemm_tuner_weights *, void *);
    uint64_t (*workspace_bytes)(int32_t);
    int32_t (*preferred_parts)(void);
    int32_t (*phases)(void);
    int32_t (*run)(const gemm_tuner_args *, int32_t, int32_t, int32_t);
} kernel_library;

static void fail(const char *what, const char *detail) {
    fprintf(stderr, "%s: %s\n", what, detail);
    exit(EXIT_FAILURE);
}

/* POSIX promises that a pointer from dlsym may be used as a function pointer. */
static void find(void *handle, const char *name, void **function) {
    *function = dlsym(handle, name);
    if (*function == NULL) fail("not a kernel library, a function is missing", name);
}

static kernel_library load(const char *path) {
    kernel_library kernel;
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) fail("the library does not load", dlerror());
    find(handle, "gemm_tuner_abi_version", (void **)&kernel.abi_version);
    if (kernel.abi_version() < GEMM_TUNER_LEAST_ABI_VERSION ||
        kernel.abi_version() > GEMM_TUNER_ABI_VERSION)
        fail("the library has another version of the ABI", path);
    find(handle, "gemm_tuner_describe", (void **)&kernel.describe);
    find(handle, "gemm_tuner_packed_weight_bytes", (void **)&kernel.packed_weight_bytes);
    find(handle, "gemm_tuner_pack_weights", (void **)&kernel.pack_weights);
    find(handle, "gemm_tuner_workspace_bytes", (void **)&kernel.workspace_bytes);
    find(handle, "gemm_tuner_preferred_parts", (void **)&kernel.preferred_parts);
    find(handle, "gemm_tuner_phases", (void **)&kernel.phases);
    find(handle, "gemm_tuner_run", (void **)&kernel.run);
    return kernel;
}

/* aligned_alloc wants a multiple of the alignment, and more than nothing. */
static void *allocate(uint64_t size_bytes) {
    uint64_t whole = (size_bytes / GEMM_TUNER_ALIGNMENT + 1) * GEMM_TUNER_ALIGNMENT;
    void *memory = aligned_alloc(GEMM_TUNER_ALIGNMENT, whole);
    if (memory == NULL) fail("out of memory", "allocate less");
    return memory;
}

static float *allocate_floats(int64_t count) { return allocate((uint64_t)count * sizeof(float)); }

/* Numbers in [-1, 1) from a linear congruential generator: the same on every machine. */
static void fill(float *values, int64_t count, uint32_t seed) {
    for (int64_t i = 0; i < count; ++i) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

static void call(const kernel_library *kernel, const gemm_tuner_args *args, int32_t parts) {
    /* One thread runs all parts here; any number of threads may share them. */
    for (int32_t phase = 0; phase < kernel->phases(); ++phase)
        for (int32_t part = 0; part < parts; ++part)
            if (kernel->run(args, phase, part, parts) != GEMM_TUNER_OK)
                fail("the kernel refused its arguments", "check m and the operands");
}

/* Return the largest error as a share of the bound k * epsilon * sum |x| |w|, plus roundings. */
static double largest_error(int64_t m, int64_t n, int64_t k, const float *x, const float *w,
                            const float *bias, const float *y) {
    double largest = 0.0;
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            double sum = 0.0, magnitude = fabs(bias[j]);
            for (int64_t p = 0; p < k; ++p) {
                double term = (double)x[i * k + p] * (double)w[j * k + p];
                sum += term;
                magnitude += fabs(term);
            }
            double expected = fmax(sum + bias[j], 0.0);
            double bound = (double)(k + 2) * FLT_EPSILON * magnitude + FLT_MIN;
            double share = fabs(y[i * n + j] - expected) / bound;
            if (isnan(share)) return share;
            if (share > largest) largest = share;
        }
    return largest;
}

/* Nothing else keeps a kernel for other sizes from reading and writing beyond the arrays. Return
 * whether it multiplies two activations. */
static int check_problem(const kernel_library *kernel, const char *m, int64_t n, int64_t k) {
    const char *const operations[] = {"", "matmul "};
    char wanted[128];
    for (int i = 0; i < 2; ++i) {
        snprintf(wanted, sizeof wanted, "\"problem\":\"%sf32 %.40sx%lldx%lld nk bias+relu\"",
                 operations[i], m, (long long)n, (long long)k);
        if (strstr(kernel->describe(), wanted) != NULL) return i;
    }
    fail("the kernel is for another problem", kernel->describe());
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 5) fail("wrong usage", "call_kernel KERNEL.so M N K, M as in 64 or 1..64");
    kernel_library kernel = load(argv[1]);
    const char *range = strstr(argv[2], "..");
    int64_t least = atoll(argv[2]), m = range ? atoll(range + 2) : least;
    int64_t n = atoll(argv[3]), k = atoll(argv[4]);
    int multiplies_activations = check_problem(&kernel, argv[2], n, k);
    float *x = allocate_floats(m * k), *w = allocate_floats(n * k);
    float *bias = allocate_floats(n), *y = allocate_floats(m * n);
    fill(x, m * k, 1);
    fill(w, n * k, 2);
    fill(bias, n, 3);

    void *packed_w = allocate(kernel.packed_weight_bytes());
    gemm_tuner_weights weights = {.size_bytes = sizeof weights, .elements = w, .leading_dimension = k};
    if (!multiplies_activations && kernel.pack_weights(&weights, packed_w) != GEMM_TUNER_OK)
        fail("the kernel refused the weights", "it may be made for weights in groups");
    int32_t parts = kernel.preferred_parts();
    gemm_tuner_operand operands[] = {{.elements = bias, .leading_dimension = n}};
    gemm_tuner_args args = {
        .size_bytes = sizeof args,
        .batch = 1,
        .x = x,
        .x_leading_dimension = k,
        .packed_w = packed_w,
        .y = y,
        .y_leading_dimension = n,
        .operands = operands,
        .operand_count = 1,
        .workspace = allocate(kernel.workspace_bytes(parts)),
        .w = w, /* of two activations: nothing is packed ahead */
        .w_leading_dimension = k,
        .heads = 1,
    };
    /* A library for a range of m reads the same packed weights for each. */
    double error = 0.0;
    for (args.m = least; args.m <= m; ++args.m) {
        call(&kernel, &args, parts);
        double share = largest_error(args.m, n, k, x, w, bias, y);
        if (!(share <= error)) error = share; /* also where it is no number */
        if (isnan(error)) break;
    }
    printf("%s\n", kernel.describe());
    printf("largest error: %.3f of the bound\n", error);
    if (!(error <= 1.0)) fail("the result is wrong", "report the kernel above");
    return EXIT_SUCCESS;
}
