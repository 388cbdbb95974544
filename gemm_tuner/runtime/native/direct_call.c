#include "direct_call.h"

#include "kernel_call.h"
#include "vectorcall.h"

#include <stddef.h>
#include <string.h>

typedef struct direct_call {
    PyObject_HEAD
    vectorcall_function call;
    bool is_prepared;
    kernel_facts facts;
} direct_call;

static PyTypeObject *direct_call_type;
static PyObject *compute_name, *out_name, *threads_name, *parts_name;

static PyObject **find_place(const kernel_facts *kernel, PyObject *name, call_values *values) {
    if (name == out_name) {
        return &values->out;
    }
    if (name == threads_name) {
        return &values->threads;
    }
    if (name == parts_name) {
        return &values->parts;
    }
    for (int32_t i = 0; i < kernel->operand_count; i++) {
        if (name == kernel->operands[i].name) {
            return &values->operands[i];
        }
    }
    return NULL;
}

static bool read_values(const kernel_facts *kernel, PyObject *const *arguments, size_t positional,
                        PyObject *names, call_values *values) {
    if (positional != 2) {
        return false;
    }
    memset(values, 0, offsetof(call_values, operands) +
                          kernel->operand_count * sizeof *values->operands);
    values->x = arguments[0];
    values->packed = arguments[1];
    const Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject **place = find_place(kernel, PyTuple_GetItem(names, i), values);
        if (!place) {
            return false;
        }
        *place = arguments[2 + i];
    }
    if (values->out == Py_None) {
        values->out = NULL;
    }
    for (int32_t i = 0; i < kernel->operand_count; i++) {
        if (!values->operands[i]) {
            return false;
        }
    }
    return true;
}

static PyObject *direct_call_call(PyObject *object, PyObject *const *arguments, size_t positional,
                                  PyObject *names) {
    direct_call *self = (direct_call *)object;
    call_values values;
    const size_t count = positional & ~PY_VECTORCALL_ARGUMENTS_OFFSET;
    if (self->is_prepared && read_values(&self->facts, arguments, count, names, &values)) {
        PyObject *y = call_kernel(&self->facts, &values);
        if (y || PyErr_Occurred()) {
            return y;
        }
    }
    PyObject *compute = PyObject_GetAttr(object, compute_name);
    PyObject *y = compute ? PyObject_Vectorcall(compute, arguments, positional, names) : NULL;
    Py_XDECREF(compute);
    return y;
}

static PyObject *direct_call_new(PyTypeObject *type, PyObject *positional, PyObject *named) {
    direct_call *self = (direct_call *)PyType_GenericNew(type, positional, named);
    if (self) {
        self->call = direct_call_call;
    }
    return (PyObject *)self;
}

int read_type(PyObject *object, void *result) {
    element_type *type = result;
    PyObject *descr;
    int code, bits;
    if (!PyArg_ParseTuple(object, "Oii", &descr, &code, &bits)) {
        return 0;
    }
    type->descr = Py_NewRef(descr);
    type->dlpack_type = (uint32_t)code | (uint32_t)bits << 8 | 1u << 16;
    type->size_bytes = bits / 8;
    return 1;
}

static int read_operands(PyObject *object, void *result) {
    kernel_facts *facts = result;
    const Py_ssize_t count = PyTuple_Size(object);
    if (count < 0 || count > MAX_OPERANDS) {
        PyErr_Format(PyExc_ValueError, "%zd operands are too many.", count);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        operand_facts *operand = &facts->operands[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(object, i), "UiO&", &operand->name, &operand->shape,
                              read_type, &operand->type)) {
            return 0;
        }
        Py_INCREF(operand->name);
        PyUnicode_InternInPlace(&operand->name);
        facts->operand_count = (int32_t)i + 1;
    }
    return 1;
}

/* Let go of what `read_type` and `read_operands` hold, all of it or what they came to. */
static void release_types(kernel_facts *facts) {
    for (int32_t i = 0; i < facts->operand_count; i++) {
        Py_DECREF(facts->operands[i].name);
        Py_DECREF(facts->operands[i].type.descr);
    }
    Py_XDECREF(facts->x.descr);
    Py_XDECREF(facts->y.descr);
    Py_XDECREF(facts->w.descr);
}

PyDoc_STRVAR(prepare_doc,
             "Take what does not change between the calls of a kernel.\n\n"
             "Until then, each call goes to `compute`.");

static PyObject *direct_call_prepare(PyObject *object, PyObject *positional, PyObject *named) {
    static char *names[] = {
        "run",    "workspace_bytes", "phases",      "threads", "parts",      "m",        "n", "k",
        "x_type", "y_type",          "packed_type", "owner",   "new_result", "operands",
        "w_type", "w_shape",         NULL,
    };
    direct_call *self = (direct_call *)object;
    kernel_facts facts = {0};
    unsigned long long run, workspace_bytes;
    long long m_low, m_high, n, k, w_rows, w_columns;
    PyObject *w_type; /* None where w is packed ahead of calls */
    if (self->is_prepared) {
        PyErr_SetString(PyExc_RuntimeError, "a kernel is prepared once.");
        return NULL;
    }
    if (!PyArg_ParseTupleAndKeywords(
            positional, named, "$KKiii(LL)LLO&O&O!UOO&O(LL)", names, &run, &workspace_bytes,
            &facts.phases, &facts.threads, &facts.parts, &m_low, &m_high, &n, &k, read_type,
            &facts.x, read_type, &facts.y, &PyType_Type, &facts.packed_type, &facts.owner,
            &facts.new_result, read_operands, &facts, &w_type, &w_rows, &w_columns) ||
        (w_type != Py_None && !read_type(w_type, &facts.w))) {
        release_types(&facts);
        return NULL;
    }
    facts.run = (run_function)(uintptr_t)run;
    facts.workspace_bytes = (uint64_t(*)(int32_t))(uintptr_t)workspace_bytes;
    facts.m_low = m_low;
    facts.m_high = m_high;
    facts.n = n;
    facts.k = k;
    facts.w_rows = w_rows;
    facts.w_columns = w_columns;
    Py_INCREF((PyObject *)facts.packed_type);
    Py_INCREF(facts.owner);
    Py_INCREF(facts.new_result);
    self->facts = facts;
    self->is_prepared = true;
    Py_RETURN_NONE;
}

static void direct_call_free(PyObject *object) {
    direct_call *self = (direct_call *)object;
    PyTypeObject *type = Py_TYPE(object);
    release_types(&self->facts);
    Py_XDECREF((PyObject *)self->facts.packed_type);
    Py_XDECREF(self->facts.owner);
    Py_XDECREF(self->facts.new_result);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef direct_call_methods[] = {
    {"prepare", (PyCFunction)(void (*)(void))direct_call_prepare, METH_VARARGS | METH_KEYWORDS,
     prepare_doc},
    {0},
};

static PyMemberDef direct_call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(direct_call, call), READONLY, NULL},
    {0},
};

static PyType_Slot direct_call_slots[] = {
    {Py_tp_doc, "Calls a kernel directly if every argument is valid, else `compute`."},
    {Py_tp_new, direct_call_new},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, direct_call_members},
    {Py_tp_methods, direct_call_methods},
    {Py_tp_dealloc, direct_call_free},
    {0, NULL},
};

static PyType_Spec direct_call_spec = {
    .name = "gemm_tuner.runtime._native.DirectCall",
    .basicsize = sizeof(direct_call),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = direct_call_slots,
};

PyObject *make_direct_call(void) {
    compute_name = PyUnicode_InternFromString("compute");
    out_name = PyUnicode_InternFromString("out");
    threads_name = PyUnicode_InternFromString("threads");
    parts_name = PyUnicode_InternFromString("parts");
    if (!compute_name || !out_name || !threads_name || !parts_name || kernel_call_init() != 0) {
        return NULL;
    }
    direct_call_type = (PyTypeObject *)PyType_FromSpec(&direct_call_spec);
    return Py_XNewRef((PyObject *)direct_call_type);
}

PyObject *seal(PyObject *module, PyObject *arguments) {
    (void)module;
    PyTypeObject *base;
    const char *name, *doc;
    if (!PyArg_ParseTuple(arguments, "O!sz", &PyType_Type, &base, &name, &doc)) {
        return NULL;
    }
    if (!PyType_IsSubtype(base, direct_call_type)) {
        PyErr_SetString(PyExc_TypeError, "only a class derived from DirectCall can be sealed.");
        return NULL;
    }
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)doc},
        {Py_tp_call, PyVectorcall_Call},
        {Py_tp_members, direct_call_members},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = name,
        .flags = direct_call_spec.flags | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = slots,
    };
    return PyType_FromSpecWithBases(&spec, (PyObject *)base);
}
