/* What every timing driver measures: the time of a number of calls, and what disturbed it.
 *
 * The text of this file stands before that of a driver when both are compiled. */
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <time.h>

typedef struct bench_sample {
    int64_t elapsed_ns;
    int64_t involuntary_switches; /* of the whole process, while the clock ran */
} bench_sample;

/* The weights a driver calls with: copy after copy, so that those of a call are not in the caches
 * when the copies together exceed them. */
typedef struct bench_weights {
    const void *const *copies;
    int64_t count;
    int64_t next; /* the copy of the next call */
} bench_weights;

static int64_t bench_switches(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nivcsw;
}

static int64_t bench_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline bench_sample bench_begin(void) {
    int64_t switches = bench_switches();
    return (bench_sample){.elapsed_ns = bench_now_ns(), .involuntary_switches = switches};
}

static inline bench_sample bench_end(bench_sample begin) {
    int64_t now_ns = bench_now_ns();
    return (bench_sample){
        .elapsed_ns = now_ns - begin.elapsed_ns,
        .involuntary_switches = bench_switches() - begin.involuntary_switches,
    };
}

static inline const void *bench_next_weights(bench_weights *weights) {
    const void *copy = weights->copies[weights->next];
    if (++weights->next == weights->count) {
        weights->next = 0;
    }
    return copy;
}

enum { BENCH_PASSES = 4 };

/* A pass over an array before or after the product of a library; `run` is NULL if there is none. */
typedef struct bench_pass {
    void (*run)(const void *argument);
    const void *argument;
} bench_pass;

static inline void bench_run_pass(const bench_pass *pass) {
    if (pass->run != NULL) {
        pass->run(pass->argument);
    }
}
