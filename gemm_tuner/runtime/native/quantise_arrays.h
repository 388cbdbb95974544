/* Quantising with Python's arguments. */
#ifndef GEMM_TUNER_QUANTISE_ARRAYS_H
#define GEMM_TUNER_QUANTISE_ARRAYS_H

#include "array_view.h"

/* Take the element types, (numpy.dtype, DLPack code, bits) each, in the order of quantise_arrays.c;
 * before the others are called. */
PyObject *set_quantise_types(PyObject *module, PyObject *arguments);

/* Quantise (x, y, scales, zero points or None, whether one scale is for all); return False, with
 * nothing written, if an argument may be invalid. */
PyObject *quantise(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

/* Quantise arrays at addresses that were checked. */
PyObject *quantise_at(PyObject *module, PyObject *arguments);

#endif
