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

typedef struct job {
    run_function run;
    const gemm_tuner_args *args;
    int32_t phase;
    int32_t parts;
} job;

/* A ticket is the number of a job, its parts, and the next part to be claimed, so that a claim
 * succeeds only for the job that was seen. The job stays as it is until all its parts are done: it
 * may be read by whoever has claimed one of them. */
enum { PARTS_SHIFT = 16, NUMBER_SHIFT = 32, PART_MASK = 0xffff };

static struct {
    _Alignas(CACHE_LINE_BYTES) _Atomic uint64_t ticket;
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t unfinished_parts;
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t published_jobs; /* where workers sleep */
    _Atomic int32_t sleeping_workers;
    _Atomic bool is_caller_asleep;
    _Atomic int32_t status;
    _Atomic bool is_busy;
    job job;
    uint32_t number;
    int32_t workers;
} pool;

static _Atomic int32_t usable_threads = 1;
static int32_t worker_cpus[MAX_WORKERS];
static bool is_pinned;

static void futex_wait(_Atomic uint32_t *word, uint32_t expected) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int32_t count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
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

static bool claim(int32_t *part) {
    uint64_t ticket = atomic_load(&pool.ticket);
    while ((ticket & PART_MASK) < (ticket >> PARTS_SHIFT & PART_MASK)) {
        if (atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) {
            *part = ticket & PART_MASK;
            return true;
        }
    }
    return false;
}

static void work(void) {
    for (int32_t part; claim(&part);) {
        const job *job = &pool.job;
        int32_t status = job->run(job->args, job->phase, part, job->parts);
        if (status != GEMM_TUNER_OK) {
            atomic_store(&pool.status, status);
        }
        bool is_last = atomic_fetch_sub(&pool.unfinished_parts, 1) == 1;
        if (is_last && atomic_load(&pool.is_caller_asleep)) {
            futex_wake(&pool.unfinished_parts, 1);
        }
    }
}

static void sleep_until_published(uint32_t seen) {
    atomic_fetch_add(&pool.sleeping_workers, 1);
    futex_wait(&pool.published_jobs, seen);
    atomic_fetch_sub(&pool.sleeping_workers, 1);
}

static void stay_on(int32_t cpu) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    sched_setaffinity(0, sizeof only, &only);
}

static void *serve(void *cpu) {
    if (is_pinned) {
        stay_on(*(const int32_t *)cpu);
    }
    for (;;) {
        uint32_t seen = atomic_load(&pool.published_jobs);
        work();
        for (int64_t deadline_ns = 0; atomic_load(&pool.published_jobs) == seen;) {
            if (!spin(&pool.published_jobs, seen, &deadline_ns)) {
                sleep_until_published(seen);
            }
        }
    }
    return NULL;
}

static bool start_worker(int32_t *cpu) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) {
        return false;
    }
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool is_started = pthread_create(&thread, &attributes, serve, cpu) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return is_started;
}

static void publish(const job *job) {
    pool.job = *job;
    atomic_store(&pool.unfinished_parts, job->parts);
    pool.number++;
    atomic_store(&pool.ticket,
                 (uint64_t)pool.number << NUMBER_SHIFT | (uint64_t)job->parts << PARTS_SHIFT);
    atomic_fetch_add(&pool.published_jobs, 1);
    if (atomic_load(&pool.sleeping_workers) > 0) {
        futex_wake(&pool.published_jobs, job->parts - 1);
    }
}

static void wait_for_workers(void) {
    uint32_t unfinished;
    for (int64_t deadline_ns = 0; (unfinished = atomic_load(&pool.unfinished_parts)) != 0;) {
        if (!spin(&pool.unfinished_parts, unfinished, &deadline_ns)) {
            atomic_store(&pool.is_caller_asleep, true);
            futex_wait(&pool.unfinished_parts, unfinished);
            atomic_store(&pool.is_caller_asleep, false);
        }
    }
}

static bool enter(int32_t parts) {
    if (atomic_load(&usable_threads) == 1 || atomic_exchange(&pool.is_busy, true)) {
        return false;
    }
    int32_t wanted = (parts < usable_threads ? parts : usable_threads) - 1;
    while (pool.workers < wanted && start_worker(&worker_cpus[pool.workers])) {
        pool.workers++;
    }
    return true;
}

static int32_t run_alone(run_function run, const gemm_tuner_args *args, int32_t phases,
                         int32_t parts) {
    int32_t status = GEMM_TUNER_OK;
    for (int32_t phase = 0; phase < phases; phase++) {
        for (int32_t part = 0; part < parts; part++) {
            status |= run(args, phase, part, parts);
        }
    }
    return status;
}

int32_t pool_run(run_function run, const gemm_tuner_args *args, int32_t phases, int32_t parts) {
    if (parts == 1 || parts > MAX_PARTS || !enter(parts)) {
        return run_alone(run, args, phases, parts);
    }
    atomic_store(&pool.status, GEMM_TUNER_OK);
    for (int32_t phase = 0; phase < phases; phase++) {
        publish(&(job){run, args, phase, parts});
        work();
        wait_for_workers();
    }
    int32_t status = atomic_load(&pool.status);
    atomic_store(&pool.is_busy, false);
    return status;
}

static void forget_workers(void) { memset((void *)&pool, 0, sizeof pool); }

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

void pool_configure(int32_t threads, const int32_t *cpus) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    int32_t usable = threads < 1 ? 1 : threads > MAX_WORKERS ? MAX_WORKERS : threads;
    is_pinned = cpus != NULL;
    for (int32_t i = 1; is_pinned && i < usable; i++) {
        worker_cpus[i - 1] = cpus[i];
    }
    atomic_store(&usable_threads, usable);
}
