/* See gemm_tuner_bundle.h. The table of kernels is the only generated file. */
#define _DEFAULT_SOURCE
#include "gemm_tuner_bundle.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A kernel: its file, NULL where a library is faster for these rows; the rows that it computes, the
 * place of its layout among those of its layer, the features that it needs, by their names in
 * /proc/cpuinfo, and what it says of itself. */
typedef struct {
    const char *file;
    int64_t m_low, m_high;
    size_t layout;
    const char *features;
    const char *description;
} bundled_kernel;

/* A layer: its name, and its kernels, the narrowest ranges of rows first. */
typedef struct {
    const char *name;
    size_t first_kernel, kernels, layouts;
    int packs_ahead; /* 0 where w comes with each call */
} bundled_layer;

#include "gemm_tuner_bundle_table.h"

#define KERNELS (sizeof bundled_kernels / sizeof *bundled_kernels)
#define LAYERS (sizeof bundled_layers / sizeof *bundled_layers)
#define PATH_BYTES 4096

typedef struct {
    void *handle; /* NULL where this CPU cannot run the kernel */
    const char *(*describe)(void);
    uint64_t (*packed_weight_bytes)(void);
    int32_t (*pack_weights)(const gemm_tuner_weights *, void *);
    int32_t (*pack_weights_part)(const gemm_tuner_weights *, void *, int32_t, int32_t); /* or NULL */
    uint64_t (*workspace_bytes)(int32_t);
    int32_t (*preferred_parts)(void);
    int32_t (*phases)(void);
    int32_t (*run)(const gemm_tuner_args *, int32_t, int32_t, int32_t);
} loaded_kernel;

struct gemm_tuner_layer {
    const bundled_layer *bundled;
    const loaded_kernel *kernels; /* those of this layer */
};

struct gemm_tuner_bundle {
    loaded_kernel kernels[KERNELS];
    gemm_tuner_layer layers[LAYERS];
};

struct gemm_tuner_packed {
    const bundled_layer *bundled; /* lives as long as the program, unlike the layer */
    uint64_t size_bytes;
    void *of_layout[];
};

static void tell(char *message, size_t message_bytes, const char *form, ...) {
    va_list arguments;
    if (message == NULL || message_bytes == 0) return;
    va_start(arguments, form);
    vsnprintf(message, message_bytes, form, arguments);
    va_end(arguments);
}

static void *allocate(uint64_t size_bytes) {
    if (size_bytes > SIZE_MAX - GEMM_TUNER_ALIGNMENT) return NULL;
    /* aligned_alloc wants a multiple of the alignment, and more than nothing. */
    return aligned_alloc(GEMM_TUNER_ALIGNMENT,
                         (size_bytes / GEMM_TUNER_ALIGNMENT + 1) * GEMM_TUNER_ALIGNMENT);
}

/* The flags of the first CPU, between blanks. Linux leaves out what a process may not use. */
static char *read_flags(void) {
    FILE *file = fopen("/proc/cpuinfo", "r");
    char *line = NULL;
    size_t size = 0;
    if (file == NULL) return NULL;
    while (getline(&line, &size, file) > 0)
        if (strncmp(line, "flags", 5) == 0) {
            for (char *each = line; *each; ++each)
                if (*each == '\n' || *each == '\t') *each = ' ';
            fclose(file);
            return line;
        }
    free(line);
    fclose(file);
    return NULL;
}

static int has_word(const char *words, const char *word, size_t length) {
    for (const char *at = words; (at = strstr(at, word)) != NULL; at += length)
        if (at > words && at[-1] == ' ' && at[length] == ' ') return 1;
    return 0;
}

/* `features` are words between blanks. */
static int can_run(const char *features, const char *flags) {
    char word[64];
    for (const char *at = features; *at;) {
        size_t length = strcspn(at, " ");
        if (flags == NULL || length >= sizeof word) return 0;
        memcpy(word, at, length);
        word[length] = '\0';
        if (!has_word(flags, word, length)) return 0;
#ifdef SYS_arch_prctl /* not on other machines, whose flags have none of these words */
        if (strcmp(word, "amx_tile") == 0 && syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 0;
#endif
        at += length + (at[length] == ' ');
    }
    return 1;
}

/* POSIX promises that a pointer from dlsym may be used as a function pointer. */
static int find_all(loaded_kernel *kernel) {
    const struct {
        const char *name;
        void **function;
    } functions[] = {
        {"gemm_tuner_describe", (void **)&kernel->describe},
        {"gemm_tuner_packed_weight_bytes", (void **)&kernel->packed_weight_bytes},
        {"gemm_tuner_pack_weights", (void **)&kernel->pack_weights},
        {"gemm_tuner_workspace_bytes", (void **)&kernel->workspace_bytes},
        {"gemm_tuner_preferred_parts", (void **)&kernel->preferred_parts},
        {"gemm_tuner_phases", (void **)&kernel->phases},
        {"gemm_tuner_run", (void **)&kernel->run},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i)
        if ((*functions[i].function = dlsym(kernel->handle, functions[i].name)) == NULL) return 0;
    return 1;
}

static int load(loaded_kernel *kernel, const bundled_kernel *bundled, const char *folder,
                char *message, size_t message_bytes) {
    char path[PATH_BYTES];
    uint32_t (*abi_version)(void);
    int length = snprintf(path, sizeof path, "%s/%s", folder, bundled->file);
    if (length < 0 || (size_t)length >= sizeof path) {
        tell(message, message_bytes, "the name of the folder is too long");
        return 0;
    }
    kernel->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (kernel->handle == NULL) {
        tell(message, message_bytes, "%s", dlerror());
        return 0;
    }
    *(void **)&abi_version = dlsym(kernel->handle, "gemm_tuner_abi_version");
    if (abi_version == NULL || abi_version() < GEMM_TUNER_LEAST_ABI_VERSION ||
        abi_version() > GEMM_TUNER_ABI_VERSION || !find_all(kernel) ||
        strcmp(kernel->describe(), bundled->description) != 0) {
        tell(message, message_bytes, "%s is another kernel than was bundled", path);
        return 0;
    }
    *(void **)&kernel->pack_weights_part = dlsym(kernel->handle, "gemm_tuner_pack_weights_part");
    return 1;
}

gemm_tuner_bundle *gemm_tuner_bundle_open(const char *folder, char *message, size_t message_bytes) {
    if (folder == NULL) {
        tell(message, message_bytes, "the folder has no name");
        return NULL;
    }
    gemm_tuner_bundle *bundle = calloc(1, sizeof *bundle);
    char *flags = read_flags();
    if (bundle == NULL) tell(message, message_bytes, "memory is short");
    for (size_t i = 0; bundle != NULL && i < KERNELS; ++i)
        if (bundled_kernels[i].file != NULL && can_run(bundled_kernels[i].features, flags) &&
            !load(&bundle->kernels[i], &bundled_kernels[i], folder, message, message_bytes)) {
            gemm_tuner_bundle_close(bundle);
            bundle = NULL;
        }
    for (size_t i = 0; bundle != NULL && i < LAYERS; ++i) {
        bundle->layers[i].bundled = &bundled_layers[i];
        bundle->layers[i].kernels = &bundle->kernels[bundled_layers[i].first_kernel];
    }
    free(flags);
    return bundle;
}

void gemm_tuner_bundle_close(gemm_tuner_bundle *bundle) {
    for (size_t i = 0; bundle != NULL && i < KERNELS; ++i)
        if (bundle->kernels[i].handle != NULL) dlclose(bundle->kernels[i].handle);
    free(bundle);
}

size_t gemm_tuner_bundle_layers(const gemm_tuner_bundle *bundle) {
    (void)bundle;
    return LAYERS;
}

const char *gemm_tuner_bundle_name(const gemm_tuner_bundle *bundle, size_t number) {
    return number < gemm_tuner_bundle_layers(bundle) ? bundled_layers[number].name : NULL;
}

const gemm_tuner_layer *gemm_tuner_bundle_find(const gemm_tuner_bundle *bundle, const char *name) {
    for (size_t i = 0; bundle != NULL && name != NULL && i < LAYERS; ++i)
        if (strcmp(bundled_layers[i].name, name) == 0) return &bundle->layers[i];
    return NULL;
}

/* The kernel for m rows, and which one of the layer it is; NULL if there is none. */
static const loaded_kernel *kernel_for(const gemm_tuner_layer *layer, int64_t m, size_t *number) {
    if (layer == NULL) return NULL;
    const bundled_kernel *bundled = &bundled_kernels[layer->bundled->first_kernel];
    for (size_t i = 0; i < layer->bundled->kernels; ++i) {
        if (m < bundled[i].m_low || bundled[i].m_high < m) continue;
        if (bundled[i].file == NULL) return NULL;
        if (layer->kernels[i].handle == NULL) continue;
        if (number != NULL) *number = i;
        return &layer->kernels[i];
    }
    return NULL;
}

const char *gemm_tuner_layer_describe(const gemm_tuner_layer *layer, int64_t m) {
    const loaded_kernel *kernel = kernel_for(layer, m, NULL);
    return kernel == NULL ? NULL : kernel->describe();
}

static void run_here(void *pool, int32_t parts, void (*task)(void *, int32_t), void *data) {
    (void)pool;
    for (int32_t part = 0; part < parts; ++part) task(data, part);
}

typedef struct {
    const loaded_kernel *kernel;
    const gemm_tuner_weights *weights;
    void *packed;
    int32_t parts, status;
} packing;

static void pack_part(void *data, int32_t part) {
    packing *job = data;
    int32_t status = GEMM_TUNER_OK;
    if (job->kernel->pack_weights_part != NULL)
        status = job->kernel->pack_weights_part(job->weights, job->packed, part, job->parts);
    else if (part == 0)
        status = job->kernel->pack_weights(job->weights, job->packed);
    if (status != GEMM_TUNER_OK) __atomic_store_n(&job->status, status, __ATOMIC_RELAXED);
}

gemm_tuner_packed *gemm_tuner_layer_pack_in_parts(const gemm_tuner_layer *layer,
                                                  const gemm_tuner_weights *weights,
                                                  int32_t parts, gemm_tuner_runner runner,
                                                  void *pool) {
    if (layer == NULL || weights == NULL) return NULL;
    const bundled_layer *bundled = layer->bundled;
    const bundled_kernel *kernels = &bundled_kernels[bundled->first_kernel];
    gemm_tuner_packed *packed =
        calloc(1, sizeof *packed + bundled->layouts * sizeof *packed->of_layout);
    size_t count = 0;
    if (packed == NULL) return NULL;
    packed->bundled = bundled;
    for (size_t i = 0; i < bundled->kernels; ++i) {
        const loaded_kernel *kernel = &layer->kernels[i];
        void **place = &packed->of_layout[kernels[i].layout];
        if (kernel->handle == NULL || *place != NULL) continue;
        *place = allocate(kernel->packed_weight_bytes());
        packing job = {kernel, weights, *place, parts > 0 ? parts : kernel->preferred_parts(),
                       GEMM_TUNER_OK};
        if (*place != NULL) (runner == NULL ? run_here : runner)(pool, job.parts, pack_part, &job);
        if (*place == NULL || job.status != GEMM_TUNER_OK) {
            gemm_tuner_packed_free(packed);
            return NULL;
        }
        packed->size_bytes += kernel->packed_weight_bytes();
        ++count;
    }
    if (count > 0) return packed;
    gemm_tuner_packed_free(packed);
    return NULL;
}

gemm_tuner_packed *gemm_tuner_layer_pack(const gemm_tuner_layer *layer,
                                         const gemm_tuner_weights *weights) {
    return gemm_tuner_layer_pack_in_parts(layer, weights, 1, NULL, NULL);
}

uint64_t gemm_tuner_packed_bytes(const gemm_tuner_packed *packed) {
    return packed == NULL ? 0 : packed->size_bytes;
}

void gemm_tuner_packed_free(gemm_tuner_packed *packed) {
    for (size_t i = 0; packed != NULL && i < packed->bundled->layouts; ++i)
        free(packed->of_layout[i]);
    free(packed);
}

int32_t gemm_tuner_layer_parts(const gemm_tuner_layer *layer, int64_t m) {
    const loaded_kernel *kernel = kernel_for(layer, m, NULL);
    return kernel == NULL ? 0 : kernel->preferred_parts();
}

uint64_t gemm_tuner_layer_workspace_bytes(const gemm_tuner_layer *layer, int64_t m, int32_t parts) {
    const loaded_kernel *kernel = kernel_for(layer, m, NULL);
    return kernel == NULL || parts <= 0 ? 0 : kernel->workspace_bytes(parts);
}

typedef struct {
    const loaded_kernel *kernel;
    const gemm_tuner_args *args;
    int32_t phase, parts, status;
} call_phase;

static void run_part(void *data, int32_t part) {
    call_phase *call = data;
    int32_t status = call->kernel->run(call->args, call->phase, part, call->parts);
    /* All parts refuse the same arguments: whoever writes last writes the same. */
    if (status != GEMM_TUNER_OK) __atomic_store_n(&call->status, status, __ATOMIC_RELAXED);
}

int32_t gemm_tuner_layer_run(const gemm_tuner_layer *layer, const gemm_tuner_packed *packed,
                             const gemm_tuner_args *args, int32_t parts, gemm_tuner_runner runner,
                             void *pool) {
    size_t number = 0;
    const loaded_kernel *kernel;
    gemm_tuner_args own;
    void *workspace = NULL;
    if (args == NULL || args->size_bytes < sizeof own || parts < 0) return GEMM_TUNER_BAD_ARGS;
    kernel = kernel_for(layer, args->m, &number);
    if (kernel == NULL) return GEMM_TUNER_NO_KERNEL;
    if (layer->bundled->packs_ahead ? packed == NULL || packed->bundled != layer->bundled
                                    : packed != NULL)
        return GEMM_TUNER_BAD_ARGS;
    if (parts == 0) parts = kernel->preferred_parts();
    own = *args;
    own.size_bytes = sizeof own;
    if (packed != NULL)
        own.packed_w =
            packed->of_layout[bundled_kernels[layer->bundled->first_kernel + number].layout];
    own.packed_w_batch_stride_bytes = 0;
    if (own.workspace == NULL && kernel->workspace_bytes(parts) > 0) {
        own.workspace = workspace = allocate(kernel->workspace_bytes(parts));
        if (workspace == NULL) return GEMM_TUNER_BAD_ARGS;
    }
    call_phase call = {.kernel = kernel, .args = &own, .parts = parts, .status = GEMM_TUNER_OK};
    if (runner == NULL) runner = run_here;
    for (; call.phase < kernel->phases() && call.status == GEMM_TUNER_OK; ++call.phase)
        runner(pool, parts, run_part, &call);
    free(workspace);
    return call.status;
}
