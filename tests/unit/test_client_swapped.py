"""A kernel swapped in under threads: no call mixes two layouts, and nothing is packed twice."""

import copy
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_tuner.arrays.weights import check_weights
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.client.swapped import SwappedKernel
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray, InvalidSetting
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named

PROBLEM = Problem.parse("f32 1..8x32x16 nk bias")
CANDIDATE = Candidate.parse("scalar_f32_2x4 mc8_nc32_kc16 jc_ic_jr_ir")
SEED = 11
# A step of packing for a kernel; the class itself is compiled, and cannot be changed.
PACKED_IN = "gemm_tuner.runtime.load.check_weights"
Array = NDArray[Any]


@pytest.fixture(scope="module")
def tuned() -> Kernel:
    family = family_named(CANDIDATE.micro_kernel.family)
    source = render(PROBLEM, CANDIDATE, family)
    build = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
    return load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())


@pytest.fixture
def library() -> FallbackKernel:
    return FallbackKernel(problem=PROBLEM, reason="nothing was tuned.", threads=1)


@pytest.fixture
def swapped(library: FallbackKernel) -> SwappedKernel:
    return SwappedKernel(library, "It is being tuned, and until then:")


def _inputs(number: int = 0) -> tuple[Array, Array, Array]:
    generator = np.random.default_rng(SEED + number)
    x, w, bias = (generator.standard_normal(shape) for shape in ((8, 16), (32, 16), (32,)))
    return x.astype(np.float32), w.astype(np.float32), bias.astype(np.float32)


def _expected(x: Array, w: Array, bias: Array) -> Array:
    return x.astype(np.float64) @ w.astype(np.float64).T + bias


def test_weights_packed_before_are_right_after_the_swap(
    swapped: SwappedKernel, tuned: Kernel
) -> None:
    x, w, bias = _inputs()
    expected = _expected(x, w, bias)
    packed = swapped.pack(w)
    w[:] = np.nan  # they are not needed any more

    before = swapped(x, packed, bias=bias)
    swapped.settle(tuned)
    after = swapped(x, packed, bias=bias)

    np.testing.assert_allclose(before, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after, tuned(x, tuned.pack(_inputs()[1]), bias=bias))


def test_what_computes_and_why_is_told(swapped: SwappedKernel, tuned: Kernel) -> None:
    before = (swapped.library, swapped.reason, swapped.is_settled)
    swapped.settle(tuned)

    assert before[1].startswith("It is being tuned, and until then: nothing was tuned.")
    assert not before[2]
    assert swapped.library == tuned.library != before[0]
    assert swapped.reason == tuned.reason
    assert swapped.is_settled
    assert swapped.kernel is tuned
    assert (swapped.problem, swapped.threads) == (PROBLEM, 1)


def test_batches_are_swapped_too(swapped: SwappedKernel, tuned: Kernel) -> None:
    each = [_inputs(number) for number in range(3)]
    x, w, bias = (np.stack(arrays) for arrays in zip(*each, strict=True))
    of_batch, of_one = swapped.pack_batch(w), swapped.pack(w[0])
    expected = np.stack([_expected(*one) for one in each])

    for _time in range(2):
        y = swapped.batch(x, of_batch, bias=bias)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        shared = swapped.batch(x, of_one, bias=bias)
        np.testing.assert_allclose(shared[0], expected[0], rtol=1e-4, atol=1e-5)
        swapped.settle(tuned)


def test_weights_are_packed_again_once_and_their_copies_dropped(
    swapped: SwappedKernel, tuned: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, bias = _inputs()
    packed = [swapped.pack(w) for _layer in range(3)]
    swapped.settle(tuned)
    count = _counted_packs(monkeypatch)

    for _time in range(3):
        for one in packed:
            swapped(x, one, bias=bias)

    assert count() == 3
    assert all(one._again is None for one in packed)


def test_where_nothing_better_came_the_copy_goes_and_nothing_is_packed(
    swapped: SwappedKernel, library: FallbackKernel
) -> None:
    x, w, bias = _inputs()
    packed = swapped.pack(w)
    swapped.settle(library, "Job 1 is failed: no compiler.")

    y = swapped(x, packed, bias=bias)

    np.testing.assert_allclose(y, _expected(x, w, bias), rtol=1e-4, atol=1e-5)
    assert packed._again is None
    assert "no compiler. nothing was tuned" in swapped.reason


def test_a_call_that_cannot_pack_again_goes_on_with_the_library(
    swapped: SwappedKernel, tuned: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, bias = _inputs()
    packed = swapped.pack(w)
    swapped.settle(tuned)

    def fail(*_arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PACKED_IN, fail)
    for _time in range(2):
        y = swapped(x, packed, bias=bias)
        np.testing.assert_allclose(y, _expected(x, w, bias), rtol=1e-4, atol=1e-5)


def test_others_go_on_while_one_thread_packs_again(
    swapped: SwappedKernel, tuned: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, bias = _inputs()
    packed = swapped.pack(w)
    is_packing, may_go_on = Event(), Event()

    def slow(*given: Any) -> object:  # noqa: ANN401 - handed on
        is_packing.set()
        assert may_go_on.wait(20)
        return check_weights(*given)

    monkeypatch.setattr(PACKED_IN, slow)
    swapped.settle(tuned)
    with ThreadPoolExecutor(1) as pool:
        packing = pool.submit(swapped, x, packed, bias=bias)
        assert is_packing.wait(20)
        y = swapped(x, packed, bias=bias)
        may_go_on.set()
        np.testing.assert_allclose(packing.result(20), y, rtol=1e-4, atol=1e-5)


def test_a_thread_that_is_late_does_not_bring_the_library_back(
    swapped: SwappedKernel,
    tuned: Kernel,
    library: FallbackKernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It read what computes before the swap, and gets to the weights while another packs them."""
    packed = swapped.pack(_inputs()[1])
    swapped.settle(tuned)

    class OthersAreFaster:
        def acquire(self, *, blocking: bool) -> bool:
            packed._again = None
            return not blocking

        def release(self) -> None:
            """Let others go on."""

    packed.newest(tuned, is_last=False)
    monkeypatch.setattr(packed, "_lock", OthersAreFaster())

    assert packed.newest(library, is_last=False)[0] is tuned
    assert packed.newest(tuned, is_last=True)[0] is tuned


def test_a_child_that_is_forked_while_weights_are_packed_gets_the_kernel(
    swapped: SwappedKernel, tuned: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = swapped.pack(_inputs()[1])
    swapped.settle(tuned)
    children: list[int] = []

    def fork(*given: Any) -> object:  # noqa: ANN401 - handed on
        monkeypatch.undo()
        children.append(os.fork())
        if children == [0]:  # without the thread that packs
            os._exit(packed.newest(tuned, is_last=True)[0] is not tuned)
        return check_weights(*given)

    monkeypatch.setattr(PACKED_IN, fork)
    assert packed.newest(tuned, is_last=True)[0] is tuned

    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


def test_many_threads_get_right_results_through_a_swap(
    tuned: Kernel, library: FallbackKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [_inputs(number) for number in range(4)]
    expected = [_expected(*layer) for layer in layers]
    count = _counted_packs(monkeypatch)
    threads, rounds = 8, 30

    for _round in range(rounds):
        swapped = SwappedKernel(library, "")
        packed = [swapped.pack(w) for _x, w, _bias in layers]
        start = Barrier(threads + 1)

        def compute(thread: int) -> None:
            start.wait()  # noqa: B023 - each thread ends within its round
            for call in range(40):
                layer = (thread + call) % len(layers)
                x, _w, bias = layers[layer]
                y = swapped(x, packed[layer], bias=bias)  # noqa: B023
                np.testing.assert_allclose(y, expected[layer], rtol=1e-4, atol=1e-5)

        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(compute, thread) for thread in range(threads)]
            start.wait()
            swapped.settle(tuned)
            for each in running:
                each.result(60)
        for (x, _w, bias), one in zip(layers, packed, strict=True):
            swapped(x, one, bias=bias)

    assert count() == rounds * len(layers)


@pytest.mark.parametrize("which", ["another's", "a library's", "none"])
def test_weights_of_another_kernel_are_refused(
    swapped: SwappedKernel, library: FallbackKernel, which: str
) -> None:
    x, w, bias = _inputs()
    foreign: dict[str, Any] = {
        "another's": SwappedKernel(library, "").pack(w),
        "a library's": library.pack(w),
        "none": None,
    }

    with pytest.raises(InvalidArray, match="not packed by this kernel"):
        swapped(x, foreign[which], bias=bias)


def test_wrong_weights_are_refused_at_once(swapped: SwappedKernel) -> None:
    with pytest.raises(InvalidArray):
        swapped.pack(np.zeros((3, 3), np.float32))
    with pytest.raises(InvalidArray):
        swapped.pack("weights")


@pytest.mark.parametrize("twice", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(swapped: SwappedKernel, twice: Callable[[object], object]) -> None:
    with pytest.raises(InvalidSetting, match="cannot be copied or pickled"):
        twice(swapped)


@pytest.mark.parametrize("twice", [copy.deepcopy, pickle.dumps])
def test_its_weights_are_not_copied(
    swapped: SwappedKernel, twice: Callable[[object], object]
) -> None:
    with pytest.raises(InvalidSetting, match="pack the weights again"):
        twice(swapped.pack(_inputs()[1]))


def _counted_packs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return what tells how often weights were packed for a kernel."""
    packs: list[int] = []

    def count(*given: Any) -> object:  # noqa: ANN401 - handed on
        packs.append(1)
        return check_weights(*given)

    monkeypatch.setattr(PACKED_IN, count)
    return lambda: len(packs)
