#include "array_view.h"

#include <string.h>

/* The start of PyArrayObject. It belongs to NumPy's binary interface: the macros of its headers
 * compile to these offsets in every extension. */
typedef struct numpy_array {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions;
    Py_ssize_t *strides; /* bytes */
    PyObject *base;
    PyObject *descr;
    int flags;
} numpy_array;

enum { NUMPY_ALIGNED = 0x100, NUMPY_WRITEABLE = 0x400 };

/* From dlpack.h, version 1.3. */
enum { DLPACK_MAJOR_VERSION = 1, DLPACK_CPU = 1 };

typedef struct dlpack_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides; /* NULL: contiguous */
    uint64_t byte_offset;
} dlpack_tensor;

typedef struct dlpack_exchange {
    struct {
        uint32_t major, minor;
        const void *previous;
    } header;
    void *allocate;
    void *managed_tensor_from_object;
    void *managed_tensor_to_object;
    int (*tensor_from_object)(void *object, dlpack_tensor *tensor);
} dlpack_exchange;

enum { KNOWN_TYPES = 4 }; /* torch.Tensor, torch.nn.Parameter, and room */

static PyTypeObject *ndarray;
static PyObject *requires_grad;
static PyObject *exchange_name;
static PyObject *forward_mode; /* torch.autograd.forward_ad, once a tensor of PyTorch came */
static PyObject *forward_mode_name;
static PyObject *current_level;

static struct {
    PyTypeObject *type;
    const dlpack_exchange *exchange;
} known[KNOWN_TYPES];

int array_view_init(void) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    ndarray = numpy ? (PyTypeObject *)PyObject_GetAttrString(numpy, "ndarray") : NULL;
    requires_grad = PyUnicode_InternFromString("requires_grad");
    exchange_name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    forward_mode_name = PyUnicode_InternFromString("torch.autograd.forward_ad");
    current_level = PyUnicode_InternFromString("_current_level");
    Py_XDECREF(numpy);
    return ndarray && requires_grad && exchange_name && forward_mode_name &&
                   current_level
               ? 0
               : -1;
}

bool is_ndarray(PyObject *object) { return Py_TYPE(object) == ndarray; }

void *ndarray_elements(PyObject *array) { return ((numpy_array *)array)->data; }

static bool view_ndarray(const numpy_array *array, const element_type *type, array_view *view) {
    if (array->descr != type->descr || !(array->flags & NUMPY_ALIGNED)) {
        return false;
    }
    for (int i = 0; i < array->nd; i++) {
        if (array->strides[i] % type->size_bytes) {
            return false;
        }
        view->strides[i] = array->strides[i] / type->size_bytes;
    }
    view->elements = array->data;
    view->shape = (const int64_t *)array->dimensions;
    view->is_writeable = array->flags & NUMPY_WRITEABLE;
    return true;
}

static const dlpack_exchange *find_exchange(PyTypeObject *type) {
    int place = 0;
    for (; place < KNOWN_TYPES && known[place].type; place++) {
        if (known[place].type == type) {
            return known[place].exchange;
        }
    }
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, exchange_name);
    const dlpack_exchange *exchange =
        capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    PyErr_Clear();
    if (!exchange || exchange->header.major != DLPACK_MAJOR_VERSION ||
        !exchange->tensor_from_object) {
        return NULL;
    }
    if (place < KNOWN_TYPES) {
        Py_INCREF((PyObject *)type);
        known[place].type = type;
        known[place].exchange = exchange;
    }
    if (!forward_mode) {
        forward_mode = PyImport_GetModule(forward_mode_name);
        PyErr_Clear();
    }
    return exchange;
}

/* Tensors have tangents inside of a level of forward mode only; outside, the level is -1. */
static bool may_have_tangents(void) {
    PyObject *level = forward_mode ? PyObject_GetAttr(forward_mode, current_level) : NULL;
    bool may = level != NULL && PyLong_AsLong(level) != -1;
    Py_XDECREF(level);
    PyErr_Clear();
    return may;
}

/* The exchange would leave a tensor's gradient or tangent behind in silence. */
static bool is_differentiated(PyObject *tensor) {
    PyObject *flag = PyObject_GetAttr(tensor, requires_grad);
    bool is_recorded = flag != NULL && flag != Py_False;
    Py_XDECREF(flag);
    PyErr_Clear();
    return is_recorded || may_have_tangents();
}

/* A single column with another stride is not read here: it may be the imaginary part of conjugated
 * numbers, whose sign the exchange does not tell. */
static bool view_tensor(PyObject *object, const element_type *type, array_view *view) {
    const dlpack_exchange *exchange = find_exchange(Py_TYPE(object));
    dlpack_tensor tensor;
    if (!exchange || is_differentiated(object)) {
        return false;
    }
    if (exchange->tensor_from_object(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    const uint32_t given = tensor.code | (uint32_t)tensor.bits << 8 | (uint32_t)tensor.lanes << 16;
    view->elements = (char *)tensor.data + tensor.byte_offset;
    if (tensor.device_type != DLPACK_CPU || given != type->dlpack_type || tensor.ndim < 1 ||
        tensor.ndim > MAX_DIMENSIONS || !tensor.strides || !tensor.data || tensor.strides[tensor.ndim - 1] != 1 ||
        (uintptr_t)view->elements % type->size_bytes) {
        return false;
    }
    memcpy(view->strides, tensor.strides, tensor.ndim * sizeof *tensor.strides);
    view->dimensions = tensor.ndim;
    view->shape = tensor.shape;
    view->is_writeable = true;
    return true;
}

bool view_array(PyObject *array, const element_type *type, array_view *view) {
    if (!is_ndarray(array)) {
        return view_tensor(array, type, view);
    }
    view->dimensions = ((numpy_array *)array)->nd;
    return view->dimensions >= 1 && view->dimensions <= MAX_DIMENSIONS &&
           view_ndarray((numpy_array *)array, type, view);
}

static int64_t at_least_1(int64_t length) { return length > 1 ? length : 1; }

static byte_range range_of(const array_view *view, int64_t elements, int64_t size_bytes) {
    return (byte_range){view->elements, view->elements + elements * size_bytes};
}

bool overlap(byte_range a, byte_range b) {
    return a.begin < b.end && b.begin < a.end;
}

bool read_matrices(PyObject *array, const element_type *type, int64_t rows, int64_t columns,
                   array_view *view, int64_t *leading_dimension, byte_range *range) {
    if (!view_array(array, type, view) || view->dimensions < 2) {
        return false;
    }
    const int32_t front = view->dimensions - 2;
    const int64_t *shape = view->shape + front, *strides = view->strides + front;
    if (shape[0] != rows || shape[1] != columns || (columns > 1 && rows > 0 && strides[1] != 1)) {
        return false;
    }
    *leading_dimension = rows > 1 && columns > 0 ? strides[0] : at_least_1(columns);
    int64_t spanned = rows && columns ? (rows - 1) * *leading_dimension + columns : 0;
    for (int32_t i = 0; i < front; i++) {
        if (view->shape[i] < 1 || view->strides[i] < 0) {
            return false;
        }
        spanned += spanned ? (view->shape[i] - 1) * view->strides[i] : 0;
    }
    *range = range_of(view, spanned, type->size_bytes);
    return *leading_dimension >= columns;
}

bool read_matrix(PyObject *array, const element_type *type, int64_t rows, int64_t columns,
                 array_view *view, int64_t *leading_dimension, byte_range *range) {
    return read_matrices(array, type, rows, columns, view, leading_dimension, range) &&
           view->dimensions == 2;
}

/* From the shortest stride to the longest, each is at least as long as all before it reach. */
bool lies_apart(const array_view *view) {
    bool is_seen[MAX_DIMENSIONS] = {false};
    int64_t reach = 1;
    for (int32_t turn = 0; turn < view->dimensions; turn++) {
        int32_t least = -1;
        for (int32_t i = 0; i < view->dimensions; i++) {
            if (!is_seen[i] && (least < 0 || view->strides[i] < view->strides[least])) {
                least = i;
            }
        }
        is_seen[least] = true;
        if (view->shape[least] > 1 && view->strides[least] < reach) {
            return false;
        }
        reach += (view->shape[least] - 1) * view->strides[least];
    }
    return true;
}

bool read_vector(PyObject *array, const element_type *type, int64_t length, array_view *view,
                 byte_range *range) {
    *range = (byte_range){0};
    if (!view_array(array, type, view) || view->dimensions != 1 || view->shape[0] != length ||
        (length > 1 && view->strides[0] != 1)) {
        return false;
    }
    *range = range_of(view, length, type->size_bytes);
    return true;
}
