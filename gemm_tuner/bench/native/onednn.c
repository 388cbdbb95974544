/* oneDNN as a baseline: a primitive executed in a loop in C, between two passes if it needs them.
 *
 * The text of sample.h stands before this one. The primitive and its arguments are made by
 * gemm_tuner/libraries; the functions come from the library that made them, so that several
 * versions can be loaded, none of which sees the other's names. */
typedef struct onednn_layer {
    int (*execute)(void *primitive, void *stream, int count, const void *arguments);
    int (*wait)(void *stream);
    int (*set_data_handle)(void *memory, void *handle);
    void *primitive;
    void *stream;
    void *w; /* the memory object of the weights, NULL where they lie where they are */
    const void *arguments;
    int32_t argument_count;
    void *reorder; /* of w in each call, or NULL */
    void *reorder_stream;
    const void *reorder_arguments;
    int32_t reorder_argument_count;
    int32_t before_count; /* how many passes stand before the product */
    bench_pass before[BENCH_PASSES];
    bench_pass after;
} onednn_layer;

static int call(const onednn_layer *layer, bench_weights *weights, int64_t count) {
    int status = 0;
    for (int64_t i = 0; i < count; i++) {
        if (layer->w && weights->count > 1) {
            layer->set_data_handle(layer->w, (void *)bench_next_weights(weights));
        }
        for (int32_t pass = 0; pass < layer->before_count; pass++) {
            bench_run_pass(&layer->before[pass]);
        }
        if (layer->reorder) {
            status |= layer->execute(layer->reorder, layer->reorder_stream,
                                     layer->reorder_argument_count, layer->reorder_arguments);
        }
        status |= layer->execute(layer->primitive, layer->stream, layer->argument_count,
                                 layer->arguments);
        bench_run_pass(&layer->after);
    }
    return status | layer->wait(layer->stream);
}

/* Time `timed_calls` calls after some that do not count. Returns the status of oneDNN. */
int32_t onednn_time(const onednn_layer *layer, bench_weights *weights, int64_t warm_up_calls,
                    int64_t timed_calls, bench_sample *sample) {
    int status = layer->w ? layer->set_data_handle(layer->w, (void *)weights->copies[0]) : 0;
    status |= call(layer, weights, warm_up_calls);
    bench_sample begin = bench_begin();
    status |= call(layer, weights, timed_calls);
    *sample = bench_end(begin);
    return status;
}
