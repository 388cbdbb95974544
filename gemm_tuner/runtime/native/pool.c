#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* How long a thread looks for work before it sleeps. Waking it again takes tens of microseconds. */
enum { SPIN_NS = 50000, PAUSES_PER_LOOK_AT_THE_CLOCK = 32 };

enum { MAX_WORKERS = 1023, CACHE_LINE_BYTES = 64 };

typedef int32_t (*part_function)(const void *context, int32_t phase, int32_t part, int32_t parts);

typedef struct job {
    part_function run;
    const void *context;
    int32_t phase;
    int32_t parts;
} job;

/* A ticket is the number of a job and of the threads that share it. Each thread has a range of the
 * parts, the same one in every job of as many parts and threads, so that what it reads stays in its
 * caches and on its memory. Who has done its own takes what is left of the others'.
 *
 * A range is the number of the job, the end, and the next part to be claimed, so that a claim
 * succeeds only for the job that was seen. The job stays as it is until all its parts are done: it
 * may be read by whoever has claimed one of them. */
enum { NUMBER_SHIFT = 32, END_SHIFT = 16, PART_MASK = 0xffff };

static struct {
    _Alignas(CACHE_LINE_BYTES) _Atomic uint64_t ticket;
    _Atomic uint64_t ranges[MAX_WORKERS + 1];
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t unfinished_parts;
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t published_jobs; /* where workers sleep */
    _Atomic bool is_caller_asleep;
    _Atomic int32_t status;
    _Atomic bool is_busy;
    job job;
    uint32_t number;
    int32_t workers;
    _Alignas(CACHE_LINE_BYTES) _Atomic bool is_asleep[MAX_WORKERS + 1];
} pool;

static _Atomic int32_t usable_threads = 1;

/* The CPU that each worker stays on, plus one; 0 leaves it anywhere. Workers may start meanwhile. */
static _Atomic int32_t worker_cpus[MAX_WORKERS];

/* Workers sleep on one word, each under a bit, which those share whose numbers are 32 apart. */
enum { BITS = 32 };

static uint32_t bit_of(int32_t thread) { return 1u << thread % BITS; }

static void futex_wait(_Atomic uint32_t *word, uint32_t expected, uint32_t bit) {
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, expected, NULL, NULL, bit);
}

static void futex_wake(_Atomic uint32_t *word, int32_t count, uint32_t bits) {
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, count, NULL, NULL, bits);
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Wait for a moment, or until the word is no longer `seen`; returns false when SPIN_NS have passed
 * since the first of these moments. A pause takes up to 40 ns: who looks at the word only now and
 * then is late by as much as a short call takes, and by another time in each process. */
static bool spin(const _Atomic uint32_t *word, uint32_t seen, int64_t *deadline_ns) {
    for (int i = 0; i < PAUSES_PER_LOOK_AT_THE_CLOCK; i++) {
        if (atomic_load(word) != seen) {
            return true;
        }
        __builtin_ia32_pause();
    }
    int64_t now = now_ns();
    if (*deadline_ns == 0) {
        *deadline_ns = now + SPIN_NS;
    }
    return now < *deadline_ns;
}

static bool claim_of(int32_t owner, uint32_t number, int32_t *part) {
    uint64_t range = atomic_load(&pool.ranges[owner]);
    while (range >> NUMBER_SHIFT == number &&
           (range & PART_MASK) < (range >> END_SHIFT & PART_MASK)) {
        if (atomic_compare_exchange_weak(&pool.ranges[owner], &range, range + 1)) {
            *part = range & PART_MASK;
            return true;
        }
    }
    return false;
}

/* Claim a part of those of `thread`, or else of the threads after it. */
static bool claim(int32_t thread, int32_t *part) {
    const uint64_t ticket = atomic_load(&pool.ticket);
    const uint32_t number = ticket >> NUMBER_SHIFT;
    const int32_t threads = ticket & PART_MASK;
    for (int32_t i = 0, owner = thread; thread < threads && i < threads; i++) {
        if (claim_of(owner, number, part)) {
            return true;
        }
        owner = owner + 1 < threads ? owner + 1 : 0;
    }
    return false;
}

/* Compute parts as long as there are some; returns whether there was one. */
static bool work(int32_t thread) {
    bool is_done = false;
    for (int32_t part; claim(thread, &part); is_done = true) {
        const job *job = &pool.job;
        int32_t status = job->run(job->context, job->phase, part, job->parts);
        if (status != GEMM_TUNER_OK) {
            atomic_store(&pool.status, status);
        }
        bool is_last = atomic_fetch_sub(&pool.unfinished_parts, 1) == 1;
        if (is_last && atomic_load(&pool.is_caller_asleep)) {
            futex_wake(&pool.unfinished_parts, 1, bit_of(0));
        }
    }
    return is_done;
}

static void sleep_until_published(int32_t thread, uint32_t seen) {
    atomic_store(&pool.is_asleep[thread], true);
    futex_wait(&pool.published_jobs, seen, bit_of(thread));
    atomic_store(&pool.is_asleep[thread], false);
}

static void stay_on(int32_t cpu) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    sched_setaffinity(0, sizeof only, &only);
}

static void *serve(void *own_cpu) {
    const int32_t thread = (int32_t)((_Atomic int32_t *)own_cpu - worker_cpus) + 1;
    const int32_t cpu = atomic_load(&worker_cpus[thread - 1]) - 1;
    if (cpu >= 0) {
        stay_on(cpu);
    }
    for (int64_t deadline_ns = 0;;) {
        uint32_t seen = atomic_load(&pool.published_jobs);
        if (work(thread)) {
            deadline_ns = 0; /* jobs that need fewer threads keep none awake */
        }
        while (atomic_load(&pool.published_jobs) == seen) {
            if (!spin(&pool.published_jobs, seen, &deadline_ns)) {
                sleep_until_published(thread, seen);
                deadline_ns = 0;
            } else if (atomic_load(&pool.published_jobs) == seen) {
                sched_yield(); /* a thread of another pool may wait for this core */
            }
        }
    }
    return NULL;
}

static bool start_worker(_Atomic int32_t *cpu) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) {
        return false;
    }
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool is_started = pthread_create(&thread, &attributes, serve, (void *)cpu) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return is_started;
}

static void wake_workers(int32_t threads) {
    uint32_t bits = 0;
    int32_t count = 0;
    for (int32_t thread = 1; thread < threads; thread++) {
        if (atomic_load(&pool.is_asleep[thread])) {
            bits |= bit_of(thread);
            count++;
        }
    }
    if (count > 0) {
        futex_wake(&pool.published_jobs, pool.workers < BITS ? count : MAX_WORKERS, bits);
    }
}

static void publish(const job *job, int32_t threads) {
    pool.job = *job;
    atomic_store_explicit(&pool.unfinished_parts, job->parts, memory_order_relaxed);
    const uint64_t number = (uint64_t)++pool.number << NUMBER_SHIFT;
    for (int32_t thread = 0, begin = 0; thread < threads; thread++) {
        const int32_t end = job->parts * (thread + 1) / threads;
        atomic_store_explicit(&pool.ranges[thread], number | (uint64_t)end << END_SHIFT | begin,
                              memory_order_release);
        begin = end;
    }
    atomic_store_explicit(&pool.ticket, number | threads, memory_order_release);
    atomic_fetch_add(&pool.published_jobs, 1);
    wake_workers(threads);
}

static void wait_for_workers(void) {
    uint32_t unfinished;
    for (int64_t deadline_ns = 0; (unfinished = atomic_load(&pool.unfinished_parts)) != 0;) {
        if (!spin(&pool.unfinished_parts, unfinished, &deadline_ns)) {
            atomic_store(&pool.is_caller_asleep, true);
            futex_wait(&pool.unfinished_parts, unfinished, bit_of(0));
            atomic_store(&pool.is_caller_asleep, false);
        }
    }
}

/* Return how many threads share a call: 1 if the pool has none for it, or works for another. */
static int32_t enter(int32_t threads) {
    const int32_t usable = atomic_load(&usable_threads);
    threads = threads < usable ? threads : usable;
    if (threads <= 1 || atomic_exchange(&pool.is_busy, true)) {
        return 1;
    }
    while (pool.workers < threads - 1 && start_worker(&worker_cpus[pool.workers])) {
        pool.workers++;
    }
    return threads;
}

static int32_t run_alone(part_function run, const void *context, int32_t phases, int32_t parts) {
    int32_t status = GEMM_TUNER_OK;
    for (int32_t phase = 0; phase < phases; phase++) {
        for (int32_t part = 0; part < parts; part++) {
            status |= run(context, phase, part, parts);
        }
    }
    return status;
}

static int32_t share(part_function run, const void *context, int32_t phases, int32_t parts,
                     int32_t threads) {
    threads = parts > MAX_PARTS ? 1 : enter(threads < parts ? threads : parts);
    if (threads == 1) {
        return run_alone(run, context, phases, parts);
    }
    atomic_store(&pool.status, GEMM_TUNER_OK);
    for (int32_t phase = 0; phase < phases; phase++) {
        publish(&(job){run, context, phase, parts}, threads);
        work(0);
        wait_for_workers();
    }
    int32_t status = atomic_load(&pool.status);
    atomic_store(&pool.is_busy, false);
    return status;
}

typedef struct shared_call {
    run_function run;
    const gemm_tuner_args *args;
} shared_call;

static int32_t run_part(const void *context, int32_t phase, int32_t part, int32_t parts) {
    const shared_call *call = context;
    return call->run(call->args, phase, part, parts);
}

int32_t pool_run(run_function run, const gemm_tuner_args *args, int32_t phases, int32_t parts,
                 int32_t threads) {
    return share(run_part, &(shared_call){run, args}, phases, parts, threads);
}

/* The weights of one product, or of each of a batch. Whole products are packed by the parts that
 * compute them; those left over are cut. */
typedef struct shared_packing {
    pack_function pack;
    const gemm_tuner_weights *weights;
    char *packed;
    int64_t stride_bytes;
    int64_t count;
} shared_packing;

static int32_t pack_part(const void *context, int32_t phase, int32_t part, int32_t parts) {
    (void)phase;
    const shared_packing *packing = context;
    const int64_t own = packing->count / parts;
    int32_t status = GEMM_TUNER_OK;
    for (int64_t i = own * part; i < own * (part + 1); i++) {
        status |= packing->pack(&packing->weights[i], packing->packed + i * packing->stride_bytes,
                                0, 1);
    }
    for (int64_t i = own * parts; i < packing->count; i++) {
        status |= packing->pack(&packing->weights[i], packing->packed + i * packing->stride_bytes,
                                part, parts);
    }
    return status;
}

int32_t pool_pack(pack_function pack, const gemm_tuner_weights *weights, void *packed,
                  int64_t stride_bytes, int64_t count, int32_t parts, int32_t threads) {
    const shared_packing packing = {pack, weights, packed, stride_bytes, count};
    return share(pack_part, &packing, 1, parts, threads);
}

static void forget_workers(void) { memset((void *)&pool, 0, sizeof pool); }

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

void pool_configure(int32_t threads, const int32_t *cpus) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    int32_t usable = threads < 1 ? 1 : threads > MAX_WORKERS ? MAX_WORKERS : threads;
    for (int32_t i = 1; i < usable; i++) {
        atomic_store(&worker_cpus[i - 1], cpus ? cpus[i] + 1 : 0);
    }
    atomic_store(&usable_threads, usable);
}
