#include "kernel_call.h"

#include "workspace.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Shorter calls keep the lock of the interpreter: to give it up and take it again costs more. At
 * 50 Gflop/s this is 2 us. */
enum { FLOP_WORTH_UNLOCKING = 100000 };

typedef union scalar {
    float float32;
    int32_t int32;
} scalar;

/* What a kernel is given, where its inputs lie, and what it returns. */
typedef struct prepared_call {
    gemm_tuner_args args;
    gemm_tuner_operand operands[MAX_OPERANDS];
    scalar scalars[MAX_OPERANDS];
    byte_range inputs[1 + MAX_OPERANDS];
    int64_t head_strides[MAX_OPERANDS];
    byte_range of_w;
    int32_t front; /* dimensions of y in front of a product's: none, batch, or batch and heads */
    int64_t front_shape[MAX_FRONT];
    int32_t input_count;
    PyObject *y;
} prepared_call;

static PyObject *empty; /* numpy.empty */

int kernel_call_init(void) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    empty = numpy ? PyObject_GetAttrString(numpy, "empty") : NULL;
    Py_XDECREF(numpy);
    if (!empty) {
        return -1;
    }
    if (workspace_init() != 0) {
        PyErr_SetString(PyExc_ImportError, "the process has no key left for memory of threads.");
        return -1;
    }
    return 0;
}

/* A Python float for an operand of float32, an int for one of int32, if it fits. */
static bool read_scalar(PyObject *value, const element_type *type, scalar *scalar) {
    if (PyFloat_Check(value) && type->dlpack_type == DLPACK_FLOAT32) {
        const double number = PyFloat_AsDouble(value);
        scalar->float32 = (float)number;
        return !(fabs(number) > FLT_MAX && isfinite(number));
    }
    if (PyLong_CheckExact(value) && type->dlpack_type == DLPACK_INT32) {
        int is_beyond;
        const long long number = PyLong_AsLongLongAndOverflow(value, &is_beyond);
        scalar->int32 = (int32_t)number;
        return scalar->int32 == number && !is_beyond;
    }
    return false;
}

/* Return whether matrices are for as many products as y has, or 1 of them for all, and how far
 * apart: 0 where they are the same. */
static bool read_strides(const array_view *view, const prepared_call *call, int64_t *of_batch,
                         int64_t *of_head) {
    int64_t strides[MAX_FRONT] = {0};
    const int32_t own = view->dimensions - 2, missing = call->front - own;
    for (int32_t i = 0; i < own; i++) {
        if (missing < 0 || (view->shape[i] != 1 && view->shape[i] != call->front_shape[missing + i])) {
            return false;
        }
        strides[missing + i] = view->shape[i] == 1 ? 0 : view->strides[i];
    }
    *of_batch = strides[0];
    *of_head = strides[1];
    return true;
}

/* Find out how many products there are: those of x and of w, each as many or 1. */
static bool read_front(const array_view *x, const array_view *w, prepared_call *call) {
    const int32_t of_x = x->dimensions - 2, of_w = w->dimensions - 2;
    call->front = of_x > of_w ? of_x : of_w;
    for (int32_t i = 0; i < call->front; i++) {
        const int32_t in_x = i - (call->front - of_x), in_w = i - (call->front - of_w);
        const int64_t xs = in_x < 0 ? 1 : x->shape[in_x], ws = in_w < 0 ? 1 : w->shape[in_w];
        if (xs != ws && xs != 1 && ws != 1) {
            return false;
        }
        call->front_shape[i] = xs == 1 ? ws : xs;
    }
    call->args.batch = call->front > 0 ? call->front_shape[0] : 1;
    call->args.heads = call->front > 1 ? call->front_shape[1] : 1;
    return true;
}

static bool read_operand(const operand_facts *facts, PyObject *value, const kernel_facts *kernel,
                         int32_t place, prepared_call *call) {
    gemm_tuner_operand *operand = &call->operands[place];
    byte_range *range = &call->inputs[call->input_count++];
    array_view view = {0};
    *operand = (gemm_tuner_operand){0};
    bool is_read = false;
    switch (facts->shape) {
    case SCALAR:
        *range = (byte_range){0};
        if (read_scalar(value, &facts->type, &call->scalars[place])) {
            operand->elements = &call->scalars[place];
            return true;
        }
        is_read = read_vector(value, &facts->type, 1, &view, range);
        break;
    case ROW_VECTOR:
        is_read = read_vector(value, &facts->type, kernel->n, &view, range);
        break;
    case COLUMN_VECTOR:
        is_read = read_vector(value, &facts->type, call->args.m, &view, range);
        break;
    case MATRIX:
        is_read = read_matrices(value, &facts->type, call->args.m, kernel->n, &view,
                                &operand->leading_dimension, range) &&
                  read_strides(&view, call, &operand->batch_stride, &call->head_strides[place]);
        break;
    }
    operand->elements = view.elements;
    return is_read;
}

/* Find out the number of rows, which the caller of a kernel for a range chooses. */
static bool read_x(const kernel_facts *kernel, PyObject *x, prepared_call *call) {
    array_view view;
    if (!view_array(x, &kernel->x, &view) || view.dimensions != 2) {
        return false;
    }
    call->args.m = view.shape[0];
    if (call->args.m < kernel->m_low || call->args.m > kernel->m_high ||
        !read_matrix(x, &kernel->x, call->args.m, kernel->k, &view,
                     &call->args.x_leading_dimension, &call->inputs[0])) {
        return false;
    }
    call->args.x = view.elements;
    call->input_count = 1;
    return true;
}

/* Find out the number of rows and of products; the last two dimensions are those of a product. */
static bool read_activations(const kernel_facts *kernel, PyObject *given_x, PyObject *given_w,
                             prepared_call *call) {
    array_view x, w;
    gemm_tuner_args *args = &call->args;
    if (!view_array(given_x, &kernel->x, &x) || x.dimensions < 2) {
        return false;
    }
    args->m = x.shape[x.dimensions - 2];
    if (args->m < kernel->m_low || args->m > kernel->m_high ||
        !read_matrices(given_x, &kernel->x, args->m, kernel->k, &x, &args->x_leading_dimension,
                       &call->inputs[0]) ||
        !read_matrices(given_w, &kernel->w, kernel->w_rows, kernel->w_columns, &w,
                       &args->w_leading_dimension, &call->of_w) ||
        !read_front(&x, &w, call) ||
        !read_strides(&x, call, &args->x_batch_stride, &args->x_head_stride) ||
        !read_strides(&w, call, &args->w_batch_stride, &args->w_head_stride)) {
        return false;
    }
    args->x = x.elements;
    args->w = w.elements;
    args->operand_head_strides = call->head_strides;
    call->input_count = 1;
    return true;
}

static bool read_packed(const kernel_facts *kernel, PyObject *packed, prepared_call *call) {
    if (Py_TYPE(packed) != kernel->packed_type) {
        return false;
    }
    PyObject *owner = PyTuple_GetItem(packed, 0);
    PyObject *memory = PyTuple_GetItem(packed, 1);
    if (!owner || !memory || !is_ndarray(memory) ||
        (owner != kernel->owner && PyUnicode_Compare(owner, kernel->owner))) {
        return false;
    }
    call->args.packed_w = ndarray_elements(memory);
    return true;
}

static PyObject *new_y(const kernel_facts *kernel, const prepared_call *call, PyObject *x) {
    PyObject *shape = PyTuple_New(call->front + 2);
    for (int32_t i = 0; shape && i < call->front + 2; i++) {
        const int64_t length = i < call->front    ? call->front_shape[i]
                               : i == call->front ? call->args.m
                                                  : kernel->n;
        PyObject *item = PyLong_FromLongLong(length);
        if (!item || PyTuple_SetItem(shape, i, item) != 0) {
            Py_CLEAR(shape);
        }
    }
    if (!shape) {
        return NULL;
    }
    PyObject *dtype = kernel->y.descr;
    PyObject *y = is_ndarray(x)
                      ? PyObject_CallFunctionObjArgs(empty, shape, dtype, NULL)
                      : PyObject_CallFunctionObjArgs(kernel->new_result, x, shape, dtype, NULL);
    Py_DECREF(shape);
    return y;
}

static bool read_y(const kernel_facts *kernel, PyObject *out, PyObject *x, prepared_call *call) {
    call->y = out ? Py_NewRef(out) : new_y(kernel, call, x);
    array_view view;
    byte_range range;
    if (!call->y ||
        !read_matrices(call->y, &kernel->y, call->args.m, kernel->n, &view,
                       &call->args.y_leading_dimension, &range) ||
        !view.is_writeable || view.dimensions != call->front + 2 ||
        !read_strides(&view, call, &call->args.y_batch_stride, &call->args.y_head_stride) ||
        overlap(range, call->of_w)) {
        return false;
    }
    for (int32_t i = 0; i < call->front; i++) {
        if (view.shape[i] != call->front_shape[i]) {
            return false;
        }
    }
    if (call->front > 0 && !lies_apart(&view)) {
        return false;
    }
    for (int32_t i = 0; i < call->input_count; i++) {
        if (overlap(range, call->inputs[i])) {
            return false;
        }
    }
    call->args.y = view.elements;
    return true;
}

/* A number from 1 to MAX_PARTS, which nobody need give. */
static bool read_number(PyObject *given, int32_t otherwise, int32_t *number) {
    if (!given || given == Py_None) {
        *number = otherwise;
        return true;
    }
    const long value = PyLong_CheckExact(given) ? PyLong_AsLong(given) : -1;
    *number = (int32_t)value;
    return value >= 1 && value <= MAX_PARTS;
}

static bool read_parts(const kernel_facts *kernel, const call_values *values, int32_t *threads,
                       int32_t *parts) {
    if (!read_number(values->threads, kernel->threads, threads)) {
        return false;
    }
    const int32_t usual = *threads == kernel->threads ? kernel->parts : *threads;
    return read_number(values->parts, usual, parts);
}

static bool read_workspace(const kernel_facts *kernel, int32_t parts, prepared_call *call) {
    const uint64_t size_bytes = kernel->workspace_bytes(parts);
    call->args.workspace = size_bytes ? find_workspace(size_bytes) : NULL;
    return !size_bytes || call->args.workspace;
}

static bool prepare(const kernel_facts *kernel, const call_values *values, prepared_call *call) {
    call->args = (gemm_tuner_args){
        .size_bytes = sizeof call->args,
        .batch = 1,
        .heads = 1,
        .operands = call->operands,
        .operand_count = kernel->operand_count,
    };
    call->front = 0;
    call->of_w = (byte_range){0};
    if (kernel->w.descr) {
        memset(call->head_strides, 0, sizeof call->head_strides);
        if (!read_activations(kernel, values->x, values->packed, call)) {
            return false;
        }
    } else if (!read_x(kernel, values->x, call) || !read_packed(kernel, values->packed, call)) {
        return false;
    }
    for (int32_t i = 0; i < kernel->operand_count; i++) {
        if (!read_operand(&kernel->operands[i], values->operands[i], kernel, i, call)) {
            return false;
        }
    }
    return read_y(kernel, values->out, values->x, call);
}

static int32_t run(const kernel_facts *kernel, const prepared_call *call, int32_t parts,
                   int32_t threads) {
    const double products = (double)call->args.batch * (double)call->args.heads;
    const double flop = 2.0 * products * (double)call->args.m * (double)kernel->n * (double)kernel->k;
    if (parts == 1 && kernel->phases == 1 && flop < FLOP_WORTH_UNLOCKING) {
        return kernel->run(&call->args, 0, 0, 1);
    }
    int32_t status;
    Py_BEGIN_ALLOW_THREADS
    status = pool_run(kernel->run, &call->args, kernel->phases, parts, threads);
    Py_END_ALLOW_THREADS
    return status;
}

/* Products of a batch are for all threads, however few parts were best for one of them. */
static int32_t enough_parts(const call_values *values, const prepared_call *call, int32_t threads,
                            int32_t parts) {
    const bool is_said = values->parts && values->parts != Py_None;
    const int64_t products = call->args.batch * call->args.heads;
    const int64_t wanted = products < threads ? products : threads;
    return is_said || wanted < parts ? parts : (int32_t)wanted;
}

PyObject *call_kernel(const kernel_facts *kernel, const call_values *values) {
    prepared_call call;
    int32_t threads, parts;
    call.y = NULL;
    const bool is_done = read_parts(kernel, values, &threads, &parts) &&
                         prepare(kernel, values, &call) &&
                         (parts = enough_parts(values, &call, threads, parts)) > 0 &&
                         read_workspace(kernel, parts, &call) &&
                         run(kernel, &call, parts, threads) == GEMM_TUNER_OK;
    if (is_done) {
        return call.y;
    }
    Py_XDECREF(call.y);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return NULL; /* such as Ctrl-C while y was made */
    }
    PyErr_Clear();
    return NULL;
}
