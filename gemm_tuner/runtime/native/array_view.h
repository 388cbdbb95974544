/* Where an array lies, read straight from a NumPy array, or from a tensor whose type offers the C
 * exchange of DLPack 1.3 (PyTorch).
 *
 * The buffer protocol is not used: NumPy spends about 100 ns on each export, and exports no format
 * for bfloat16. */
#ifndef GEMM_TUNER_ARRAY_VIEW_H
#define GEMM_TUNER_ARRAY_VIEW_H

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

enum { DLPACK_INT32 = 0 | 32 << 8 | 1 << 16, DLPACK_FLOAT32 = 2 | 32 << 8 | 1 << 16 };

/* An element type, as NumPy and as DLPack name it. */
typedef struct element_type {
    PyObject *descr;      /* the one numpy.dtype of this type */
    uint32_t dlpack_type; /* code, bits << 8, 1 lane << 16 */
    int64_t size_bytes;
} element_type;

enum { MAX_DIMENSIONS = 4, MAX_FRONT = MAX_DIMENSIONS - 2 }; /* batch and heads in front */

/* Strides are in elements. The shape belongs to the array. */
typedef struct array_view {
    char *elements;
    int32_t dimensions;
    bool is_writeable;
    const int64_t *shape;
    int64_t strides[MAX_DIMENSIONS];
} array_view;

typedef struct byte_range {
    const char *begin, *end;
} byte_range;

/* To be called once, before the others. Returns 0, or -1 with an exception set. */
int array_view_init(void);

/* Describe an array of one to four dimensions. Returns false, without an exception, if it is of
 * another type, on another device, not aligned to its elements, or of a kind not known here. */
bool view_array(PyObject *array, const element_type *type, array_view *view);

/* Describe a matrix whose rows are contiguous, and at any distance that is not less than their
 * length; or an array of one dimension without gaps. Return false as view_array does. */
bool read_matrix(PyObject *array, const element_type *type, int64_t rows, int64_t columns,
                 array_view *view, int64_t *leading_dimension, byte_range *range);
bool read_vector(PyObject *array, const element_type *type, int64_t length, array_view *view,
                 byte_range *range);

/* Describe matrices as read_matrix does, with up to MAX_FRONT dimensions in front, whose strides
 * are not negative; `range` is from the first of them to the last. */
bool read_matrices(PyObject *array, const element_type *type, int64_t rows, int64_t columns,
                   array_view *view, int64_t *leading_dimension, byte_range *range);

/* Return whether no two elements of an array lie in one place, as far as that is plain. */
bool lies_apart(const array_view *view);

bool overlap(byte_range a, byte_range b);

/* Return whether it is a numpy.ndarray itself, not of a subclass. */
bool is_ndarray(PyObject *object);

/* Return the address of the first element of what `is_ndarray`. */
void *ndarray_elements(PyObject *array);

#endif
