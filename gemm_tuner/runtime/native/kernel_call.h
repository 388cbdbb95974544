/* One call of a kernel with Python's arguments. */
#ifndef GEMM_TUNER_KERNEL_CALL_H
#define GEMM_TUNER_KERNEL_CALL_H

#include "array_view.h"
#include "pool.h"

enum { MAX_OPERANDS = 16 };

typedef enum operand_shape { SCALAR, ROW_VECTOR, COLUMN_VECTOR, MATRIX } operand_shape;

typedef struct operand_facts {
    PyObject *name; /* interned */
    int shape;
    element_type type;
} operand_facts;

/* What does not change between the calls of a kernel. */
typedef struct kernel_facts {
    run_function run;
    uint64_t (*workspace_bytes)(int32_t parts);
    int32_t phases;
    int32_t threads;
    int32_t parts; /* of a call in `threads` threads */
    int64_t m_low, m_high, n, k;
    element_type x, y;
    element_type w; /* of two activations; without a type, w is packed ahead of calls */
    int64_t w_rows, w_columns;
    PyTypeObject *packed_type; /* a tuple of the owner and the memory */
    PyObject *owner;           /* of the packed weights */
    PyObject *new_result;      /* makes y of the kind of x: (x, shape, dtype) */
    int32_t operand_count;
    operand_facts operands[MAX_OPERANDS];
} kernel_facts;

/* The arguments of a call, which its caller holds. */
typedef struct call_values {
    PyObject *x, *packed, *out, *threads, *parts;
    PyObject *operands[MAX_OPERANDS];
} call_values;

/* To be called once, before the others. Returns 0, or -1 with an exception set. */
int kernel_call_init(void);

/* Return the result, or NULL if an argument may be invalid. Only an interrupted call sets an
 * exception. */
PyObject *call_kernel(const kernel_facts *kernel, const call_values *values);

#endif
