/* The module gemm_tuner.runtime._native: the call path in C, built where a compiler is.
 * gemm_tuner/runtime/_native.pyi has its interface. */
#include "array_view.h"
#include "direct_call.h"
#include "pool.h"
#include "quantise_arrays.h"

PyDoc_STRVAR(run_parts_doc,
             "Compute all parts of all phases of a call in up to so many threads of the pool, and "
             "return the status.");

static PyObject *run_parts(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long run, args;
    int phases, parts, threads;
    if (!PyArg_ParseTuple(arguments, "KKiii", &run, &args, &phases, &parts, &threads)) {
        return NULL;
    }
    int32_t status;
    Py_BEGIN_ALLOW_THREADS
    status = pool_run((run_function)(uintptr_t)run, (const gemm_tuner_args *)(uintptr_t)args,
                      phases, parts, threads);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

PyDoc_STRVAR(pack_doc,
             "Pack the weights of so many products, of which the packed ones lie so many bytes "
             "apart, in parts in up to so many threads of the pool, and return the status.");

static PyObject *pack(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long pack, weights, packed;
    long long stride_bytes, count;
    int parts, threads;
    if (!PyArg_ParseTuple(arguments, "KKKLLii", &pack, &weights, &packed, &stride_bytes, &count,
                          &parts, &threads)) {
        return NULL;
    }
    int32_t status;
    Py_BEGIN_ALLOW_THREADS
    status = pool_pack((pack_function)(uintptr_t)pack,
                       (const gemm_tuner_weights *)(uintptr_t)weights, (void *)(uintptr_t)packed,
                       stride_bytes, count, parts, threads);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

PyDoc_STRVAR(configure_pool_doc,
             "Set how many threads share a call, the caller's among them, and the CPUs to pin the "
             "others to, or None.");

static PyObject *configure_pool(PyObject *module, PyObject *arguments) {
    (void)module;
    int threads;
    PyObject *cpus;
    if (!PyArg_ParseTuple(arguments, "iO", &threads, &cpus)) {
        return NULL;
    }
    if (cpus == Py_None) {
        pool_configure(threads, NULL);
        Py_RETURN_NONE;
    }
    int32_t *numbers = threads > 0 ? PyMem_Malloc(threads * sizeof *numbers) : NULL;
    for (int i = 0; numbers && i < threads && !PyErr_Occurred(); i++) {
        PyObject *number = PySequence_GetItem(cpus, i);
        numbers[i] = number ? (int32_t)PyLong_AsLong(number) : 0;
        Py_XDECREF(number);
    }
    if (numbers && !PyErr_Occurred()) {
        pool_configure(threads, numbers);
    }
    PyMem_Free(numbers);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(locate_doc,
             "Return the address and the strides in elements of an array of the type (numpy.dtype, "
             "DLPack code, bits), as the direct way sees it, or None.");

static PyObject *locate(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *array;
    element_type type;
    array_view view = {0};
    if (!PyArg_ParseTuple(arguments, "OO&", &array, read_type, &type)) {
        return NULL;
    }
    const bool is_known = view_array(array, &type, &view);
    Py_DECREF(type.descr);
    if (!is_known) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(KLL)", (unsigned long long)(uintptr_t)view.elements,
                         (long long)view.strides[0], (long long)view.strides[1]);
}

PyDoc_STRVAR(seal_doc,
             "Return a subclass of a class derived from DirectCall, of this name and doc, that cannot "
             "be changed.");

PyDoc_STRVAR(set_quantise_types_doc,
             "Take the types (numpy.dtype, DLPack code, bits) of float32, bfloat16, float16, int8, "
             "uint8 and int32, once.");

PyDoc_STRVAR(quantise_doc,
             "Quantise (x, y, scales, zero points or None, whether one scale is for all), or return "
             "False if an argument may be invalid.");

PyDoc_STRVAR(quantise_at_doc,
             "Quantise: rows, columns, address of x, distance of its rows, the same of y, addresses "
             "of scales and zero points, the number of the type of x, whether one scale is for all.");

static PyMethodDef functions[] = {
    {"run_parts", run_parts, METH_VARARGS, run_parts_doc},
    {"pack", pack, METH_VARARGS, pack_doc},
    {"configure_pool", configure_pool, METH_VARARGS, configure_pool_doc},
    {"locate", locate, METH_VARARGS, locate_doc},
    {"set_quantise_types", set_quantise_types, METH_VARARGS, set_quantise_types_doc},
    {"quantise", (PyCFunction)(void (*)(void))quantise, METH_FASTCALL, quantise_doc},
    {"quantise_at", quantise_at, METH_VARARGS, quantise_at_doc},
    {"seal", seal, METH_VARARGS, seal_doc},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The call path in C: straight calls of kernels, and the threads that share them.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = array_view_init() == 0 ? PyModule_Create(&definition) : NULL;
    PyObject *type = module ? make_direct_call() : NULL;
    if (!type || PyModule_AddObjectRef(module, "DirectCall", type) != 0 ||
        PyModule_AddIntMacro(module, GEMM_TUNER_ABI_VERSION) != 0 ||
        PyModule_AddStringMacro(module, SOURCE_SHA256) != 0) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    Py_DECREF(type);
    return module;
}
