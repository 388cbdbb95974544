/* The interface of a gemm-tuner kernel library, in plain C.
 *
 * One library holds one kernel: y = epilogue(x @ w), with n and k fixed when it was built.
 * It needs no other library, starts no threads and allocates nothing. To call it:
 *
 *   1. check that gemm_tuner_abi_version() is from GEMM_TUNER_LEAST_ABI_VERSION to
 *      GEMM_TUNER_ABI_VERSION;
 *   2. pack the weights once: allocate gemm_tuner_packed_weight_bytes() bytes, aligned to
 *      GEMM_TUNER_ALIGNMENT, and call gemm_tuner_pack_weights();
 *   3. allocate gemm_tuner_workspace_bytes(parts) bytes with the same alignment (may be 0);
 *   4. for each phase from 0 to gemm_tuner_phases() - 1: call gemm_tuner_run(args, phase, part,
 *      parts) for every part from 0 to parts - 1, on any threads, and wait for all of them.
 *
 * That is a kernel of a linear layer, whose w is constant. One of the operation "matmul" multiplies
 * two activations: there is nothing to pack ahead (step 2 falls away: the size is 0), and each call
 * gets w as the caller stores it. gemm_tuner_describe() has the problem, whose first word is
 * "matmul" then. One of the operation "attention" computes y = softmax(steps(x @ w^T)) @ v: x are
 * the queries, w the keys and v the values, k is the head size, and the steps are those that it
 * calls its epilogue. A row all of whose scores are minus infinity gives zeros.
 *
 * The result depends on `parts` alone, never on the order or the threads in which they ran.
 *
 *   - A part that is not run leaves its piece of y, or of the sums that the next phase adds up, as it
 *     was; the other pieces of y are right.
 *   - A part may be run again after it has returned, before the next phase: it writes the same again.
 *     One part must not run twice at once: between blocks of k, sums lie in y or in the workspace.
 *   - Another process may run parts if both share the memory of x, packed_w, y, the operands and the
 *     workspace; its own `args` say where they lie in it.
 *
 * Lengths, strides and leading dimensions are in elements unless their names say otherwise; a
 * leading dimension is the distance between the starts of two rows.
 */
#ifndef GEMM_TUNER_H
#define GEMM_TUNER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GEMM_TUNER_ABI_VERSION 5       /* the first with attention; 4: of two activations */
#define GEMM_TUNER_LEAST_ABI_VERSION 2 /* has all but gemm_tuner_pack_weights_part */
#define GEMM_TUNER_ALIGNMENT 64

/* What a call returns. */
#define GEMM_TUNER_OK 0
#define GEMM_TUNER_BAD_ARGS 1 /* size_bytes, m, n, batch, heads, operand_count, phase or part(s) */

/* The weights as the caller stores them: (n, k) or (k, n), as the problem says. Two 4-bit elements
 * lie in one byte, neighbours along a row, the first in the lower half; a row starts with a byte,
 * and the leading dimension is even. Where the problem has groups of weights along k, each (column,
 * group) has a scale, and a zero point if the elements are unsigned; otherwise both are NULL. A
 * weight is scale * (element - zero point).
 *
 * Zero points that are no elements are given as float_zero_points, and zero_points is NULL. Kernels
 * read these whose description says "float_zero_points": true; the others return
 * GEMM_TUNER_BAD_ARGS. All take a size_bytes that ends before them. */
typedef struct gemm_tuner_weights {
    uint64_t size_bytes; /* sizeof(gemm_tuner_weights) of the caller */
    const void *elements;
    int64_t leading_dimension;
    const float *scales;        /* (n, groups), dense */
    const uint8_t *zero_points; /* (n, groups), dense */
    const float *float_zero_points; /* (n, groups), dense; in the place of zero_points */
} gemm_tuner_weights;

/* An array that the epilogue reads, in the order of the epilogue's steps.
 *   scalar         one element
 *   row vector     n elements, one for each column of y
 *   column vector  m elements, one for each row of y
 *   matrix         m rows of n elements, leading_dimension apart
 * Those of the next product of a batch lie batch_stride further; 0 gives all products the same. */
typedef struct gemm_tuner_operand {
    const void *elements;
    int64_t leading_dimension;
    int64_t batch_stride;
} gemm_tuner_operand;

/* A batch is any number of products of the same sizes.
 *
 * What begins with `w` is for products of two activations alone: linear kernels read nothing of it,
 * and also take a size_bytes that ends before it, as callers of versions 2 and 3 give it. Then a
 * call computes batch * heads products. Product (b, h) reads x from b * x_batch_stride +
 * h * x_head_stride on, w likewise, and writes y likewise; a stride of 0 gives several products the
 * same x or w, as grouped heads have it.
 *
 * What begins with `v` is for attention alone: the others read nothing of it, and take a size_bytes
 * that ends before it. There y and v have k columns, and v has n rows, as w. */
typedef struct gemm_tuner_args {
    uint64_t size_bytes; /* sizeof(gemm_tuner_args) of the caller */
    int64_t m;           /* rows of x and y */
    int64_t batch;       /* products, each of its own x and y */
    const void *x;       /* (m, k) */
    int64_t x_leading_dimension;
    int64_t x_batch_stride;
    const void *packed_w;                /* from gemm_tuner_pack_weights */
    int64_t packed_w_batch_stride_bytes; /* a multiple of the alignment, or 0: the same weights */
    void *y;                             /* (m, n), must not overlap x or an operand */
    int64_t y_leading_dimension;
    int64_t y_batch_stride;
    const gemm_tuner_operand *operands;
    uint64_t operand_count;
    void *workspace; /* gemm_tuner_workspace_bytes(parts) bytes, or NULL if that is 0 */
    const void *w;   /* (n, k) or (k, n), as the problem says; must not overlap y */
    int64_t w_leading_dimension;
    int64_t w_batch_stride;
    int64_t heads; /* at least 1 */
    int64_t x_head_stride;
    int64_t w_head_stride;
    int64_t y_head_stride;
    const int64_t *operand_head_strides; /* of each operand; NULL: all heads have the same */
    const void *v;                       /* (n, k); must not overlap y */
    int64_t v_leading_dimension;
    int64_t v_batch_stride;
    int64_t v_head_stride;
    int64_t n; /* keys: that of the problem, or one of its range */
} gemm_tuner_args;

/* The version of this interface that has all that the kernel needs of its caller. */
uint32_t gemm_tuner_abi_version(void);

/* The problem, the candidate, the required CPU features and the format of packed weights, as JSON.
 * A process may use "amx_tile" only once it has asked Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, 18).
 * Kernels whose "packed_format" is the same read each other's packed weights. */
const char *gemm_tuner_describe(void);

/* The size of the packed weights, in bytes; 0 where w is an activation. */
uint64_t gemm_tuner_packed_weight_bytes(void);

/* Pack the weights of one product. Returns GEMM_TUNER_OK, or GEMM_TUNER_BAD_ARGS and does nothing:
 * size_bytes, part or parts, scales and zero points unlike those of the problem, or w is an
 * activation. */
int32_t gemm_tuner_pack_weights(const gemm_tuner_weights *weights, void *packed_w);

/* Pack what one of several parts reads. All parts from 0 to parts - 1, on any threads and in any
 * order, write what gemm_tuner_pack_weights writes, each byte once. Memory that nobody has touched
 * comes to lie where it is touched first: run each part on the thread that will run this part of
 * the calls, in as many parts. What several parts read, each packs a piece of. Since version 3. */
int32_t gemm_tuner_pack_weights_part(const gemm_tuner_weights *weights, void *packed_w,
                                     int32_t part, int32_t parts);

/* The size of the workspace for a call in this many parts, in bytes. */
uint64_t gemm_tuner_workspace_bytes(int32_t parts);

/* The number of parts that the kernel was tuned for; any positive number works. */
int32_t gemm_tuner_preferred_parts(void);

/* The number of phases of a call. */
int32_t gemm_tuner_phases(void);

/* Compute one part of one phase. Returns GEMM_TUNER_OK, or GEMM_TUNER_BAD_ARGS and does nothing. */
int32_t gemm_tuner_run(const gemm_tuner_args *args, int32_t phase, int32_t part, int32_t parts);

#ifdef __cplusplus
}
#endif

#endif
