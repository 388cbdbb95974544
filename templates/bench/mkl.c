/* Intel MKL as a baseline: the product alone, with weights packed once.
 *
 * The text of sample.h stands before this one; the library is loaded before this driver. The part
 * of its C interface that is used is declared here, with integers of 32 bits (LP64). */
#include <stddef.h>

enum { ROW_MAJOR = 101, AS_STORED = 111, TRANSPOSED = 112, PACKED = 151, B_MATRIX = 162 };

typedef uint16_t bf16;

size_t cblas_sgemm_pack_get_size(int identifier, int m, int n, int k);
void cblas_sgemm_pack(int order, int identifier, int transpose, int m, int n, int k, float alpha,
                      const float *source, int leading_dimension, float *packed);
void cblas_sgemm_compute(int order, int transpose_a, int transpose_b, int m, int n, int k,
                         const float *a, int lda, const float *b, int ldb, float beta, float *c,
                         int ldc);
size_t cblas_gemm_bf16bf16f32_pack_get_size(int identifier, int m, int n, int k);
void cblas_gemm_bf16bf16f32_pack(int order, int identifier, int transpose, int m, int n, int k,
                                 const bf16 *source, int leading_dimension, bf16 *packed);
void cblas_gemm_bf16bf16f32_compute(int order, int transpose_a, int transpose_b, int m, int n,
                                    int k, float alpha, const bf16 *a, int lda, const bf16 *b,
                                    int ldb, float beta, float *c, int ldc);

typedef struct mkl_layer {
    int32_t m, n, k;
    int32_t w_leading_dimension;
    int32_t w_is_transposed; /* w is stored as (n, k) */
    int32_t is_bf16;         /* x and w are; y is float in any case */
    const void *x;
    float *y;
} mkl_layer;

uint64_t mkl_packed_weight_bytes(const mkl_layer *layer) {
    return layer->is_bf16
               ? cblas_gemm_bf16bf16f32_pack_get_size(B_MATRIX, layer->m, layer->n, layer->k)
               : cblas_sgemm_pack_get_size(B_MATRIX, layer->m, layer->n, layer->k);
}

void mkl_pack_weights(const mkl_layer *layer, const void *w, void *packed_w) {
    int transpose = layer->w_is_transposed ? TRANSPOSED : AS_STORED;
    if (layer->is_bf16) {
        cblas_gemm_bf16bf16f32_pack(ROW_MAJOR, B_MATRIX, transpose, layer->m, layer->n, layer->k,
                                    w, layer->w_leading_dimension, packed_w);
    } else {
        cblas_sgemm_pack(ROW_MAJOR, B_MATRIX, transpose, layer->m, layer->n, layer->k, 1.0f, w,
                         layer->w_leading_dimension, packed_w);
    }
}

static void call(const mkl_layer *layer, bench_weights *weights, int64_t count) {
    int m = layer->m, n = layer->n, k = layer->k;
    for (int64_t i = 0; i < count; i++) {
        const void *w = bench_next_weights(weights);
        if (layer->is_bf16) {
            cblas_gemm_bf16bf16f32_compute(ROW_MAJOR, AS_STORED, PACKED, m, n, k, 1.0f, layer->x,
                                           k, w, layer->w_leading_dimension, 0.0f, layer->y, n);
        } else {
            cblas_sgemm_compute(ROW_MAJOR, AS_STORED, PACKED, m, n, k, layer->x, k, w,
                                layer->w_leading_dimension, 0.0f, layer->y, n);
        }
    }
}

void mkl_time(const mkl_layer *layer, bench_weights *weights, int64_t warm_up_calls,
              int64_t timed_calls, bench_sample *sample) {
    call(layer, weights, warm_up_calls);
    bench_sample begin = bench_begin();
    call(layer, weights, timed_calls);
    *sample = bench_end(begin);
}
