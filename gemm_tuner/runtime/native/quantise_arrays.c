#include "quantise_arrays.h"

#include "direct_call.h"
#include "quantise.h"

/* Fewer elements keep the lock of the interpreter: they take less than 4 us. */
enum { ELEMENTS_WORTH_UNLOCKING = 16384 };

/* The first three are the types of x, numbered as in quantise.h. */
enum { SIGNED = 3, UNSIGNED, INTEGER, TYPES };

static element_type types[TYPES];

PyObject *set_quantise_types(PyObject *module, PyObject *arguments) {
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O&O&O&O&O&O&", read_type, &types[QUANTISE_F32], read_type,
                          &types[QUANTISE_BF16], read_type, &types[QUANTISE_F16], read_type,
                          &types[SIGNED], read_type, &types[UNSIGNED], read_type,
                          &types[INTEGER])) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static void run(const quantise_call *call) {
    if (call->rows * call->columns < ELEMENTS_WORTH_UNLOCKING) {
        quantise_rows(call);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    quantise_rows(call);
    Py_END_ALLOW_THREADS
}

static bool read_x(PyObject *x, quantise_call *call, byte_range *range) {
    array_view view;
    for (int32_t type = QUANTISE_F32; type <= QUANTISE_F16; type++) {
        if (view_array(x, &types[type], &view)) {
            call->x_type = type;
            break;
        }
        if (type == QUANTISE_F16) {
            return false;
        }
    }
    if (view.dimensions != 2) {
        return false;
    }
    call->rows = view.shape[0];
    call->columns = view.shape[1];
    const bool is_read = read_matrix(x, &types[call->x_type], call->rows, call->columns, &view,
                                     &call->x_distance, range);
    call->x = view.elements;
    return is_read;
}

static bool read_y(PyObject *y, const element_type *type, quantise_call *call, byte_range *range) {
    array_view view;
    if (!read_matrix(y, type, call->rows, call->columns, &view, &call->y_distance, range) ||
        !view.is_writeable) {
        return false;
    }
    call->y = (uint8_t *)view.elements;
    return true;
}

static bool read_written(PyObject *array, const element_type *type, const quantise_call *call,
                         void **elements, byte_range *range) {
    array_view view;
    const int64_t length = call->is_one_scale ? 1 : call->rows;
    if (!read_vector(array, type, length, &view, range) || !view.is_writeable) {
        return false;
    }
    *elements = view.elements;
    return true;
}

static bool are_apart(const byte_range *ranges, int count) {
    for (int i = 1; i < count; i++) {
        for (int j = 0; j < i; j++) {
            if (overlap(ranges[i], ranges[j])) {
                return false;
            }
        }
    }
    return true;
}

PyObject *quantise(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    quantise_call call = {0};
    byte_range ranges[4];
    if (count != 5) {
        PyErr_Format(PyExc_TypeError, "quantise takes 5 arguments, not %zd.", count);
        return NULL;
    }
    const bool is_signed = arguments[3] == Py_None;
    call.is_one_scale = arguments[4] == Py_True;
    const bool is_valid =
        read_x(arguments[0], &call, &ranges[0]) &&
        read_y(arguments[1], &types[is_signed ? SIGNED : UNSIGNED], &call, &ranges[1]) &&
        read_written(arguments[2], &types[QUANTISE_F32], &call, (void **)&call.scales, &ranges[2]) &&
        (is_signed || read_written(arguments[3], &types[INTEGER], &call,
                                   (void **)&call.zero_points, &ranges[3])) &&
        are_apart(ranges, is_signed ? 3 : 4);
    if (is_valid) {
        run(&call);
    }
    return PyBool_FromLong(is_valid);
}

PyObject *quantise_at(PyObject *module, PyObject *arguments) {
    (void)module;
    long long rows, columns, x_distance, y_distance;
    unsigned long long x, y, scales, zero_points;
    int x_type, is_one_scale;
    if (!PyArg_ParseTuple(arguments, "LLKLKLKKip", &rows, &columns, &x, &x_distance, &y,
                          &y_distance, &scales, &zero_points, &x_type, &is_one_scale)) {
        return NULL;
    }
    const quantise_call call = {
        .rows = rows,
        .columns = columns,
        .x = (const void *)(uintptr_t)x,
        .x_distance = x_distance,
        .y = (uint8_t *)(uintptr_t)y,
        .y_distance = y_distance,
        .scales = (float *)(uintptr_t)scales,
        .zero_points = (int32_t *)(uintptr_t)zero_points,
        .x_type = x_type,
        .is_one_scale = is_one_scale,
    };
    run(&call);
    Py_RETURN_NONE;
}
