/* Times a kernel library: calls gemm_tuner_run in a loop, its parts shared out by the pool that
 * calls from Python have.
 *
 * The texts of gemm_tuner.h, of that pool, and of sample.h stand before this one. */

typedef struct kernel_calls {
    run_function run;
    gemm_tuner_args args; /* packed_w is set for each call */
    int32_t phases;
    int32_t parts;
    int32_t threads;
} kernel_calls;

static int32_t call(kernel_calls *calls, bench_weights *weights, int64_t count) {
    int32_t status = GEMM_TUNER_OK;
    for (int64_t i = 0; i < count; i++) {
        calls->args.packed_w = bench_next_weights(weights);
        if (calls->parts > 1) {
            status |= pool_run(calls->run, &calls->args, calls->phases, calls->parts,
                               calls->threads);
            continue;
        }
        for (int32_t phase = 0; phase < calls->phases; phase++) {
            status |= calls->run(&calls->args, phase, 0, 1);
        }
    }
    return status;
}

/* Time `timed_calls` calls after `warm_up_calls` that do not count. Returns 0, or -2 if the kernel
 * refused a call. */
int32_t bench_time_kernel(kernel_calls *calls, bench_weights *weights, int64_t warm_up_calls,
                          int64_t timed_calls, bench_sample *sample) {
    pool_configure(calls->threads, NULL);
    int32_t status = call(calls, weights, warm_up_calls);
    bench_sample begin = bench_begin();
    status |= call(calls, weights, timed_calls);
    *sample = bench_end(begin);
    return status == GEMM_TUNER_OK ? 0 : -2;
}

/* Run some parts of one phase after each other on this core, call after call, and add the time of
 * each to `elapsed_ns`. A single part is timed as a whole, so that it may be short. */
int32_t bench_time_parts(kernel_calls *calls, bench_weights *weights, int32_t phase,
                         const int32_t *parts, int64_t count, int64_t timed_calls,
                         int64_t *elapsed_ns) {
    int32_t status = GEMM_TUNER_OK;
    int64_t before_ns = bench_now_ns();
    for (int64_t i = 0; i < timed_calls; i++) {
        calls->args.packed_w = bench_next_weights(weights);
        for (int64_t j = 0; j < count; j++) {
            status |= calls->run(&calls->args, phase, parts[j], calls->parts);
            if (count > 1 || i + 1 == timed_calls) {
                int64_t now_ns = bench_now_ns();
                elapsed_ns[j] += now_ns - before_ns;
                before_ns = now_ns;
            }
        }
    }
    return status == GEMM_TUNER_OK ? 0 : -2;
}
