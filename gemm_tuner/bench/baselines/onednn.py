"""oneDNN: every version that is found, in the fastest of all ways to ask for a problem."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.baselines.baseline import (
    AnyBaseline,
    Copy,
    Materials,
    Package,
    Row,
)
from gemm_tuner.bench.c_runner import CRunner
from gemm_tuner.bench.passes import Pass, PassStruct, convert, finish, spread
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.workload import Workload, aligned_copy
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.finish import Array
from gemm_tuner.libraries.onednn import (
    OneDnnLibrary,
    find_onednn,
    installed_onednn,
    load_library,
    open_onednn,
)
from gemm_tuner.libraries.onednn_layer import pick_fastest
from gemm_tuner.libraries.onednn_product import OneDnnProduct, usable_products
from gemm_tuner.machine.core_clock import CoreClock
from gemm_tuner.machine.memory import address_of, allocate_aligned

_MOST_PASSES = 4  # BENCH_PASSES of bench/native/sample.h
_SAMPLE_NS = 200_000  # of calls; compares spellings
_MOST_CALLS = 100
_SEED = 0


class _LayerStruct(ctypes.Structure):
    """`onednn_layer` of bench/native/onednn.c."""

    _fields_ = (
        ("execute", ctypes.c_void_p),
        ("wait", ctypes.c_void_p),
        ("set_data_handle", ctypes.c_void_p),
        ("primitive", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("argument_count", ctypes.c_int32),
        ("reorder", ctypes.c_void_p),
        ("reorder_stream", ctypes.c_void_p),
        ("reorder_arguments", ctypes.c_void_p),
        ("reorder_argument_count", ctypes.c_int32),
        ("before_count", ctypes.c_int32),
        ("before", PassStruct * _MOST_PASSES),
        ("after", PassStruct),
    )


class OneDnn(AnyBaseline):
    """One library of oneDNN, with weights reordered once and what it can fuse fused.

    A w that comes with each call is multiplied as it is stored, or reordered in the call, whichever
    is faster.

    What it lacks is done by passes before and after its product, inside the timed loop. Its threads
    are those of OpenMP: OMP_NUM_THREADS must be set before it is loaded.
    """

    fuses_epilogue = True
    is_of_openmp = True

    def __init__(self, library: Path, drivers: tuple[Path, Path]) -> None:
        """Remember where the library is, and the drivers: the loop and the pass."""
        self._path = library
        self._driver, self._pass = drivers
        # What was chosen, by the text of the problem and the threads of OpenMP.
        self._spellings: dict[str, str] = {}

    def preload(self) -> None:
        """Load the library here; each fork makes its own primitives."""
        load_library(self._path)

    @property
    def choice(self) -> Mapping[str, str]:
        """Return the spelling chosen for each problem, by its text, and number of threads."""
        return self._spellings

    def settle(self, choice: Mapping[str, str]) -> None:
        """Ask so from now on, for the problems and threads of the choice and no other."""
        self._spellings = dict(choice)

    def prepare(self, workload: Workload) -> "_OneDnnRunner":
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: oneDNN does not load, or has nothing fast for the problem.
        """
        library = open_onednn(self._path)
        products = self._products(library, workload)
        driver = ctypes.CDLL(str(self._driver))
        make = partial(_OneDnnRunner, driver, self._pass, workload=workload)
        runners = [make(product) for product in products]
        trials = [_trial(one, workload.threads) for one in runners]
        chosen = runners[pick_fastest(trials) if trials[1:] else 0]
        spelling = chosen.product.spelling
        self._spellings.setdefault(_key(library, workload), spelling.text)
        self.text = f"{library.text} + pass" if spelling.needs_passes else library.text
        self.implementation = f"{chosen.product.implementation}: {spelling.text}"
        return chosen

    def _products(self, library: OneDnnLibrary, workload: Workload) -> list[OneDnnProduct]:
        """Return the ways to ask for this problem, or only the one that was chosen for it."""
        problem = workload.problem
        products = usable_products(library, problem, None, constants=workload.operands)
        chosen = self._spellings.get(_key(library, workload))
        return [one for one in products if one.spelling.text == chosen] or products


def _key(library: OneDnnLibrary, workload: Workload) -> str:
    return f"{workload.problem.text} on {library.max_threads()}"


class _OneDnnRunner(CRunner):
    def __init__(
        self, driver: ctypes.CDLL, pass_library: Path, product: OneDnnProduct, workload: Workload
    ) -> None:
        self.product = product
        spelling, library = product.spelling, product.library
        rows, problem = workload.rows, workload.problem
        team = library.team(workload.threads)
        self._packs_ahead = problem.operation.packs_ahead
        before: list[Pass] = []
        self._w = workload.w.astype(NUMPY_TYPES[spelling.w], copy=False)
        if not self._packs_ahead and self._w is not workload.w:
            self._w = aligned_copy(self._w)
            before.append(convert(pass_library, workload.w, self._w, team))
        x = workload.x
        if spelling.converts_x:
            x = aligned_copy(np.zeros(x.shape, NUMPY_TYPES[spelling.x]))
            before.append(convert(pass_library, workload.x, x, team))
        y = workload.y
        if spelling.needs_finish and spelling.y is not problem.types.y:
            y = aligned_copy(np.zeros(y.shape, NUMPY_TYPES[spelling.y]))
        operands = []
        for number, is_spread in zip(product.operands, product.spread, strict=True):
            array: Array = list(workload.operands.values())[number]
            if is_spread:
                matrix = aligned_copy(np.zeros((rows, problem.n), array.dtype))
                before.append(spread(pass_library, array, matrix, team))
                array = matrix
            operands.append(array)
        if len(before) > _MOST_PASSES:
            raise BaselineMissing(f"{spelling.text} needs {len(before)} passes before the product.")
        after = (
            finish(pass_library, workload, y, fused=spelling.fused, team=team)
            if spelling.needs_finish
            else None
        )
        self._primitive = product.make_primitive(rows, None)
        self._arguments = self._primitive.argument_set()
        multiplied = self._w
        self._reorder = None
        if spelling.reorders_w:
            multiplied = allocate_aligned(product.packed_weight_bytes)
            self._reorder = product.make_reorder(None)
            self._reordered = self._reorder.argument_set()
            self._reordered.set_addresses([address_of(self._w), address_of(multiplied)])
        # Weights packed ahead have their address from each copy.
        self._arguments.set_addresses([address_of(one) for one in (x, multiplied, y, *operands)])
        self._kept = (x, multiplied, y, operands, before, after)
        layer = _LayerStruct(
            library.address("primitive_execute"),
            library.address("stream_wait"),
            library.address("memory_set_data_handle"),
            self._primitive.handle.address,
            self._arguments.stream.address,
            self._arguments.memories[1].address if self._packs_ahead else None,
            ctypes.addressof(self._arguments.arguments),
            len(self._arguments.arguments),
            *self._reorder_fields(),
            len(before),
            (PassStruct * _MOST_PASSES)(*(one.struct for one in before)),
            after.struct if after else PassStruct(),
        )
        super().__init__(driver.onednn_time, ctypes.byref(layer))

    def _reorder_fields(self) -> tuple[int | None, int | None, int | None, int]:
        """Return the primitive that reorders w in each call, if one does, for the driver."""
        if self._reorder is None:
            return None, None, None, 0
        reordered = self._reordered
        return (
            self._reorder.handle.address,
            reordered.stream.address,
            ctypes.addressof(reordered.arguments),
            len(reordered.arguments),
        )

    @property
    def packed_weight_bytes(self) -> int:
        return self.product.packed_weight_bytes if self._packs_ahead else 0

    def pack(self, address: int) -> None:
        if self._packs_ahead:
            self.product.pack(address_of(self._w), address)

    def _check_calls(self, status: int) -> None:
        if status != 0:
            raise BaselineMissing(
                f"matmul of oneDNN failed with status {status}; choose another baseline."
            )


def _trial(runner: _OneDnnRunner, threads: int) -> Callable[[], float]:
    """Return a function that returns the time of a call, in ns."""
    weights = WeightCopies(runner, 1, _SEED)
    first_ns = int(runner.sample(weights.struct, warm_up_calls=1, timed_calls=1).elapsed_ns)
    calls = max(1, min(_MOST_CALLS, _SAMPLE_NS // max(1, first_ns)))
    clock = CoreClock(threads)

    def run() -> float:
        clock.start()
        sample = runner.sample(weights.struct, warm_up_calls=0, timed_calls=calls)
        return clock.counted_ns(sample.elapsed_ns) / calls

    return run


def _find(materials: Materials) -> Sequence[Copy]:
    find_onednn()  # says what to do where there is none
    drivers = (materials.drivers.onednn, materials.drivers.finish)
    return [
        Copy(package=one.package, baseline=OneDnn(one.path, drivers), start_s=one.start_s)
        for one in installed_onednn()
    ]


ROWS = (
    Row(
        name="onednn",
        place=1,
        find=_find,
        installed=lambda: [Package(one.package, one.start_s) for one in installed_onednn()],
        is_raced=True,
        takes_activations=True,
    ),
)
