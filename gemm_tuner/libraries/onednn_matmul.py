"""One matrix product with everything fused, as primitives of oneDNN."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem, WeightLayout
from gemm_tuner.domain.spelling import Argument
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.numpy_layer import Array
from gemm_tuner.libraries.onednn import (
    DATA_TYPES,
    DESTINATION,
    OPERAND,
    POST_OP,
    QUERY_SCRATCHPAD,
    QUERY_WEIGHTS,
    SCRATCHPAD,
    SOURCE,
    USER_SCRATCHPAD,
    WEIGHTS,
    ZERO_POINTS,
    ExecutionArgument,
    OneDnnLibrary,
    OneDnnObject,
)
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import address_of, allocate_aligned

# As many primitives are kept, for other numbers of rows and threads.
_KEPT_PRIMITIVES = 64
_REFERENCE = "ref"  # how the names of implementations begin that are there to be right, not fast
_VNNI = frozenset({IsaFeature.AVX512_VNNI, IsaFeature.AVX_VNNI})

# oneDNN repeats no columns fast: a column is given to it as a matrix.
_OF_EACH_ROW = frozenset({OperandShape.COLUMN_VECTOR, OperandShape.MATRIX})

# The number of an argument of a primitive, and the descriptor of its memory.
_Argument = tuple[int, OneDnnObject | int]


class OneDnnMatmul:
    """A problem whose whole epilogue oneDNN fuses, with the layout of weights that it wants."""

    def __init__(self, library: OneDnnLibrary, problem: Problem, threads: int | None) -> None:
        """Choose the layout of the weights for the greatest number of rows.

        Raises:
            BaselineMissing: oneDNN cannot fuse a step, or has nothing fast for the problem.
        """
        _check_problem(problem)
        self._library = library
        self._problem = problem
        self._threads = threads
        self._primitive = lru_cache(_KEPT_PRIMITIVES)(self._make_primitive)
        in_any_layout = library.matrix_in_any_layout((problem.k, problem.n), problem.types.w)
        with library.in_threads(threads):
            # Kept, because the layout belongs to it.
            self._greatest, _operands = self._describe(problem.m.high, in_any_layout)
        implementation = library.implementation(self._greatest)
        if implementation.startswith(_REFERENCE):
            raise BaselineMissing(
                f"oneDNN has nothing but {implementation!r} for {problem.text}, which is slow."
            )
        self._layout = library.query_md(self._greatest, QUERY_WEIGHTS)
        self.packed_weight_bytes = library.size_bytes(self._layout)

    @property
    def y_type(self) -> DType:
        """Return the type of the elements of y."""
        return self._problem.types.y

    def pack(self, w: int, packed: int) -> None:
        """Write the weights from one address, contiguous, to another, in the layout of oneDNN.

        Raises:
            BaselineMissing: oneDNN failed, for lack of memory, say.
        """
        problem, library, engine = self._problem, self._library, self._library.engine
        strides = (1, problem.k) if problem.w_layout is WeightLayout.NK else (problem.n, 1)
        given = library.array((problem.k, problem.n), problem.types.w, strides)
        arguments: list[_Argument] = [(SOURCE, given), (DESTINATION, self._layout)]
        with library.in_threads(self._threads):
            description = library.create(
                "reorder_primitive_desc", given, engine, self._layout, engine, None
            )
            _Primitive(library, description, arguments).execute([w, packed])

    def compute(
        self,
        x: Array,
        packed: Array,
        y: Array,
        operands: Sequence[Array],
        threads: int | None,
    ) -> None:
        """Write `epilogue(x @ w)` to y.

        All arrays are contiguous, x has a row at least, and operands with a row or an element for
        each row of x are matrices (m, n).

        Raises:
            BaselineMissing: oneDNN failed, for lack of memory, say.
        """
        with self._library.in_threads(threads) as usable:
            primitive = self._primitive(len(x), usable)
            primitive.execute([address_of(array) for array in (x, packed, y, *operands)])

    def _make_primitive(self, rows: int, _threads: int | None) -> "_Primitive":
        """Return the primitive for so many rows, and for the threads that OpenMP has now."""
        types = self._problem.types
        description, operands = self._describe(rows, self._layout)
        arguments: list[_Argument] = [
            (SOURCE, self._rows(rows, self._problem.k, types.x)),
            (WEIGHTS, self._layout),
            (DESTINATION, self._rows(rows, self._problem.n, types.y)),
            *operands,
        ]
        return _Primitive(self._library, description, arguments)

    def _describe(
        self, rows: int, layout: OneDnnObject | int
    ) -> tuple[OneDnnObject, list["_Argument"]]:
        """Return the description of a primitive, and its arguments for the epilogue's operands."""
        library, problem = self._library, self._problem
        attributes, operands = self._describe_epilogue(rows)
        x = self._rows(rows, problem.k, problem.types.x)
        y = self._rows(rows, problem.n, problem.types.y)
        description = library.create(
            "matmul_primitive_desc", library.engine, x, layout, None, y, attributes
        )
        return description, operands

    def _describe_epilogue(self, rows: int) -> tuple[OneDnnObject, list["_Argument"]]:
        library, problem = self._library, self._problem
        attributes = library.create("primitive_attr")
        library.call("primitive_attr_set_scratchpad_mode", attributes, USER_SCRATCHPAD)
        post_ops = library.create("post_ops")
        count = 0
        arguments: list[_Argument] = []
        remaining = iter(problem.epilogue.operands)
        for step in problem.epilogue.steps:
            kind = step.kind
            operand = next(remaining) if kind.operand is not OperandShape.NONE else None
            if operand is not None and kind.argument is Argument.X_ZERO_POINT:
                dtype = problem.operand_type(operand)
                library.call("primitive_attr_set_zero_points_mask", attributes, SOURCE, 0)
                arguments.append((ZERO_POINTS | SOURCE, library.array((1,), dtype, (1,))))
                continue
            for post_op in kind.onednn or ():
                count += 1
                if operand is None or not post_op.algorithm.is_binary:
                    alpha, beta = post_op.alpha_beta(step.parameters)
                    library.call(
                        "post_ops_append_eltwise", post_ops, post_op.algorithm, alpha, beta
                    )
                    continue
                matrix = self._rows(
                    rows if kind.operand in _OF_EACH_ROW else 1,
                    problem.n if kind.operand is not OperandShape.SCALAR else 1,
                    problem.operand_type(operand),
                )
                library.call("post_ops_append_binary", post_ops, post_op.algorithm, matrix)
                arguments.append((POST_OP * count | OPERAND, matrix))
        library.call("primitive_attr_set_post_ops", attributes, post_ops)
        return attributes, arguments

    def _rows(self, rows: int, columns: int, dtype: DType) -> OneDnnObject:
        return self._library.array((rows, columns), dtype, (columns, 1))


class _Primitive:
    """A primitive with the sets of memory objects that calls at the same time need."""

    def __init__(
        self, library: OneDnnLibrary, description: OneDnnObject, arguments: list[_Argument]
    ) -> None:
        self._library = library
        self._description = description
        self._arguments = arguments
        self._primitive = library.create("primitive", description)
        self._idle: deque[_ArgumentSet] = deque()

    def execute(self, addresses: Sequence[int]) -> None:
        """Execute the primitive on what lies at these addresses, in the order of the arguments."""
        try:
            arguments = self._idle.pop()
        except IndexError:
            arguments = _ArgumentSet(self._library, self._description, self._arguments)
        arguments.execute(self._primitive, addresses)
        self._idle.append(arguments)


class _ArgumentSet:
    """The memory objects of one call at a time, with its scratchpad and stream."""

    def __init__(
        self, library: OneDnnLibrary, description: OneDnnObject, arguments: list[_Argument]
    ) -> None:
        scratchpad = library.query_md(description, QUERY_SCRATCHPAD)
        self._library = library
        self._scratchpad = allocate_aligned(library.size_bytes(scratchpad))
        self._stream = library.stream()
        self._memories = [
            library.create("memory", memory_desc, library.engine, None)
            for _number, memory_desc in arguments
        ]
        self._scratchpad_memory = library.create(
            "memory", scratchpad, library.engine, address_of(self._scratchpad)
        )
        numbers = [*(number for number, _memory_desc in arguments), SCRATCHPAD]
        memories = [*self._memories, self._scratchpad_memory]
        self._count = len(numbers)
        self._arguments = (ExecutionArgument * self._count)()
        for argument, number, memory in zip(self._arguments, numbers, memories, strict=True):
            argument.argument, argument.memory = number, memory.address

    def execute(self, primitive: OneDnnObject, addresses: Sequence[int]) -> None:
        """Execute a primitive on what lies at these addresses."""
        call = self._library.call
        for memory, address in zip(self._memories, addresses, strict=True):
            call("memory_set_data_handle", memory, address)
        call("primitive_execute", primitive, self._stream, self._count, self._arguments)
        call("stream_wait", self._stream)


def _check_problem(problem: Problem) -> None:
    types = problem.types
    if 0 in {problem.m.high, problem.n, problem.k}:
        raise BaselineMissing(f"{problem.text} has no elements.")
    is_known = {types.x, types.w, types.y} <= DATA_TYPES.keys()
    if not is_known or not (types.x is types.w or types.accumulator is DType.S32):
        raise BaselineMissing(f"oneDNN is not called for products of the types {types.text}.")
    if types.x.is_integer and not _VNNI & detect_cpu().isa:
        raise BaselineMissing(
            "sums of bytes saturate in oneDNN on a CPU with neither avx512_vnni nor avx_vnni."
        )
    for place, step in enumerate(problem.epilogue.steps):
        is_argument = step.kind.argument is Argument.X_ZERO_POINT and place == 0
        if step.kind.onednn is None and not is_argument:
            raise BaselineMissing(f"oneDNN cannot fuse the step {step.text!r} of {problem.text}.")
