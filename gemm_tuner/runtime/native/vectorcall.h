/* The vectorcall protocol of Python: arguments come in an array, without a tuple and a dictionary.
 *
 * It belongs to the limited API since 3.12, as it has been since 3.9; the headers of 3.11 keep it
 * from those who ask for the limited API of 3.11, but the interpreter has it. */
#ifndef GEMM_TUNER_VECTORCALL_H
#define GEMM_TUNER_VECTORCALL_H

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif

#ifndef PY_VECTORCALL_ARGUMENTS_OFFSET
#define PY_VECTORCALL_ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))
#endif

/* Positional arguments come first, then named ones, whose names the tuple `names` has. */
typedef PyObject *(*vectorcall_function)(PyObject *callable, PyObject *const *arguments,
                                         size_t positional, PyObject *names);

PyAPI_FUNC(PyObject *) PyVectorcall_Call(PyObject *callable, PyObject *positional, PyObject *named);
PyAPI_FUNC(PyObject *) PyObject_Vectorcall(PyObject *callable, PyObject *const *arguments,
                                           size_t positional, PyObject *names);

#endif
