/* libxsmm 1 as a baseline: a kernel that it generates for one small product.
 *
 * The text of sample.h stands before this one; the library is linked into this driver. To libxsmm,
 * whose matrices lie column after column, y = x @ w is y' = w' @ x'. */
#include <libxsmm.h>

typedef struct libxsmm_layer {
    int32_t m, n, k;
    const float *x;
    float *y;
    libxsmm_smmfunction kernel;
    const float *w; /* (k, n); NULL where each call has another copy of the weights */
} libxsmm_layer;

const char *libxsmm_driver_version(void) {
    return LIBXSMM_VERSION;
}

/* Generate the kernel of a layer. Returns 0, or -1 if libxsmm has none for these sizes. */
int32_t libxsmm_prepare(libxsmm_layer *layer) {
    float alpha = 1.0f, beta = 0.0f;
    int prefetch = LIBXSMM_GEMM_PREFETCH_NONE;
    layer->kernel = libxsmm_smmdispatch(layer->n, layer->m, layer->k, NULL, NULL, NULL, &alpha,
                                        &beta, NULL, &prefetch);
    return layer->kernel == NULL ? -1 : 0;
}

static void call(const libxsmm_layer *layer, bench_weights *weights, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        layer->kernel(layer->w ? layer->w : bench_next_weights(weights), layer->x, layer->y);
    }
}

void libxsmm_time(const libxsmm_layer *layer, bench_weights *weights, int64_t warm_up_calls,
                  int64_t timed_calls, bench_sample *sample) {
    call(layer, weights, warm_up_calls);
    bench_sample begin = bench_begin();
    call(layer, weights, timed_calls);
    *sample = bench_end(begin);
}
