/* The threads that share the parts of a call. */
#ifndef GEMM_TUNER_POOL_H
#define GEMM_TUNER_POOL_H

#include <gemm_tuner.h>

typedef int32_t (*run_function)(const gemm_tuner_args *, int32_t phase, int32_t part,
                                int32_t parts);
typedef int32_t (*pack_function)(const gemm_tuner_weights *, void *packed, int32_t part,
                                 int32_t parts);

enum { MAX_PARTS = 1024 }; /* MAX_THREADS of gemm_tuner.domain.context */

/* Let calls have up to `threads` threads, the caller's among them. The threads of the pool are kept
 * on the CPUs in `cpus`, one each and the first left to the caller, or anywhere if it is NULL.
 * Takes effect for threads not yet started. */
void pool_configure(int32_t threads, const int32_t *cpus);

/* Compute all parts of all phases in up to `threads` threads, the calling one among those that work.
 * Returns the status.
 *
 * Each thread begins with parts of its own, the same in each call of as many parts and threads, and
 * goes on with those that others have not begun. The pool works for one caller at a time; others
 * compute all their parts themselves. A forked child starts threads of its own. */
int32_t pool_run(run_function run, const gemm_tuner_args *args, int32_t phases, int32_t parts,
                 int32_t threads);

/* Pack the weights of `count` products, `stride_bytes` apart, in the threads that will run these
 * parts of calls. Returns the status. */
int32_t pool_pack(pack_function pack, const gemm_tuner_weights *weights, void *packed,
                  int64_t stride_bytes, int64_t count, int32_t parts, int32_t threads);

#endif
