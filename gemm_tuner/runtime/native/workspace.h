/* The workspace of each thread, kept between its calls and freed when it ends. */
#ifndef GEMM_TUNER_WORKSPACE_H
#define GEMM_TUNER_WORKSPACE_H

#include <stdint.h>

/* To be called once, before `find_workspace`. Returns 0 on success. */
int workspace_init(void);

/* Return at least `size_bytes` bytes of the calling thread, aligned for a kernel, or NULL if there
 * is no memory. What they hold is not defined. */
void *find_workspace(uint64_t size_bytes);

#endif
