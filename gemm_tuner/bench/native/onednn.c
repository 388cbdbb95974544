/* oneDNN as a baseline, at its best: weights in the layout that the primitive asks for, reordered
 * once; the epilogue fused as bias and post-ops; the primitive executed in a C loop.
 *
 * The text of sample.h stands before this one; the library is loaded before this driver. The part
 * of the C API of oneDNN 3 that is used is declared here, because its wheel has no headers. A layer
 * lives as long as its process: nothing is freed. */
#include <stdlib.h>
#include <sys/mman.h>

enum { DNNL_F32 = 3, DNNL_S32 = 4, DNNL_FORMAT_ANY = 1, DNNL_ENGINE_CPU = 1, DNNL_STREAM_IN_ORDER = 1 };
enum { DNNL_QUERY_WEIGHTS_MD = 131, DNNL_QUERY_SCRATCHPAD_MD = 136, DNNL_SCRATCHPAD_USER = 1 };
enum {
    DNNL_ARG_SRC = 1,
    DNNL_ARG_SRC_1 = 2,
    DNNL_ARG_DST = 17,
    DNNL_ARG_WEIGHTS = 33,
    DNNL_ARG_BIAS = 41,
    DNNL_ARG_SCRATCHPAD = 80,
    DNNL_ARG_ATTR_SCALES = 4096,
    DNNL_ARG_ATTR_ZERO_POINTS = 8192,
    DNNL_ARG_POST_OP = 32768, /* times the number of the post-op, counted from one */
};

typedef struct dnnl_engine *engine_t;
typedef struct dnnl_stream *stream_t;
typedef struct dnnl_memory *memory_t;
typedef struct dnnl_memory_desc *memory_desc_t;
typedef const struct dnnl_memory_desc *const_memory_desc_t;
typedef struct dnnl_primitive *primitive_t;
typedef struct dnnl_primitive_desc *primitive_desc_t;
typedef struct dnnl_primitive_attr *attributes_t;
typedef struct dnnl_post_ops *post_ops_t;
typedef int64_t dims_t[12];

typedef struct execution_argument {
    int argument;
    memory_t memory;
} execution_argument;

typedef struct dnnl_version_t {
    int major, minor, patch;
} dnnl_version_t;

const dnnl_version_t *dnnl_version(void);
int dnnl_engine_create(engine_t *, int kind, size_t index);
int dnnl_stream_create(stream_t *, engine_t, unsigned flags);
int dnnl_stream_wait(stream_t);
int dnnl_memory_desc_create_with_strides(memory_desc_t *, int ndims, const dims_t, int data_type,
                                         const dims_t strides);
int dnnl_memory_desc_create_with_tag(memory_desc_t *, int ndims, const dims_t, int data_type,
                                     int tag);
size_t dnnl_memory_desc_get_size(const_memory_desc_t);
int dnnl_memory_create(memory_t *, const_memory_desc_t, engine_t, void *handle);
int dnnl_memory_set_data_handle(memory_t, void *handle);
int dnnl_primitive_attr_create(attributes_t *);
int dnnl_primitive_attr_set_post_ops(attributes_t, post_ops_t);
int dnnl_primitive_attr_set_scratchpad_mode(attributes_t, int mode);
int dnnl_primitive_attr_set_scales_mask(attributes_t, int argument, int mask);
int dnnl_primitive_attr_set_zero_points_mask(attributes_t, int argument, int mask);
int dnnl_post_ops_create(post_ops_t *);
int dnnl_post_ops_append_eltwise(post_ops_t, int algorithm, float alpha, float beta);
int dnnl_post_ops_append_binary(post_ops_t, int algorithm, const_memory_desc_t);
int dnnl_matmul_primitive_desc_create(primitive_desc_t *, engine_t, const_memory_desc_t x,
                                      const_memory_desc_t w, const_memory_desc_t bias,
                                      const_memory_desc_t y, attributes_t);
int dnnl_reorder_primitive_desc_create(primitive_desc_t *, const_memory_desc_t, engine_t,
                                       const_memory_desc_t, engine_t, attributes_t);
const_memory_desc_t dnnl_primitive_desc_query_md(primitive_desc_t, int query, int index);
int dnnl_primitive_create(primitive_t *, primitive_desc_t);
int dnnl_primitive_execute(primitive_t, stream_t, int count, const execution_argument *);

enum { MAX_STEPS = 16, MAX_ARGUMENTS = MAX_STEPS + 9 };
enum { HUGE_PAGE_BYTES = 2 << 20 };

/* One post-op: an element-wise function, or a binary one with an operand that may have one row or
 * one column. */
typedef struct onednn_step {
    int32_t algorithm;
    float alpha;
    float beta;
    int32_t operand_rows, operand_columns;
    int32_t operand_type;
    void *operand; /* NULL for an element-wise function */
} onednn_step;

typedef struct onednn_layer_description {
    int64_t m, n, k;
    int32_t x_type, w_type, y_type; /* data types of oneDNN */
    int64_t w_k_stride, w_n_stride;
    void *x;
    void *y;
    void *bias; /* (n,), or NULL */
    int32_t bias_type;
    void *x_scale;      /* one float for all of x, or NULL */
    void *w_scales;     /* a float for each of n columns, or NULL */
    void *x_zero_point; /* one int32_t, or NULL */
    void *y_zero_point; /* one int32_t, or NULL */
    const onednn_step *steps;
    int32_t step_count;
} onednn_layer_description;

typedef struct onednn_layer {
    engine_t engine;
    stream_t stream;
    primitive_t primitive;
    memory_desc_t plain_weights;
    const_memory_desc_t packed_weights;
    execution_argument arguments[MAX_ARGUMENTS];
    int argument_count;
} onednn_layer;

#define TRY(expression)                                                                            \
    do {                                                                                           \
        int try_status = (expression);                                                             \
        if (try_status != 0) {                                                                     \
            return try_status;                                                                     \
        }                                                                                          \
    } while (0)

static int describe_matrix(memory_desc_t *description, int64_t rows, int64_t columns,
                           int32_t type) {
    dims_t dims = {rows, columns};
    dims_t strides = {columns, 1};
    return dnnl_memory_desc_create_with_strides(description, 2, dims, type, strides);
}

static int add_argument(onednn_layer *layer, int argument, const_memory_desc_t description,
                        void *handle) {
    memory_t memory;
    TRY(dnnl_memory_create(&memory, description, layer->engine, handle));
    layer->arguments[layer->argument_count++] = (execution_argument){argument, memory};
    return 0;
}

/* Give the primitive an argument that holds the scales or zero points of another argument. */
static int add_vector(onednn_layer *layer, int argument, int64_t length, int32_t type,
                      void *elements) {
    memory_desc_t vector;
    dims_t dims = {length};
    dims_t strides = {1};
    TRY(dnnl_memory_desc_create_with_strides(&vector, 1, dims, type, strides));
    return add_argument(layer, argument, vector, elements);
}

static int add_quantisation(onednn_layer *layer, const onednn_layer_description *wanted,
                            attributes_t attributes) {
    enum { FOR_ALL = 0, FOR_EACH_COLUMN = 1 << 1 };
    if (wanted->x_scale != NULL) {
        TRY(dnnl_primitive_attr_set_scales_mask(attributes, DNNL_ARG_SRC, FOR_ALL));
        TRY(add_vector(layer, DNNL_ARG_ATTR_SCALES | DNNL_ARG_SRC, 1, DNNL_F32, wanted->x_scale));
    }
    if (wanted->w_scales != NULL) {
        TRY(dnnl_primitive_attr_set_scales_mask(attributes, DNNL_ARG_WEIGHTS, FOR_EACH_COLUMN));
        TRY(add_vector(layer, DNNL_ARG_ATTR_SCALES | DNNL_ARG_WEIGHTS, wanted->n, DNNL_F32,
                       wanted->w_scales));
    }
    if (wanted->x_zero_point != NULL) {
        TRY(dnnl_primitive_attr_set_zero_points_mask(attributes, DNNL_ARG_SRC, FOR_ALL));
        TRY(add_vector(layer, DNNL_ARG_ATTR_ZERO_POINTS | DNNL_ARG_SRC, 1, DNNL_S32,
                       wanted->x_zero_point));
    }
    if (wanted->y_zero_point != NULL) {
        TRY(dnnl_primitive_attr_set_zero_points_mask(attributes, DNNL_ARG_DST, FOR_ALL));
        TRY(add_vector(layer, DNNL_ARG_ATTR_ZERO_POINTS | DNNL_ARG_DST, 1, DNNL_S32,
                       wanted->y_zero_point));
    }
    return 0;
}

static int add_steps(onednn_layer *layer, const onednn_layer_description *wanted,
                     attributes_t attributes) {
    post_ops_t post_ops;
    TRY(dnnl_post_ops_create(&post_ops));
    for (int32_t i = 0; i < wanted->step_count; i++) {
        const onednn_step *step = &wanted->steps[i];
        if (step->operand == NULL) {
            TRY(dnnl_post_ops_append_eltwise(post_ops, step->algorithm, step->alpha, step->beta));
            continue;
        }
        memory_desc_t operand;
        TRY(describe_matrix(&operand, step->operand_rows, step->operand_columns,
                            step->operand_type));
        TRY(dnnl_post_ops_append_binary(post_ops, step->algorithm, operand));
        TRY(add_argument(layer, DNNL_ARG_POST_OP * (i + 1) | DNNL_ARG_SRC_1, operand,
                         step->operand));
    }
    return dnnl_primitive_attr_set_post_ops(attributes, post_ops);
}

static void *allocate_scratchpad(size_t bytes) {
    size_t rounded = (bytes + HUGE_PAGE_BYTES) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    void *memory = aligned_alloc(HUGE_PAGE_BYTES, rounded);
    if (memory != NULL && bytes >= HUGE_PAGE_BYTES) {
        madvise(memory, rounded, MADV_HUGEPAGE);
    }
    return memory;
}

static int create(const onednn_layer_description *wanted, onednn_layer *layer) {
    TRY(dnnl_engine_create(&layer->engine, DNNL_ENGINE_CPU, 0));
    TRY(dnnl_stream_create(&layer->stream, layer->engine, DNNL_STREAM_IN_ORDER));

    memory_desc_t x, w, y, bias = NULL;
    dims_t w_dims = {wanted->k, wanted->n};
    dims_t w_strides = {wanted->w_k_stride, wanted->w_n_stride};
    TRY(describe_matrix(&x, wanted->m, wanted->k, wanted->x_type));
    TRY(describe_matrix(&y, wanted->m, wanted->n, wanted->y_type));
    TRY(dnnl_memory_desc_create_with_tag(&w, 2, w_dims, wanted->w_type, DNNL_FORMAT_ANY));
    TRY(dnnl_memory_desc_create_with_strides(&layer->plain_weights, 2, w_dims,
                                             wanted->w_type, w_strides));
    layer->arguments[0].argument = DNNL_ARG_WEIGHTS; /* its memory is made below */
    layer->argument_count = 1;
    TRY(add_argument(layer, DNNL_ARG_SRC, x, wanted->x));
    TRY(add_argument(layer, DNNL_ARG_DST, y, wanted->y));
    if (wanted->bias != NULL) {
        TRY(describe_matrix(&bias, 1, wanted->n, wanted->bias_type));
        TRY(add_argument(layer, DNNL_ARG_BIAS, bias, wanted->bias));
    }

    attributes_t attributes;
    primitive_desc_t description;
    TRY(dnnl_primitive_attr_create(&attributes));
    TRY(dnnl_primitive_attr_set_scratchpad_mode(attributes, DNNL_SCRATCHPAD_USER));
    TRY(add_quantisation(layer, wanted, attributes));
    TRY(add_steps(layer, wanted, attributes));
    TRY(dnnl_matmul_primitive_desc_create(&description, layer->engine, x, w, bias, y, attributes));
    TRY(dnnl_primitive_create(&layer->primitive, description));

    layer->packed_weights = dnnl_primitive_desc_query_md(description, DNNL_QUERY_WEIGHTS_MD, 0);
    TRY(dnnl_memory_create(&layer->arguments[0].memory, layer->packed_weights, layer->engine,
                           NULL));
    const_memory_desc_t scratchpad =
        dnnl_primitive_desc_query_md(description, DNNL_QUERY_SCRATCHPAD_MD, 0);
    return add_argument(layer, DNNL_ARG_SCRATCHPAD, scratchpad,
                        allocate_scratchpad(dnnl_memory_desc_get_size(scratchpad)));
}

/* Make a layer. Returns NULL and the status of oneDNN if it cannot be made. */
onednn_layer *onednn_create(const onednn_layer_description *wanted, int32_t *status) {
    onednn_layer *layer = calloc(1, sizeof *layer);
    *status = create(wanted, layer);
    return *status == 0 ? layer : NULL;
}

void onednn_version(int32_t numbers[3]) {
    const dnnl_version_t *version = dnnl_version();
    numbers[0] = version->major;
    numbers[1] = version->minor;
    numbers[2] = version->patch;
}

uint64_t onednn_packed_weight_bytes(const onednn_layer *layer) {
    return dnnl_memory_desc_get_size(layer->packed_weights);
}

/* Reorder w into the layout of the primitive. Returns the status of oneDNN. */
int32_t onednn_pack_weights(onednn_layer *layer, void *w, void *packed_w) {
    memory_t from, to;
    primitive_desc_t description;
    primitive_t reorder;
    TRY(dnnl_memory_create(&from, layer->plain_weights, layer->engine, w));
    TRY(dnnl_memory_create(&to, layer->packed_weights, layer->engine, packed_w));
    TRY(dnnl_reorder_primitive_desc_create(&description, layer->plain_weights, layer->engine,
                                           layer->packed_weights, layer->engine, NULL));
    TRY(dnnl_primitive_create(&reorder, description));
    execution_argument arguments[] = {{DNNL_ARG_SRC, from}, {DNNL_ARG_DST, to}};
    TRY(dnnl_primitive_execute(reorder, layer->stream, 2, arguments));
    return dnnl_stream_wait(layer->stream);
}

static int call(onednn_layer *layer, bench_weights *weights, int64_t count) {
    memory_t w = layer->arguments[0].memory;
    int status = 0;
    for (int64_t i = 0; i < count; i++) {
        if (weights->count > 1) {
            dnnl_memory_set_data_handle(w, (void *)bench_next_weights(weights));
        }
        status |= dnnl_primitive_execute(layer->primitive, layer->stream, layer->argument_count,
                                         layer->arguments);
    }
    return status | dnnl_stream_wait(layer->stream);
}

int32_t onednn_time(onednn_layer *layer, bench_weights *weights, int64_t warm_up_calls,
                    int64_t timed_calls, bench_sample *sample) {
    TRY(dnnl_memory_set_data_handle(layer->arguments[0].memory, (void *)weights->copies[0]));
    TRY(call(layer, weights, warm_up_calls));
    bench_sample begin = bench_begin();
    TRY(call(layer, weights, timed_calls));
    *sample = bench_end(begin);
    return 0;
}
