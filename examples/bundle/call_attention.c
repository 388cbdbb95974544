/* Call bundled attention in plain C: 2 heads of queries that share the keys and values of one.
 *
 *     gemm-tuner sweep --shapes layers.csv      whose operation is attention, steps scale+causal
 *     gemm-tuner bundle layers.csv bundle
 *     cc -O2 -std=c11 -Ibundle call_attention.c bundle/gemm_tuner_bundle.c -o call_attention -ldl
 *     ./call_attention bundle/kernels 'attention f32 *x512x64 scale+causal' 128 512 64 y.bin
 *
 * Rows lie as projections write them: (rows, heads, size). Writes y (m, 2, k) to a file.
 */
#include "gemm_tuner_bundle.h"

#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 2 };

static void fail(const char *what, const char *detail) {
    fprintf(stderr, "%s: %s\n", what, detail);
    exit(EXIT_FAILURE);
}

/* Numbers in [-1, 1) from a linear congruential generator: the same on every machine. */
static float *numbers(int64_t count, uint32_t seed) {
    float *values = malloc((size_t)count * sizeof *values);
    if (values == NULL) fail("out of memory", "give smaller sizes");
    for (int64_t i = 0; i < count; ++i) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    return values;
}

int main(int argc, char **argv) {
    if (argc != 7) fail("wrong usage", "call_attention KERNELS LAYER M N K OUT");
    char message[256];
    gemm_tuner_bundle *bundle = gemm_tuner_bundle_open(argv[1], message, sizeof message);
    if (bundle == NULL) fail("the bundle does not open", message);
    const gemm_tuner_layer *layer = gemm_tuner_bundle_find(bundle, argv[2]);
    if (layer == NULL) fail("the bundle has no such layer", argv[2]);
    const int64_t m = atoll(argv[3]), n = atoll(argv[4]), k = atoll(argv[5]);
    float *q = numbers(m * HEADS * k, 1), *keys = numbers(n * k, 2), *values = numbers(n * k, 3);
    float *y = numbers(m * HEADS * k, 4);
    const float scale = 0.5f;
    const gemm_tuner_operand operands[] = {{.elements = &scale}};
    const gemm_tuner_args args = {
        .size_bytes = sizeof args,
        .m = m,
        .n = n,
        .batch = 1,
        .heads = HEADS,
        .x = q,
        .x_leading_dimension = HEADS * k,
        .x_head_stride = k,
        .w = keys, /* a stride of 0 for heads: both have the same */
        .w_leading_dimension = k,
        .v = values,
        .v_leading_dimension = k,
        .y = y,
        .y_leading_dimension = HEADS * k,
        .y_head_stride = k,
        .operands = operands,
        .operand_count = 1,
    };
    int32_t status = gemm_tuner_layer_run(layer, NULL, &args, 0, NULL, NULL);
    if (status == GEMM_TUNER_NO_KERNEL) fail("there is no kernel for so many rows", argv[3]);
    if (status != GEMM_TUNER_OK) fail("the kernel refused its arguments", argv[2]);

    FILE *file = fopen(argv[6], "wb");
    const size_t count = (size_t)(m * HEADS * k);
    if (file == NULL || fwrite(y, sizeof *y, count, file) != count || fclose(file) != 0)
        fail("the result cannot be written", argv[6]);
    printf("%s\n", gemm_tuner_layer_describe(layer, m));
    gemm_tuner_bundle_close(bundle);
    free(q), free(keys), free(values), free(y);
    return EXIT_SUCCESS;
}
