/* Tuned kernels for the layers of a model, for C and C++ programs without Python.
 *
 *     gemm_tuner_bundle *bundle = gemm_tuner_bundle_open("kernels", message, sizeof message);
 *     const gemm_tuner_layer *layer = gemm_tuner_bundle_find(bundle, "f32 *x3072x768 nk bias");
 *     gemm_tuner_packed *packed = gemm_tuner_layer_pack(layer, &weights);    once
 *     gemm_tuner_layer_run(layer, packed, &args, 0, NULL, NULL);             for each call
 *
 * A layer has kernels for some numbers of rows: exactly so many, or a range. For all others, where
 * a library was faster, and on a CPU that lacks what a kernel needs, GEMM_TUNER_NO_KERNEL says so,
 * and nothing is computed: call the library that you have. A program uses one bundle: its types
 * and threads are those of the command that made it. Plugins may have one each. Any number of
 * threads may use a bundle, a layer and packed weights at once, and open bundles. A layer that is
 * NULL has no kernels. This needs libc and, in older systems, libdl; POSIX and C11.
 */
#ifndef GEMM_TUNER_BUNDLE_H
#define GEMM_TUNER_BUNDLE_H

#include "gemm_tuner.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GEMM_TUNER_NO_KERNEL 2 /* beside GEMM_TUNER_OK and GEMM_TUNER_BAD_ARGS */

typedef struct gemm_tuner_bundle gemm_tuner_bundle;
typedef struct gemm_tuner_layer gemm_tuner_layer;
typedef struct gemm_tuner_packed gemm_tuner_packed;

/* Calls task(data, part) for each part from 0 to parts - 1, on any threads and in any order, and
 * returns when all of them have returned; it must not throw. `pool` is what the caller gave with
 * it. */
typedef void (*gemm_tuner_runner)(void *pool, int32_t parts, void (*task)(void *data, int32_t part),
                                  void *data);

/* Load the kernels from a folder that nobody else can write to: they are run as they are. Returns
 * NULL, and in `message` why, if one is missing or is another than was bundled. Kernels that this
 * CPU cannot run are left out. `message` may be NULL. */
gemm_tuner_bundle *gemm_tuner_bundle_open(const char *folder, char *message, size_t message_bytes);

/* Free a bundle, whose layers are not used any more; NULL is allowed. */
void gemm_tuner_bundle_close(gemm_tuner_bundle *bundle);

/* The number of layers, and the name of one: the text of its problems with * for their rows. */
size_t gemm_tuner_bundle_layers(const gemm_tuner_bundle *bundle);
const char *gemm_tuner_bundle_name(const gemm_tuner_bundle *bundle, size_t number);

/* The layer with a name, NULL if there is none, or no bundle or no name. */
const gemm_tuner_layer *gemm_tuner_bundle_find(const gemm_tuner_bundle *bundle, const char *name);

/* What the kernel for m rows says of itself, as JSON, NULL if there is no kernel for so many. */
const char *gemm_tuner_layer_describe(const gemm_tuner_layer *layer, int64_t m);

/* The weights, packed once for each layout that the layer's kernels read. NULL if memory is short,
 * the layer has no kernel here, scales and zero points are unlike those of the problem, or it is a
 * product of two activations, which has nothing to pack. */
gemm_tuner_packed *gemm_tuner_layer_pack(const gemm_tuner_layer *layer,
                                         const gemm_tuner_weights *weights);

/* The same in parts, in the threads of a runner. Where it gives a part of each call to the same
 * thread, and packs in as many parts as it calls, memory that is new lies near who reads it. With
 * `parts` 0, there are as many as were tuned for. */
gemm_tuner_packed *gemm_tuner_layer_pack_in_parts(const gemm_tuner_layer *layer,
                                                  const gemm_tuner_weights *weights,
                                                  int32_t parts, gemm_tuner_runner runner,
                                                  void *pool);

/* The size of packed weights in bytes, and their end; NULL is allowed. */
uint64_t gemm_tuner_packed_bytes(const gemm_tuner_packed *packed);
void gemm_tuner_packed_free(gemm_tuner_packed *packed);

/* The parts that the kernel for m rows was tuned for, and the workspace that a call in so many
 * parts needs, in bytes; 0 where there is no kernel. */
int32_t gemm_tuner_layer_parts(const gemm_tuner_layer *layer, int64_t m);
uint64_t gemm_tuner_layer_workspace_bytes(const gemm_tuner_layer *layer, int64_t m, int32_t parts);

/* Compute args->m rows. args->packed_w is not read. args->workspace may be NULL: then it is
 * allocated for this call, if one is needed. With `parts` 0, there are as many as were tuned for.
 * Without a runner, this thread computes all of them. The result depends on `parts` alone.
 * A batch (args->batch above 1) has the same weights for all of its products. A product of two
 * activations ("matmul f32 *x128x64 nk scale") has NULL for `packed`, and w in the args; attention
 * ("attention f32 *x512x64 scale") has v and n there too.
 * Returns GEMM_TUNER_OK, GEMM_TUNER_BAD_ARGS or GEMM_TUNER_NO_KERNEL; with the last two, nothing
 * is computed. GEMM_TUNER_BAD_ARGS also tells that memory for the workspace is short. */
int32_t gemm_tuner_layer_run(const gemm_tuner_layer *layer, const gemm_tuner_packed *packed,
                             const gemm_tuner_args *args, int32_t parts, gemm_tuner_runner runner,
                             void *pool);

#ifdef __cplusplus
}
#endif

#endif
