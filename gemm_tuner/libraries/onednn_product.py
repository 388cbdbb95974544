"""One spelling of a layer as primitives of oneDNN: the product, with the steps that it fuses."""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

from gemm_tuner.domain.cpu import WHOLE_SUMS_OF_BYTES
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import EpilogueOperand, OperandShape, Step, StepKind
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.spelling import Argument, OneDnnAlgorithm
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.finish import Array
from gemm_tuner.libraries.onednn import (
    BIAS,
    DATA_TYPES,
    DESTINATION,
    FORWARD_INFERENCE,
    OPERAND,
    POST_OP,
    QUERY_SCRATCHPAD,
    QUERY_WEIGHTS,
    SCALES,
    SCRATCHPAD,
    SOURCE,
    USER_SCRATCHPAD,
    WEIGHTS,
    ZERO_POINTS,
    ExecutionArgument,
    OneDnnLibrary,
    OneDnnObject,
)
from gemm_tuner.libraries.spelling import Columns, Spelling, spellings_of
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import address_of, allocate_aligned

# As many primitives are kept, for other numbers of rows and threads.
_KEPT_PRIMITIVES = 64
# How the names of implementations begin: those that are there to be right, not fast, and those that
# have packed weights.
_REFERENCE = "ref"
_PACKS = "brg"
# The implementation of products for any layout. Before 3.12, its stack register points to the heap,
# where a signal is then handled (issue 4845 of oneDNN). That of 3.2 adds and multiplies wrong
# numbers where a step reads f16, on a CPU with AVX512-FP16.
_BLAS, _KEEPS_STACK_SINCE = "gemm:jit", (3, 12)
_BYTES = {DType.S8, DType.U8}
_FOR_ALL, _FOR_EACH_ROW, _FOR_EACH_COLUMN = 0, 1, 2

# The number of an argument of a primitive, and the descriptor of its memory.
MemoryArgument = tuple[int, OneDnnObject | int]


class OneDnnProduct:
    """A spelling, with the layout of weights that oneDNN wants for it.

    `operands` are the numbers of the epilogue's operands that a primitive reads, in the order of
    its arguments, and `spread` says which of them it wants as matrices (m, n).
    """

    def __init__(
        self,
        library: OneDnnLibrary,
        spelling: Spelling,
        threads: int | None,
        constants: Mapping[str, Array] | None = None,
    ) -> None:
        """Choose the layout of the weights for the greatest number of rows.

        `constants` are the operands of a layer that is fixed.

        Raises:
            BaselineMissing: oneDNN does not take the spelling.
        """
        self.library = library
        self.spelling = spelling
        self._problem = problem = spelling.problem
        self._threads = threads
        self._constants = constants or {}
        self._primitive = lru_cache(_KEPT_PRIMITIVES)(self.make_primitive)
        self._reorder = lru_cache(_KEPT_PRIMITIVES)(self.make_reorder)
        self._stored = library.array(self._weights_shape, spelling.w, self._stored_strides)
        in_any_layout = (
            self._stored
            if spelling.multiplies_stored_w
            else library.matrix_in_any_layout(self._weights_shape, spelling.w)
        )
        with library.in_threads(threads):
            # Kept, because the layout belongs to it.
            self._greatest, described = self._describe(problem.m.high, in_any_layout)
        self.implementation = library.implementation(self._greatest)
        self.operands = tuple(described.operands)
        self.spread = tuple(described.spread)
        self._layout = library.query_md(self._greatest, QUERY_WEIGHTS)
        self.packed_weight_bytes = library.size_bytes(self._layout)

    @property
    def is_reference(self) -> bool:
        """Say whether oneDNN has nothing fast for the spelling."""
        return self.implementation.startswith(_REFERENCE)

    @property
    def bears_signals(self) -> bool:
        """Say whether a signal that comes during a call leaves the memory of the process whole."""
        return _BLAS not in self.implementation or self.library.version >= _KEEPS_STACK_SINCE

    @property
    def may_misread_halves(self) -> bool:
        """Say whether a fused step has an operand of f16 that oneDNN may take for other numbers."""
        operands = self._problem.epilogue.operands
        types = {self._problem.operand_type(operands[number]) for number in self.operands}
        return DType.F16 in types and _BLAS in self.implementation

    @property
    def packs_weights(self) -> bool:
        """Say whether oneDNN multiplies weights in a layout of its own."""
        return self.implementation.startswith(_PACKS)

    @property
    def _weights_shape(self) -> tuple[int, int]:
        problem = self._problem
        is_transposed = self.spelling.is_inner_product
        return (problem.n, problem.k) if is_transposed else (problem.k, problem.n)

    @property
    def _stored_strides(self) -> tuple[int, ...]:
        problem = self._problem
        strides = (1, problem.k) if problem.w_layout is WeightLayout.NK else (problem.n, 1)
        return strides[::-1] if self.spelling.is_inner_product else strides

    def pack(self, w: int, packed: int) -> None:
        """Write the weights from one address, contiguous, to another, in the layout of oneDNN.

        Raises:
            BaselineMissing: oneDNN failed, for lack of memory, say.
        """
        with self.library.in_threads(self._threads) as usable:
            self._reorder(usable).execute([w, packed])

    def make_reorder(self, _threads: int | None) -> "Primitive":
        """Return the primitive that packs, for the threads that OpenMP has now."""
        library, engine = self.library, self.library.engine
        arguments: list[MemoryArgument] = [(SOURCE, self._stored), (DESTINATION, self._layout)]
        description = library.create(
            "reorder_primitive_desc", self._stored, engine, self._layout, engine, None
        )
        return Primitive(library, description, arguments)

    def compute(
        self,
        x: Array,
        packed: Array,
        y: Array,
        operands: Sequence[Array],
        threads: int | None,
    ) -> None:
        """Write the product with its fused steps to y.

        All arrays are contiguous and of the types of the spelling, x has a row at least, and
        `operands` are what `self.operands` says.

        Raises:
            BaselineMissing: oneDNN failed, for lack of memory, say.
        """
        with self.library.in_threads(threads) as usable:
            primitive = self._primitive(len(x), usable)
            primitive.execute([address_of(array) for array in (x, packed, y, *operands)])

    def make_primitive(self, rows: int, _threads: int | None) -> "Primitive":
        """Return the primitive for so many rows, and for the threads that OpenMP has now.

        Its arguments are x, the packed weights, y and the operands.
        """
        spelling = self.spelling
        description, described = self._describe(rows, self._layout)
        arguments: list[MemoryArgument] = [
            (SOURCE, self._rows(rows, self._problem.k, spelling.x)),
            (WEIGHTS, self._layout),
            (DESTINATION, self._rows(rows, self._problem.n, spelling.y)),
            *described.arguments,
        ]
        return Primitive(self.library, description, arguments)

    def _describe(
        self, rows: int, layout: OneDnnObject | int
    ) -> tuple[OneDnnObject, "_FusedSteps"]:
        """Return the description of a primitive, and its arguments for the epilogue's operands."""
        library, problem = self.library, self._problem
        steps = _FusedSteps(library, self.spelling, rows, self._constants)
        x = self._rows(rows, problem.k, self.spelling.x)
        y = self._rows(rows, problem.n, self.spelling.y)
        arguments = (x, layout, steps.bias, y, steps.attributes)
        if self.spelling.is_inner_product:
            kind = "inner_product_forward_primitive_desc"
            return library.create(kind, library.engine, FORWARD_INFERENCE, *arguments), steps
        return library.create("matmul_primitive_desc", library.engine, *arguments), steps

    def _rows(self, rows: int, columns: int, dtype: DType) -> OneDnnObject:
        return self.library.array((rows, columns), dtype, (columns, 1))


class _FusedSteps:
    """The steps that a primitive fuses, as oneDNN's attributes, and its arguments for them."""

    def __init__(
        self, library: OneDnnLibrary, spelling: Spelling, rows: int, constants: Mapping[str, Array]
    ) -> None:
        self._library = library
        self._spelling = spelling
        self._rows = rows
        self._constants = constants
        self._post_ops = library.create("post_ops")
        self._post_op_count = 0
        self._scaled: set[int] = set()  # the arguments that have scales
        self._is_head = spelling.x.is_integer
        self.attributes = library.create("primitive_attr")
        self.bias: OneDnnObject | None = None
        self.arguments: list[MemoryArgument] = []
        self.operands: list[int] = []
        self.spread: list[bool] = []
        library.call("primitive_attr_set_scratchpad_mode", self.attributes, USER_SCRATCHPAD)
        remaining = enumerate(spelling.problem.epilogue.operands)
        for step in spelling.fused_steps:
            if step.kind.operand is OperandShape.NONE:
                self._add_elementwise(step)
            else:
                self._add_operand(step, *next(remaining))
        library.call("primitive_attr_set_post_ops", self.attributes, self._post_ops)

    def _add_elementwise(self, step: Step) -> None:
        self._is_head = False
        for post_op in step.kind.onednn or ():
            self._append("eltwise", post_op.algorithm, *post_op.alpha_beta(step.parameters))

    def _add_operand(self, step: Step, number: int, operand: EpilogueOperand) -> None:
        kind = step.kind
        problem, library = self._spelling.problem, self._library
        dtype = problem.operand_type(operand)
        scale = self._scale_of(kind) if self._is_head else None
        is_fixed_scalar = self._spelling.is_fixed and kind.operand is OperandShape.SCALAR
        if kind.argument is Argument.X_ZERO_POINT:
            self._add_vector(number, ZERO_POINTS, SOURCE, _FOR_ALL, 1, dtype)
            return
        if scale is not None:
            argument, mask, length = scale
            self._scaled.add(argument)
            self._add_vector(number, SCALES, argument, mask, length, dtype)
            return
        self._is_head = False
        if kind.argument is Argument.BIAS and self.bias is None and self._post_op_count == 0:
            # At the head of the chain it is an argument of the primitive: it costs least there.
            is_vector = self._spelling.is_inner_product
            shape, strides = ((problem.n,), (1,)) if is_vector else ((1, problem.n), (problem.n, 1))
            self.bias = library.array(shape, dtype, strides)
            self._add_argument(number, BIAS, self.bias)
        elif is_fixed_scalar and kind.argument is Argument.Y_ZERO_POINT:
            self._add_vector(number, ZERO_POINTS, DESTINATION, _FOR_ALL, 1, dtype)
        elif is_fixed_scalar:
            factor = float(self._constants[operand.name][0])
            self._append("eltwise", OneDnnAlgorithm.LINEAR, factor, 0.0)
        else:
            self._add_binary(step, number, dtype)

    def _scale_of(self, kind: StepKind) -> tuple[int, int, int] | None:
        """Return the argument that a step at the head scales, with its mask and its length."""
        shape = kind.operand
        argument, mask, length = {
            OperandShape.SCALAR: (SOURCE, _FOR_ALL, 1),
            OperandShape.ROW_VECTOR: (WEIGHTS, _FOR_EACH_COLUMN, self._spelling.problem.n),
            OperandShape.COLUMN_VECTOR: (SOURCE, _FOR_EACH_ROW, self._rows),
        }.get(shape, (0, 0, 0))
        is_column = shape is OperandShape.COLUMN_VECTOR
        if not kind.is_scale or argument in self._scaled:
            return None
        if is_column and self._spelling.columns is not Columns.SCALES:
            return None
        return argument, mask, length

    def _add_binary(self, step: Step, number: int, dtype: DType) -> None:
        shape = step.kind.operand
        problem = self._spelling.problem
        of_each_row = shape in {OperandShape.COLUMN_VECTOR, OperandShape.MATRIX}
        is_spread = shape is OperandShape.COLUMN_VECTOR and self._spelling.columns is Columns.MATRIX
        has_columns = is_spread or shape in {OperandShape.ROW_VECTOR, OperandShape.MATRIX}
        columns = problem.n if has_columns else 1
        for post_op in step.kind.onednn or ():
            if not post_op.algorithm.is_binary:
                self._append("eltwise", post_op.algorithm, *post_op.alpha_beta(step.parameters))
                continue
            matrix = self._library.array(
                (self._rows if of_each_row else 1, columns), dtype, (columns, 1)
            )
            self._append("binary", post_op.algorithm, matrix)
            self._add_argument(
                number, POST_OP * self._post_op_count | OPERAND, matrix, is_spread=is_spread
            )

    def _append(self, kind: str, *arguments: object) -> None:
        self._library.call(f"post_ops_append_{kind}", self._post_ops, *arguments)
        self._post_op_count += 1

    def _add_vector(  # noqa: PLR0917 - as the function of oneDNN that it calls
        self, number: int, kind: int, argument: int, mask: int, length: int, dtype: DType
    ) -> None:
        """Give an argument of the primitive its scales or zero points."""
        names = {SCALES: "scales", ZERO_POINTS: "zero_points"}
        self._library.call(
            f"primitive_attr_set_{names[kind]}_mask", self.attributes, argument, mask
        )
        vector = self._library.array((length,), dtype, (1,))
        self._add_argument(number, kind | argument, vector)

    def _add_argument(
        self, number: int, argument: int, description: OneDnnObject, *, is_spread: bool = False
    ) -> None:
        self.arguments.append((argument, description))
        self.operands.append(number)
        self.spread.append(is_spread)


class Primitive:
    """A primitive with the sets of memory objects that calls at the same time need."""

    def __init__(
        self, library: OneDnnLibrary, description: OneDnnObject, arguments: list[MemoryArgument]
    ) -> None:
        self._library = library
        self._description = description
        self._arguments = arguments
        self.handle = library.create("primitive", description)
        self._idle: deque[ArgumentSet] = deque()

    def execute(self, addresses: Sequence[int]) -> None:
        """Execute the primitive on what lies at these addresses, in the order of the arguments."""
        try:
            arguments = self._idle.pop()
        except IndexError:
            arguments = self.argument_set()
        arguments.execute(self.handle, addresses)
        self._idle.append(arguments)

    def argument_set(self) -> "ArgumentSet":
        """Return what one call at a time needs."""
        return ArgumentSet(self._library, self._description, self._arguments)


class ArgumentSet:
    """The memory objects of one call at a time, with its scratchpad and stream."""

    def __init__(
        self, library: OneDnnLibrary, description: OneDnnObject, arguments: list[MemoryArgument]
    ) -> None:
        scratchpad = library.query_md(description, QUERY_SCRATCHPAD)
        self._library = library
        self._scratchpad = allocate_aligned(library.size_bytes(scratchpad))
        self.stream = library.stream()
        self.memories = [
            library.create("memory", memory_desc, library.engine, None)
            for _number, memory_desc in arguments
        ]
        self._scratchpad_memory = library.create(
            "memory", scratchpad, library.engine, address_of(self._scratchpad)
        )
        numbers = [*(number for number, _memory_desc in arguments), SCRATCHPAD]
        memories = [*self.memories, self._scratchpad_memory]
        self.arguments = (ExecutionArgument * len(numbers))()
        for argument, number, memory in zip(self.arguments, numbers, memories, strict=True):
            argument.argument, argument.memory = number, memory.address

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Let the arguments lie at these addresses."""
        for memory, address in zip(self.memories, addresses, strict=True):
            self._library.call("memory_set_data_handle", memory, address)

    def execute(self, primitive: OneDnnObject, addresses: Sequence[int]) -> None:
        """Execute a primitive on what lies at these addresses."""
        self.set_addresses(addresses)
        call = self._library.call
        call("primitive_execute", primitive, self.stream, len(self.arguments), self.arguments)
        call("stream_wait", self.stream)


def usable_products(
    library: OneDnnLibrary,
    problem: Problem,
    threads: int | None,
    *,
    constants: Mapping[str, Array] | None = None,
) -> list[OneDnnProduct]:
    """Return the spellings of a problem that oneDNN computes fast, the most usual first.

    One that fuses everything without a column leaves nothing to be tried. The reference
    implementations of oneDNN are not fast, and one is not right. `constants` are the operands of a
    layer that is fixed.

    Raises:
        BaselineMissing: there is none.
    """
    _check_problem(problem)
    found: list[OneDnnProduct] = []
    refused: dict[str, str] = {}
    for spelling in spellings_of(problem, of_fixed_layer=constants is not None):
        if found and _is_needless(spelling, found):
            continue
        try:
            _check_sums(spelling)
            product = OneDnnProduct(library, spelling, threads, constants)
        except BaselineMissing as refusal:
            refused[spelling.text] = str(refusal)
            continue
        if product.is_reference and problem.flop(problem.m.high):
            refused[spelling.text] = f"it has nothing but {product.implementation!r}, which is slow"
            continue
        if product.may_misread_halves:
            refused[spelling.text] = f"{product.implementation!r} may misread operands of f16"
            continue
        found.append(product)
    if not found:
        usual = next(iter(refused.values())).rstrip(".")
        error = BaselineMissing(f"oneDNN has nothing fast for {problem.text}: {usual}.")
        error.details = tuple(f"{text}: {reason}" for text, reason in refused.items())
        raise error
    return found


def _is_needless(spelling: Spelling, found: Sequence[OneDnnProduct]) -> bool:
    """Say whether a spelling cannot be faster than what was found, or is for types it lacks."""
    first = found[0].spelling
    is_converted = spelling.converts_x and not first.converts_x
    is_whole = not first.needs_finish and not first.fuses_columns
    is_alike = spelling.is_inner_product and found[0].packs_weights
    return is_alike or is_converted or (is_whole and spelling.needs_finish)


def _check_problem(problem: Problem) -> None:
    types = problem.types
    if not {types.x, types.w, types.y} <= DATA_TYPES.keys():
        raise BaselineMissing(f"oneDNN is not called for products of the types {types.text}.")


def _check_sums(spelling: Spelling) -> None:
    if spelling.x in _BYTES and not WHOLE_SUMS_OF_BYTES & detect_cpu().isa:
        raise BaselineMissing(
            "sums of bytes saturate in oneDNN on a CPU with neither avx512_vnni nor avx_vnni."
        )
