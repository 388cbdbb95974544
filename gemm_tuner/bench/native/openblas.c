/* The OpenBLAS inside NumPy as a baseline: the product, between two passes if it needs them.
 *
 * The text of sample.h stands before this one; the library is loaded before this driver. */
enum { ROW_MAJOR = 101, AS_STORED = 111 };

void scipy_cblas_sgemm64_(int order, int transpose_a, int transpose_b, int64_t m, int64_t n,
                          int64_t k, float alpha, const float *a, int64_t lda, const float *b,
                          int64_t ldb, float beta, float *c, int64_t ldc);

void scipy_cblas_sgemv64_(int order, int transpose, int64_t rows, int64_t columns, float alpha,
                          const float *a, int64_t lda, const float *x, int64_t x_step, float beta,
                          float *y, int64_t y_step);

/* w is (k, n), but (n, k) when m is 1. */
typedef struct openblas_layer {
    int64_t m, n, k;
    const float *x;
    float *y;
    bench_pass before, after;
} openblas_layer;

static void multiply(const openblas_layer *layer, const float *w) {
    int64_t m = layer->m, n = layer->n, k = layer->k, k_step = k > 0 ? k : 1;
    if (m == 1) {
        scipy_cblas_sgemv64_(ROW_MAJOR, AS_STORED, n, k, 1.0f, w, k_step, layer->x, 1, 0.0f,
                             layer->y, 1);
    } else if (n == 1) {
        scipy_cblas_sgemv64_(ROW_MAJOR, AS_STORED, m, k, 1.0f, layer->x, k_step, w, 1, 0.0f,
                             layer->y, 1);
    } else {
        scipy_cblas_sgemm64_(ROW_MAJOR, AS_STORED, AS_STORED, m, n, k, 1.0f, layer->x, k, w, n,
                             0.0f, layer->y, n);
    }
}

static void call(const openblas_layer *layer, bench_weights *weights, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        bench_run_pass(&layer->before);
        multiply(layer, bench_next_weights(weights));
        bench_run_pass(&layer->after);
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
