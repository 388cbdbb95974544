/* The OpenBLAS inside NumPy as a baseline: the product, between passes if it needs them.
 *
 * The text of sample.h stands before this one; the library is loaded before this driver. */
enum { ROW_MAJOR = 101, AS_STORED = 111, TRANSPOSED = 112 };

void scipy_cblas_sgemm64_(int order, int transpose_a, int transpose_b, int64_t m, int64_t n,
                          int64_t k, float alpha, const float *a, int64_t lda, const float *b,
                          int64_t ldb, float beta, float *c, int64_t ldc);

void scipy_cblas_sgemv64_(int order, int transpose, int64_t rows, int64_t columns, float alpha,
                          const float *a, int64_t lda, const float *x, int64_t x_step, float beta,
                          float *y, int64_t y_step);

enum { PASSES_BEFORE = 2 };

/* w is the weights of each call where it is NULL here; (n, k) where it is transposed, else (k, n). */
typedef struct openblas_layer {
    int64_t m, n, k;
    const float *x;
    float *y;
    const float *w;
    int32_t w_is_transposed;
    bench_pass before[PASSES_BEFORE];
    bench_pass after;
} openblas_layer;

static void multiply(const openblas_layer *layer, const float *w) {
    int64_t m = layer->m, n = layer->n, k = layer->k, k_step = k > 0 ? k : 1;
    int is_transposed = layer->w_is_transposed;
    if (m == 1 && is_transposed) {
        scipy_cblas_sgemv64_(ROW_MAJOR, AS_STORED, n, k, 1.0f, w, k_step, layer->x, 1, 0.0f,
                             layer->y, 1);
    } else if (m == 1) {
        scipy_cblas_sgemv64_(ROW_MAJOR, TRANSPOSED, k, n, 1.0f, w, n, layer->x, 1, 0.0f, layer->y,
                             1);
    } else if (n == 1) {
        scipy_cblas_sgemv64_(ROW_MAJOR, AS_STORED, m, k, 1.0f, layer->x, k_step, w, 1, 0.0f,
                             layer->y, 1);
    } else {
        scipy_cblas_sgemm64_(ROW_MAJOR, AS_STORED, is_transposed ? TRANSPOSED : AS_STORED, m, n, k,
                             1.0f, layer->x, k, w, is_transposed ? k_step : n, 0.0f, layer->y, n);
    }
}

static void call(const openblas_layer *layer, bench_weights *weights, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        for (int32_t pass = 0; pass < PASSES_BEFORE; pass++) {
            bench_run_pass(&layer->before[pass]);
        }
        multiply(layer, layer->w ? layer->w : bench_next_weights(weights));
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
