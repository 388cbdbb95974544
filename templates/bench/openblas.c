/* The OpenBLAS inside NumPy as a baseline: the product alone, without the epilogue.
 *
 * The text of sample.h stands before this one; the library is loaded before this driver. */
enum { ROW_MAJOR = 101, AS_STORED = 111 };

void scipy_cblas_sgemm64_(int order, int transpose_a, int transpose_b, int64_t m, int64_t n,
                          int64_t k, float alpha, const float *a, int64_t lda, const float *b,
                          int64_t ldb, float beta, float *c, int64_t ldc);

typedef struct openblas_layer {
    int64_t m, n, k;
    const float *x;
    float *y;
} openblas_layer;

static void call(const openblas_layer *layer, bench_weights *weights, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        scipy_cblas_sgemm64_(ROW_MAJOR, AS_STORED, AS_STORED, layer->m, layer->n, layer->k, 1.0f,
                             layer->x, layer->k, bench_next_weights(weights), layer->n, 0.0f,
                             layer->y, layer->n);
    }
}

int32_t openblas_time(const openblas_layer *layer, bench_weights *weights, int64_t warm_up_calls,
                      int64_t timed_calls, bench_sample *sample) {
    call(layer, weights, warm_up_calls);
    bench_sample begin = bench_begin();
    call(layer, weights, timed_calls);
    *sample = bench_end(begin);
    return 0;
}
