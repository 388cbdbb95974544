"""Load a kernel and call it on arrays."""

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import (
    ALIGNMENT_BYTES,
    ArgsStruct,
    ArrayView,
    KernelLibrary,
    make_args,
)
from gemm_tuner.arrays.batch import (
    PackedBatch,
    batch_of_weights,
    batched_operands,
    check_batch_overlap,
    view_products,
)
from gemm_tuner.arrays.call import check_batch_call, check_call, view_operands
from gemm_tuner.arrays.dlpack import AnyArray, SharedArray, element_type, new_result
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.packed import PackedWeights, check_packed
from gemm_tuner.arrays.products import Products, check_packs, check_products, refuse_values
from gemm_tuner.arrays.views import count_rows, view_matrix, view_output
from gemm_tuner.arrays.weights import StoredWeights, check_weights
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.comparison import Comparison
from gemm_tuner.domain.context import check_threads
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidSetting, KernelRejected
from gemm_tuner.machine.amx import ask_for_amx
from gemm_tuner.machine.memory import ThreadMemory, address_of, allocate_aligned
from gemm_tuner.runtime.direct import DirectCall, sealed
from gemm_tuner.runtime.pool import configure_pool, pack_parts, run_parts

# Operand shapes as native/kernel_call.h numbers them.
_SHAPE_NUMBERS = {
    OperandShape.SCALAR: 0,
    OperandShape.ROW_VECTOR: 1,
    OperandShape.COLUMN_VECTOR: 2,
    OperandShape.MATRIX: 3,
}


@sealed
class Kernel(DirectCall):
    """A loaded kernel: `y = epilogue(x @ w)` for one n and k.

    That of a product of two activations is called as `kernel(x, w, ...)`, that of attention as
    `kernel(q, k, v, ...)`; they have nothing to pack.

    `kernel(x, packed, ...)` computes what `kernel.compute(x, packed, ...)` does, through the call
    path in C where that was built. Any number of threads may call it at once. `library` names what
    computes, `gemm-tuner` with its version, and `reason` says why, as in a `FallbackKernel`;
    `comparison` is its speed beside libraries, None where that was not measured.
    """

    def __init__(
        self,
        native: KernelLibrary,
        artifact: Artifact,
        threads: int = 1,
        reason: str = "",
        comparison: Comparison | None = None,
    ) -> None:
        """Wrap a loaded library; use `load_kernel` to get a checked one.

        A call uses `threads` threads if it does not say how many. `reason` says in words why this
        kernel was chosen.

        Raises:
            KernelRejected: the library does not describe itself.
            InvalidSetting: `threads` is not a whole number that is usable.
        """
        self.native = native
        self.reason = reason
        self.comparison = comparison
        self.artifact = artifact
        self.threads = check_threads(threads)
        try:
            description = json.loads(native.describe())
            self.problem = Problem.parse(description["problem"])
            self.candidate = Candidate.parse(description["candidate"])
            # A kernel that does not name its layout shares it with no other.
            self.packed_format = str(description.get("packed_format", artifact.sha256))
            self.takes_float_zero_points = bool(description.get("float_zero_points"))
        except (KeyError, TypeError, ValueError) as error:
            raise KernelRejected(
                f"kernel {artifact.sha256[:12]} does not say what it computes: {error}; "
                "build or fetch it again."
            ) from error
        self._y_type = NUMPY_TYPES[self.problem.types.y]
        self._operands = self.problem.epilogue.operands
        self._memory = ThreadMemory()
        # Calls with values go through Python.
        if native.run_address and not self.problem.operation.has_values:
            self._prepare()

    def __reduce__(self) -> tuple[object, ...]:
        """Refuse to be copied or pickled: a kernel is code that this process has loaded.

        Raises:
            InvalidSetting: always.
        """
        raise InvalidSetting(
            f"kernel {self.artifact.sha256[:12]} cannot be copied or pickled: any number of "
            "threads may share it, and another process asks for its own, with Client.kernel or "
            "tune."
        )

    @property
    def library(self) -> str:
        """Return `gemm-tuner` with its version."""
        return _own_name()

    def __repr__(self) -> str:
        """Return what it computes, and how."""
        return f"Kernel({self.problem.text!r}, {self.candidate.text!r}, threads={self.threads})"

    def pack(
        self, w: object, *, scales: object = None, zero_points: object = None
    ) -> PackedWeights:
        """Return the weights packed for this kernel; the arrays given are not needed afterwards.

        Each of the kernel's usual threads packs the part that it will read, so that it lies in
        memory near it.

        Args:
            w: (n, k) or (k, n), as the problem's layout says; rows at any distance. Elements of 4
                bits lie two in a byte, as `gemm_tuner.quantise_weights` returns them.
            scales: (n, groups), where w is of integers that stand for floats.
            zero_points: (n, groups), where they are unsigned: uint8, or float32 where they lie
                between the elements.

        Raises:
            InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot
                be used.
            KernelRejected: zero points are floats, and the kernel was built before there were such.
        """
        check_packs(self.problem)
        memory = allocate_aligned(self.native.packed_weight_bytes)
        self._pack_into(memory, [check_weights(self.problem, w, scales, zero_points)])
        return PackedWeights(owner=self.packed_format, memory=memory)

    def _pack_into(
        self, memory: NDArray[np.uint8], products: Sequence[StoredWeights], stride_bytes: int = 0
    ) -> None:
        pack_parts(
            self.native,
            [one.struct for one in products],
            address_of(memory),
            stride_bytes,
            parts=self._parts(self.threads),
            threads=self.threads,
        )

    def compute(
        self,
        x: AnyArray,
        packed: PackedWeights | SharedArray,
        v: object = None,
        *,
        out: AnyArray | None = None,
        threads: int | None = None,
        parts: int | None = None,
        **operands: object,
    ) -> AnyArray:
        """Return `epilogue(x @ w)`, or attention of queries x, keys w and values v.

        Arrays are those of NumPy, or of any library that speaks DLPack, such as PyTorch; they are
        not copied.

        Args:
            x: (m, k), rows at any distance; of two activations also (batch, m, k) or
                (batch, heads, m, k), views with any strides whose last dimension is dense.
            packed: what `pack` returned, of this kernel or of one with the same `packed_format`. Of
                two activations it is w, in front of its two dimensions as x; what is missing or 1
                there is the same for all products.
            v: the values of attention, (n, k), in front of its two dimensions as x.
            out: where the result goes, (m, n), and what is returned; by default a new array of the
                library of x. It shares no memory with an input: between blocks of k it holds
                unfinished sums.
            threads: how many threads compute; by default as many as the kernel was chosen for, and
                in the parts that were timed.
            parts: in how many parts; by default one for each thread. More of them balance cores
                that are not alike. The result may depend on this number in the last bits, but
                never on threads or order.
            **operands: what the epilogue reads, by the names in `problem.epilogue.operands`.

        Raises:
            InvalidArray: an array is missing, or its type, shape or strides cannot be used.
            InvalidSetting: `threads` or `parts` is out of range.
        """
        if not self.problem.operation.packs_ahead:
            return self._multiply(
                check_products(self.problem, x, packed, out, operands, v=v), threads, parts
            )
        refuse_values(self.problem, v)
        check_packed(packed, self.packed_format)
        assert isinstance(packed, PackedWeights)
        threads = check_threads(self.threads if threads is None else threads)
        parts = self._parts(threads, parts)
        arrays = check_call(self.problem, x, out, operands)
        workspace_bytes = self.native.workspace_bytes(parts)
        args = make_args(
            m=len(arrays.x),
            x=arrays.x_view,
            packed_w=address_of(packed.memory),
            y=arrays.y_view,
            operands=arrays.operands.views,
            workspace=address_of(self._memory.get(workspace_bytes)) if workspace_bytes else 0,
        )
        self._run(args, parts, threads)
        return arrays.result

    def _multiply(
        self, arrays: Products[AnyArray], threads: int | None, parts: int | None
    ) -> AnyArray:
        """Return the products of activations, each of all heads of a batch."""
        threads = check_threads(self.threads if threads is None else threads)
        # Products of a batch are for all threads, however few parts were best for one of them.
        enough = min(threads, arrays.batch * arrays.heads) if parts is None else 1
        parts = max(enough, self._parts(threads, parts))
        if arrays.y.size == 0:
            return arrays.result
        workspace_bytes = self.native.workspace_bytes(parts)
        args = make_args(
            m=arrays.rows,
            batch=arrays.batch,
            heads=arrays.heads,
            x=arrays.x_view,
            w=arrays.w_view,
            v=arrays.v_view,
            n=arrays.columns,
            y=arrays.y_view,
            operands=arrays.operands.views,
            workspace=address_of(self._memory.get(workspace_bytes)) if workspace_bytes else 0,
        )
        self._run(args, parts, threads)
        return arrays.result

    def pack_batch(
        self, w: object, *, scales: object = None, zero_points: object = None
    ) -> PackedBatch:
        """Return the weights of each product of a batch, in the layout of this kernel.

        Args:
            w: (batch, n, k) or (batch, k, n), as the problem's layout says.
            scales: (batch, n, groups), where `pack` needs them.
            zero_points: (batch, n, groups), where `pack` needs them.

        Raises:
            InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot
                be used.
        """
        check_packs(self.problem)
        size_bytes = self.native.packed_weight_bytes
        stride_bytes = -(-max(1, size_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        products = [
            check_weights(self.problem, *one) for one in batch_of_weights(w, scales, zero_points)
        ]
        memory = allocate_aligned(len(products) * stride_bytes)
        self._pack_into(memory, products, stride_bytes)
        return PackedBatch(
            packer=self.packed_format, products=memory.reshape(len(products), stride_bytes)
        )

    def batch(
        self,
        x: AnyArray,
        packed: PackedWeights | PackedBatch,
        *,
        out: AnyArray | None = None,
        threads: int | None = None,
        parts: int | None = None,
        **operands: object,
    ) -> AnyArray:
        """Return `epilogue(x @ w)` for each product of a batch.

        Args:
            x: (batch, m, k); rows and products at any distance.
            packed: what `pack` returned, for all products, or what `pack_batch` returned.
            out: (batch, m, n), as in a call for one product.
            threads: as in a call for one product.
            parts: as in a call for one product.
            **operands: each as for one product, shared by all, or with a leading batch dimension.

        Raises:
            InvalidArray: an array is missing, or its type, shape or strides cannot be used.
            InvalidSetting: `threads` or `parts` is out of range.
        """
        check_packs(self.problem)
        given, y, result = check_batch_call(self.problem, x, out)
        count = len(given)
        if isinstance(packed, PackedBatch):
            packed.check(self.packed_format, count)
            weights, stride_bytes = packed.products, packed.products.strides[0]
        else:
            check_packed(packed, self.packed_format)
            weights, stride_bytes = packed.memory, 0
        threads = check_threads(self.threads if threads is None else threads)
        parts = self._parts(threads, parts)
        types, n, k = self.problem.types, self.problem.n, self.problem.k
        if count == 0:
            return result
        rows = count_rows(given[0], self.problem)
        views, kept = self._view_batch_operands(operands, (count, rows, n))
        check_batch_overlap(y, given, kept)
        workspace_bytes = self.native.workspace_bytes(parts)
        args = make_args(
            m=rows,
            batch=count,
            x=view_products("x", given, lambda one: view_matrix("x", one, (rows, k), types.x)),
            packed_w=address_of(weights),
            packed_w_batch_stride_bytes=stride_bytes,
            y=view_products("out", y, lambda one: view_output(one, (rows, n), types.y)),
            operands=views,
            workspace=address_of(self._memory.get(workspace_bytes)) if workspace_bytes else 0,
        )
        self._run(args, parts, threads)
        return result

    def _run(self, args: ArgsStruct, parts: int, threads: int) -> None:
        if not run_parts(self.native, args, parts, threads):
            raise KernelRejected(
                f"kernel {self.artifact.sha256[:12]} refused its arguments "
                f"(m = {args.m}, {parts} parts); build or fetch it again."
            )

    def _prepare(self) -> None:
        problem = self.problem
        w_type = element_type(NUMPY_TYPES[problem.types.w])
        self.prepare(
            run=self.native.run_address,
            workspace_bytes=self.native.workspace_bytes_address,
            phases=self.native.phases,
            threads=self.threads,
            parts=self._parts(self.threads),
            m=(problem.m.low, problem.m.high),
            n=problem.n,
            k=problem.k,
            x_type=element_type(NUMPY_TYPES[problem.types.x]),
            y_type=element_type(self._y_type),
            packed_type=PackedWeights,
            owner=self.packed_format,
            new_result=new_result,
            operands=tuple(
                (
                    operand.name,
                    _SHAPE_NUMBERS[operand.shape],
                    element_type(NUMPY_TYPES[problem.operand_type(operand)]),
                )
                for operand in self._operands
            ),
            w_type=None if problem.operation.packs_ahead else w_type,
            w_shape=problem.w_shape,
        )

    def _parts(self, threads: int, parts: int | None = None) -> int:
        """Return how many are asked for, or as timed for the usual threads, or one for each."""
        if parts is not None:
            return check_threads(parts, "parts")
        return threads if threads != self.threads else min(threads, self.native.preferred_parts)

    def _view_batch_operands(
        self, operands: Mapping[str, object], shape: tuple[int, int, int]
    ) -> tuple[list[ArrayView], dict[str, NDArray[np.generic]]]:
        """Return views of the operands, each of which may have a leading batch dimension."""
        count, rows, n = shape
        batched = batched_operands(self._operands, operands, count)
        firsts = {**operands, **{name: array[0] for name, array in batched.items()}}
        views, kept = view_operands(self.problem, firsts, (rows, n))
        for place, operand in enumerate(self._operands):
            if operand.name in batched:
                array = batched[operand.name]
                views[place] = view_products(operand.name, array, partial(_known, views[place]))
                kept[operand.name] = array
        return views, kept


@cache
def _own_name() -> str:
    # Each process that calls kernels imports this module, few ask, and to look it up takes long.
    from importlib.metadata import version  # noqa: PLC0415

    return f"gemm-tuner {version('gemm-tuner')}"


def _known(view: ArrayView, _array: NDArray[np.generic]) -> ArrayView:
    return view


def load_kernel(
    binary: bytes,
    *,
    artifact: Artifact,
    cpu: Cpu,
    threads: int = 1,
    reason: str = "",
    comparison: Comparison | None = None,
) -> Kernel:
    """Check an artifact, load it into this process, and return it as a kernel for `threads`.

    `reason` says in words why it was chosen, and `comparison` how fast it was beside libraries.

    Raises:
        DigestMismatch: the bytes are not those that the artifact is named after.
        IsaNotUsable: the kernel needs features that are not usable here.
        AbiMismatch: the kernel has another version of the ABI than this package.
        KernelRejected: the system cannot load it.
        InvalidSetting: `threads` is not a whole number that is usable, or GEMM_TUNER_PIN neither 0
            nor 1.
    """
    artifact.check(binary, cpu.isa)
    if IsaFeature.AMX_TILE in artifact.required_isa:
        ask_for_amx()  # `cpu` may have been detected by another process
    configure_pool()
    return Kernel(KernelLibrary(binary), artifact, threads, reason, comparison)
