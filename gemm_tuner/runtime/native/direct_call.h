/* DirectCall, the base class of gemm_tuner.runtime.load.Kernel.
 *
 * When every argument is as it should be, its __call__ goes straight to the kernel. On any doubt it
 * calls the method `compute` with the same arguments, which checks each and says what is wrong. */
#ifndef GEMM_TUNER_DIRECT_CALL_H
#define GEMM_TUNER_DIRECT_CALL_H

#include "array_view.h"

/* Return the new class, or NULL with an exception set. */
PyObject *make_direct_call(void);

/* Convert (numpy.dtype, DLPack code, bits) to an element_type, which keeps the dtype for as long as
 * the process lives: there are a handful. For PyArg_ParseTuple. */
int read_type(PyObject *object, void *type);

#endif
