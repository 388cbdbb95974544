/* Compute a layer with the kernels of a bundle, in plain C, and write the result to a file.
 *
 *     gemm-tuner sweep --shapes layers.csv
 *     gemm-tuner bundle layers.csv bundle
 *     cc -O2 -std=c11 -Ibundle call_bundle.c bundle/gemm_tuner_bundle.c -o call_bundle -ldl
 *     ./call_bundle bundle/kernels 'f32 *x3072x768 nk bias+relu' 128 3072 768 y.bin
 *
 * The layer is y = relu(x @ w.T + bias) in f32, with numbers from a generator; or the product of two
 * activations 'matmul f32 *x3072x768 nk bias+relu', which gets w in the call.
 */
#include "gemm_tuner_bundle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *what, const char *detail) {
    fprintf(stderr, "%s: %s\n", what, detail);
    exit(EXIT_FAILURE);
}

/* Numbers in [-1, 1) from a linear congruential generator: the same on every machine. */
static float *numbers(int64_t count, uint32_t seed) {
    float *values = malloc((size_t)count * sizeof *values);
    if (values == NULL) fail("memory is short", "take a smaller layer");
    for (int64_t i = 0; i < count; ++i) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    return values;
}

int main(int argc, char **argv) {
    char message[512];
    if (argc != 7) fail("wrong usage", "call_bundle KERNELS LAYER M N K OUT");
    int64_t m = atoll(argv[3]), n = atoll(argv[4]), k = atoll(argv[5]);
    gemm_tuner_bundle *bundle = gemm_tuner_bundle_open(argv[1], message, sizeof message);
    if (bundle == NULL) fail("the bundle cannot be used", message);
    const gemm_tuner_layer *layer = gemm_tuner_bundle_find(bundle, argv[2]);
    if (layer == NULL) fail("the bundle has no such layer", argv[2]);

    float *x = numbers(m * k, 1), *w = numbers(n * k, 2), *bias = numbers(n, 3);
    float *y = numbers(m * n, 4);
    gemm_tuner_weights weights = {.size_bytes = sizeof weights, .elements = w, .leading_dimension = k};
    int packs_ahead = strncmp(argv[2], "matmul ", 7) != 0;
    gemm_tuner_packed *packed = packs_ahead ? gemm_tuner_layer_pack(layer, &weights) : NULL;
    if (packs_ahead && packed == NULL) fail("the weights cannot be packed", argv[2]);
    gemm_tuner_operand operands[] = {{.elements = bias, .leading_dimension = n}};
    gemm_tuner_args args = {
        .size_bytes = sizeof args,
        .m = m,
        .batch = 1,
        .x = x,
        .x_leading_dimension = k,
        .y = y,
        .y_leading_dimension = n,
        .operands = operands,
        .operand_count = 1,
        .w = w, /* of two activations; layers read their packed weights */
        .w_leading_dimension = k,
        .heads = 1,
    };
    int32_t status = gemm_tuner_layer_run(layer, packed, &args, 0, NULL, NULL);
    if (status == GEMM_TUNER_NO_KERNEL) fail("there is no kernel for so many rows", argv[3]);
    if (status != GEMM_TUNER_OK) fail("the kernel refused its arguments", argv[2]);

    FILE *file = fopen(argv[6], "wb");
    if (file == NULL || fwrite(y, sizeof *y, (size_t)(m * n), file) != (size_t)(m * n) ||
        fclose(file) != 0)
        fail("the result cannot be written", argv[6]);
    printf("%s\n", gemm_tuner_layer_describe(layer, m));
    gemm_tuner_packed_free(packed);
    gemm_tuner_bundle_close(bundle);
    free(x), free(w), free(bias), free(y);
    return EXIT_SUCCESS;
}
