/* Intel MKL as a baseline: the product with weights packed once or as they are stored, and a pass
 * after it if need be.
 *
 * The text of sample.h stands before this one; the library is loaded before this driver. The part
 * of its C interface that is used is declared here, with integers of 32 bits (LP64). A copy inside
 * another library may lack what is weak here, and is not called for it. */
enum { ROW_MAJOR = 101, AS_STORED = 111, TRANSPOSED = 112, PACKED = 151, B_MATRIX = 162, FIXED_OFFSET = 173 };

#define WEAK __attribute__((weak))

typedef uint16_t bf16;

size_t cblas_sgemm_pack_get_size(int identifier, int m, int n, int k);
void cblas_sgemm_pack(int order, int identifier, int transpose, int m, int n, int k, float alpha,
                      const float *source, int leading_dimension, float *packed);
void cblas_sgemm_compute(int order, int transpose_a, int transpose_b, int m, int n, int k,
                         const float *a, int lda, const float *b, int ldb, float beta, float *c,
                         int ldc);
WEAK size_t cblas_gemm_bf16bf16f32_pack_get_size(int identifier, int m, int n, int k);
WEAK void cblas_gemm_bf16bf16f32_pack(int order, int identifier, int transpose, int m, int n, int k,
                                      const bf16 *source, int leading_dimension, bf16 *packed);
WEAK void cblas_gemm_bf16bf16f32_compute(int order, int transpose_a, int transpose_b, int m, int n,
                                         int k, float alpha, const bf16 *a, int lda, const bf16 *b,
                                         int ldb, float beta, float *c, int ldc);

WEAK size_t cblas_gemm_s8u8s32_pack_get_size(int identifier, int m, int n, int k);
WEAK void cblas_gemm_s8u8s32_pack(int order, int identifier, int transpose, int m, int n, int k,
                                  const void *source, int leading_dimension, void *packed);
WEAK void cblas_gemm_s8u8s32_compute(int order, int transpose_a, int transpose_b, int offset_of_c,
                                     int m, int n, int k, float alpha, const void *a, int lda,
                                     int8_t offset_of_a, const void *b, int ldb, int8_t offset_of_b,
                                     float beta, int32_t *c, int ldc, const int32_t *offset);

enum mkl_product { OF_FLOATS, OF_BF16, OF_BYTES }; /* of u8 by s8 */

typedef struct mkl_layer {
    int32_t m, n, k;
    int32_t w_leading_dimension;
    int32_t w_is_transposed; /* w is stored as (n, k) */
    int32_t product;         /* mkl_product */
    const void *x;
    void *y; /* float, or int32_t for bytes */
    const void *w; /* as it is stored; NULL where the weights of each call are packed */
    bench_pass after;
} mkl_layer;

uint64_t mkl_packed_weight_bytes(const mkl_layer *layer) {
    int m = layer->m, n = layer->n, k = layer->k;
    if (layer->w) {
        return 0;
    }
    switch (layer->product) {
    case OF_BF16:
        return cblas_gemm_bf16bf16f32_pack_get_size(B_MATRIX, m, n, k);
    case OF_BYTES:
        return cblas_gemm_s8u8s32_pack_get_size(B_MATRIX, m, n, k);
    default:
        return cblas_sgemm_pack_get_size(B_MATRIX, m, n, k);
    }
}

void mkl_pack_weights(const mkl_layer *layer, const void *w, void *packed_w) {
    int m = layer->m, n = layer->n, k = layer->k, ldw = layer->w_leading_dimension;
    int transpose = layer->w_is_transposed ? TRANSPOSED : AS_STORED;
    if (layer->w) {
        return;
    }
    switch (layer->product) {
    case OF_BF16:
        cblas_gemm_bf16bf16f32_pack(ROW_MAJOR, B_MATRIX, transpose, m, n, k, w, ldw, packed_w);
        break;
    case OF_BYTES:
        cblas_gemm_s8u8s32_pack(ROW_MAJOR, B_MATRIX, transpose, m, n, k, w, ldw, packed_w);
        break;
    default:
        cblas_sgemm_pack(ROW_MAJOR, B_MATRIX, transpose, m, n, k, 1.0f, w, ldw, packed_w);
    }
}

static void call(const mkl_layer *layer, bench_weights *weights, int64_t count) {
    int m = layer->m, n = layer->n, k = layer->k, ldw = layer->w_leading_dimension;
    int32_t no_offset = 0;
    int form = !layer->w ? PACKED : layer->w_is_transposed ? TRANSPOSED : AS_STORED;
    for (int64_t i = 0; i < count; i++) {
        const void *w = layer->w ? layer->w : bench_next_weights(weights);
        switch (layer->product) {
        case OF_BF16:
            cblas_gemm_bf16bf16f32_compute(ROW_MAJOR, AS_STORED, form, m, n, k, 1.0f, layer->x,
                                           k, w, ldw, 0.0f, layer->y, n);
            break;
        case OF_BYTES:
            cblas_gemm_s8u8s32_compute(ROW_MAJOR, AS_STORED, form, FIXED_OFFSET, m, n, k, 1.0f,
                                       layer->x, k, 0, w, ldw, 0, 0.0f, layer->y, n, &no_offset);
            break;
        default:
            cblas_sgemm_compute(ROW_MAJOR, AS_STORED, form, m, n, k, layer->x, k, w, ldw, 0.0f,
                                layer->y, n);
        }
        bench_run_pass(&layer->after);
    }
}

void mkl_time(const mkl_layer *layer, bench_weights *weights, int64_t warm_up_calls,
              int64_t timed_calls, bench_sample *sample) {
    call(layer, weights, warm_up_calls);
    bench_sample begin = bench_begin();
    call(layer, weights, timed_calls);
    *sample = bench_end(begin);
}
