#define _GNU_SOURCE
#include "workspace.h"

#include <gemm_tuner.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { HUGE_PAGE_BYTES = 2 << 20 };

typedef struct workspace {
    void *memory;
    uint64_t size_bytes;
} workspace;

static pthread_key_t key;

static void free_workspace(void *kept) {
    free(((workspace *)kept)->memory);
    free(kept);
}

int workspace_init(void) { return pthread_key_create(&key, free_workspace); }

static workspace *workspace_of_thread(void) {
    workspace *kept = pthread_getspecific(key);
    if (kept) {
        return kept;
    }
    kept = calloc(1, sizeof *kept);
    if (kept && pthread_setspecific(key, kept) != 0) {
        free(kept);
        return NULL;
    }
    return kept;
}

void *find_workspace(uint64_t size_bytes) {
    workspace *kept = workspace_of_thread();
    if (!kept || kept->size_bytes >= size_bytes) {
        return kept ? kept->memory : NULL;
    }
    const bool is_huge = size_bytes >= HUGE_PAGE_BYTES;
    void *memory;
    if (posix_memalign(&memory, is_huge ? HUGE_PAGE_BYTES : GEMM_TUNER_ALIGNMENT, size_bytes)) {
        return NULL;
    }
    if (is_huge) {
        madvise(memory, size_bytes, MADV_HUGEPAGE);
    }
    free(kept->memory);
    *kept = (workspace){memory, size_bytes};
    return memory;
}
