/* DirectCall, the base class of gemm_tuner.runtime.load.Kernel.
 *
 * If every argument is valid, its __call__ goes straight to the kernel. On any doubt it calls the
 * method `compute` with the same arguments, which checks each and reports the fault.
 *
 * It uses vectorcall: making a tuple and a dictionary takes longer than all the rest. */
#ifndef GEMM_TUNER_DIRECT_CALL_H
#define GEMM_TUNER_DIRECT_CALL_H

#include "array_view.h"

/* Return the new class, or NULL with an exception set. */
PyObject *make_direct_call(void);

/* Return a subclass of (class, name, doc) that cannot be changed, and has vectorcall in Python 3.11
 * too; gemm_tuner/runtime/direct.py says why. */
PyObject *seal(PyObject *module, PyObject *arguments);

/* Convert (numpy.dtype, DLPack code, bits) to an element_type, which keeps the dtype for as long as
 * the process lives: there are a handful. For PyArg_ParseTuple. */
int read_type(PyObject *object, void *type);

#endif
