/* Times a kernel library: calls gemm_tuner_run in a loop, its parts dealt out to threads.
 *
 * The texts of gemm_tuner.h and sample.h stand before this one. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS_BEFORE_YIELD = 1 << 11 };

typedef int32_t (*run_function)(const gemm_tuner_args *, int32_t phase, int32_t part,
                                int32_t parts);

typedef struct kernel_calls {
    run_function run;
    gemm_tuner_args args; /* packed_w is set for each call */
    int32_t phases;
    int32_t parts;
    int32_t threads; /* not more than there are parts */
} kernel_calls;

typedef struct barrier {
    atomic_int waiting;
    atomic_int turn;
    int32_t parties;
} barrier;

typedef struct worker {
    const kernel_calls *calls;
    bench_weights weights;
    barrier *meeting;
    int64_t warm_up_calls;
    int64_t timed_calls;
    int32_t first_part;
    int32_t status; /* not 0 if the kernel refused a call */
} worker;

static void meet(barrier *meeting) {
    if (meeting->parties == 1) {
        return;
    }
    int turn = atomic_load_explicit(&meeting->turn, memory_order_relaxed);
    if (atomic_fetch_add(&meeting->waiting, 1) + 1 == meeting->parties) {
        atomic_store_explicit(&meeting->waiting, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->turn, turn + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&meeting->turn, memory_order_acquire) == turn;
         spins++) {
        if (spins < SPINS_BEFORE_YIELD) {
            __builtin_ia32_pause();
        } else {
            sched_yield();
        }
    }
}

static void call(worker *self, int64_t count) {
    const kernel_calls *calls = self->calls;
    gemm_tuner_args args = calls->args;
    for (int64_t i = 0; i < count; i++) {
        args.packed_w = bench_next_weights(&self->weights);
        for (int32_t phase = 0; phase < calls->phases; phase++) {
            for (int32_t part = self->first_part; part < calls->parts; part += calls->threads) {
                self->status |= calls->run(&args, phase, part, calls->parts);
            }
            meet(self->meeting);
        }
    }
}

static void *work(void *argument) {
    worker *self = argument;
    call(self, self->warm_up_calls);
    meet(self->meeting);
    call(self, self->timed_calls);
    return NULL;
}

/* Time `timed_calls` calls after `warm_up_calls` that do not count. Returns 0, -1 if the threads
 * could not be started, or -2 if the kernel refused a call. */
int32_t bench_time_kernel(const kernel_calls *calls, bench_weights *weights, int64_t warm_up_calls,
                          int64_t timed_calls, bench_sample *sample) {
    int32_t helpers = calls->threads - 1;
    barrier meeting = {.parties = calls->threads};
    worker leader = {calls, *weights, &meeting, warm_up_calls, timed_calls, 0, 0};
    worker *workers = calloc(calls->threads, sizeof *workers);
    pthread_t *threads = calloc(calls->threads, sizeof *threads);
    if (workers == NULL || threads == NULL) {
        return -1;
    }
    for (int32_t i = 0; i < helpers; i++) {
        workers[i] = leader;
        workers[i].first_part = i + 1;
        if (pthread_create(&threads[i], NULL, work, &workers[i]) != 0) {
            return -1;
        }
    }
    call(&leader, warm_up_calls);
    meet(&meeting);
    bench_sample begin = bench_begin();
    call(&leader, timed_calls);
    *sample = bench_end(begin);
    for (int32_t i = 0; i < helpers; i++) {
        pthread_join(threads[i], NULL);
        leader.status |= workers[i].status;
    }
    weights->next = leader.weights.next;
    free(threads);
    free(workers);
    return leader.status == 0 ? 0 : -2;
}
