"""A layer for NumPy that finds its kernels, or has them tuned: what it computes and says."""

import copy
import gc
import os
import runpy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import ml_dtypes
import numpy as np
import pytest
from linear_parts import BIAS, OURS, Array, K, Kernels, M, N, W, compute, rows_of
from numpy.typing import DTypeLike
from served import Site
from shop import Shop, ends

from gemm_tuner import linear, quantise_activations, quantise_channels
from gemm_tuner.domain.step_table import STEP_KINDS
from gemm_tuner.errors import (
    InvalidArray,
    InvalidSetting,
    ServiceUnreachable,
    StoreFailed,
)
from gemm_tuner.layers.sources import Tune
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.urgency import NICENESS


def test_stored_kernels_compute_their_rows_and_a_library_the_others(site: Site) -> None:
    layer = linear(W, BIAS, "relu", source=site.settings.database_url)

    for count in (M, 0, 1, M + 1, 300, M):
        compute(layer, count)

    told = layer.explain().splitlines()
    assert told[0] == f"f32 *x{N}x{K} nk bias+relu"
    assert [line.split(":")[0].strip() for line in told[1:6]] == [
        *("m = 0", "m = 1", "m = 8", "m = 9", "m = 300")
    ]
    assert [OURS in line for line in told[1:6]] == [False, False, True, False, False]
    assert "tuned, measured on this CPU: 10.000 times the speed" in told[3]
    assert f"nothing was tuned for 'f32 1x{N}x{K} nk bias+relu'" in layer.explain()


def test_layers_keep_no_file_open(site: Site) -> None:
    url = site.settings.database_url
    compute(linear(W, BIAS, "relu", source=url), M)
    open_before = len([*Path("/proc/self/fd").iterdir()])

    layers = [linear(W, BIAS, "relu", source=url) for _layer in range(4)]
    for layer in layers:
        compute(layer, M)

    assert len([*Path("/proc/self/fd").iterdir()]) <= open_before


def test_without_a_source_the_own_database_is_asked() -> None:
    layer = linear(W, BIAS, "relu")

    compute(layer, 3)

    assert "nothing was tuned for 'f32 3x32x16" in layer.explain()
    assert repr(layer) == f"Linear('f32', n={N}, k={K}, 'bias+relu')"


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_weights_are_copied_from_any_strides(dtype: Any) -> None:  # noqa: ANN401 - of two types
    x = rows_of(3)
    expected = linear(W, BIAS, "relu", dtype=dtype)(x)

    for w in (np.asfortranarray(W), np.flip(np.flip(W).copy()), np.repeat(W, 2, axis=1)[:, ::2]):
        np.testing.assert_array_equal(linear(w, BIAS, "relu", dtype=dtype)(x), expected)


def test_a_service_is_asked(site: Site) -> None:
    with site.serving() as address:
        layer = linear(W, BIAS, "relu", source=address)
        compute(layer, M)
        compute(layer, 3)

    assert f"m = {M}: {OURS}" in layer.explain()
    with pytest.raises(InvalidArray, match="x has the shape"):
        layer(np.zeros((M, K + 1), np.float32))


@pytest.mark.parametrize("tune", ["wait", "background"])
def test_a_service_tunes_what_it_lacks(shop: Shop, tune: Tune) -> None:
    with shop.site.serving() as address, shop.working(shop.tune):
        layer = linear(W, BIAS, "relu", source=shop.client(address), tune=tune)
        compute(layer, M)
        assert ends(lambda: f"m = {M}: {OURS}" in layer.explain())
        compute(layer, M)


def test_waiting_tunes_only_what_is_lacking(kernels: Kernels) -> None:
    kernels.may_end.set()
    layer = linear(W, BIAS, "relu", source=kernels, tune="wait")

    for count in (M, M, 3):
        compute(layer, count)
    assert kernels.tuned == [(M,), (3,)]
    assert f"m = {M}: {OURS}" in layer.explain()
    assert kernels.niceness == os.getpriority(os.PRIO_PROCESS, 0)

    again = linear(W, BIAS, "relu", source=kernels, tune="wait")
    compute(again, M)
    assert kernels.tuned == [(M,), (3,)]


def test_what_computes_is_told_while_a_layer_is_tuned(kernels: Kernels) -> None:
    layer = linear(W, BIAS, "relu", source=kernels, tune="wait")
    with ThreadPoolExecutor() as threads:
        called = threads.submit(compute, layer, M)
        assert ends(lambda: bool(kernels.tuned))

        told = threads.submit(layer.explain).result(10)
        threads.submit(layer.refresh).result(10)
        kernels.may_end.set()
        called.result()

    assert told.endswith(f"m = {M} has none.")
    compute(layer, M)
    assert f"m = {M}: {OURS}" in layer.explain()


def test_in_the_background_a_library_computes_until_the_kernel_is_there(kernels: Kernels) -> None:
    w, bias = W.copy(), BIAS.copy()
    layer = linear(w, bias, "relu", source=kernels, tune="background")
    compute(layer, M)
    compute(layer, M)
    assert f"m = {M}: is being tuned" in layer.explain()
    assert OURS not in layer.explain()
    w[...] = np.nan  # packed or not, they were copied
    bias[...] = np.nan
    stop = threading.Event()

    def call(seed: int) -> int:
        calls = 0
        while not stop.is_set():
            compute(layer, M, seed)
            calls += 1
        return calls

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, seed) for seed in range(4)]
        kernels.may_end.set()
        came = ends(lambda: f"m = {M}: {OURS}" in layer.explain())
        stop.set()
        assert came
        assert all(one.result() for one in calls)
    assert kernels.tuned == [(M,)]
    assert kernels.niceness >= NICENESS  # the calls go first
    compute(layer, M)
    compute(layer, 5)


@pytest.mark.parametrize("tune", ["wait", "background"])
def test_what_is_not_tuned_is_told_and_computed(kernels: Kernels, tune: Tune) -> None:
    kernels.may_end.set()
    kernels.error = StoreFailed("the disk is full.")
    kernels.tuned = [()]  # so that `find` does not fail
    layer = linear(W, BIAS, "relu", source=kernels, tune=tune)
    compute(layer, M)
    assert ends(lambda: "without a kernel: the disk is full." in layer.explain())
    assert ends(lambda: "is being tuned" not in layer.explain())
    compute(layer, M)


def test_a_fault_in_the_background_is_told_and_the_next_is_tuned(
    kernels: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.error = ZeroDivisionError("a fault")
    kernels.tuned = [()]  # so that `find` does not fail
    layer = linear(W, BIAS, "relu", source=kernels, tune="background")
    compute(layer, 5)
    compute(layer, 6)
    kernels.may_end.set()

    assert ends(lambda: "m = 6 was not tuned: a fault" in layer.explain())
    assert "m = 5 was not tuned: a fault" in layer.explain()
    assert kernels.tuned == [(), (5,), (6,)]
    assert "Traceback" in caplog.text


def test_a_source_that_fails_is_asked_again_after_refresh(kernels: Kernels) -> None:
    kernels.error = ServiceUnreachable("the service is away.")
    kernels.is_tuned = True
    layer = linear(W, BIAS, "relu", source=kernels)
    compute(layer, M)
    assert "without a kernel: the service is away." in layer.explain()
    assert len(kernels.asked) == 1

    kernels.error = None
    compute(layer, M)
    assert OURS not in layer.explain()
    layer.refresh()
    compute(layer, M)

    assert f"m = {M}: {OURS}" in layer.explain()
    assert "away" not in layer.explain()


def test_what_is_tuned_when_a_layer_is_refreshed_is_tuned_once(kernels: Kernels) -> None:
    layer = linear(W, BIAS, "relu", source=kernels, tune="background")
    for _time in range(2):
        compute(layer, M)
        layer.refresh()
    kernels.may_end.set()

    assert ends(lambda: "is being tuned" not in layer.explain())
    assert layer.explain() == f"f32 *x{N}x{K} nk bias+relu"
    assert kernels.tuned == [(M,)]
    assert () not in [one.rows for one in kernels.asked]
    compute(layer, M)
    assert f"m = {M}: {OURS}" in layer.explain()


def test_only_the_first_sixteen_numbers_of_rows_are_asked_for(kernels: Kernels) -> None:
    kernels.is_tuned = True
    layer = linear(W, BIAS, "relu", source=kernels)

    for count in range(100, 130):
        compute(layer, count)
    assert len(kernels.asked) == 16
    assert kernels.asked[-1].rows == tuple(range(100, 116))


def test_given_rows_are_asked_for_at_once(kernels: Kernels) -> None:
    kernels.is_tuned = True
    layer = linear(W, BIAS, "relu", source=kernels, rows=[1, M, "17..64"], threads=2)

    for count in (M, 3, 20):
        compute(layer, count)
    assert [one.rows for one in kernels.asked] == [(1, M, "17..64")]
    assert kernels.asked[0].threads == 2
    assert f"m = {M}: {OURS}" in layer.explain()


@pytest.mark.parametrize("rows", [M, str(M), [np.int64(M)]])
def test_one_number_of_rows_may_stand_alone(rows: Any, kernels: Kernels) -> None:  # noqa: ANN401 - of several types
    kernels.is_tuned = True
    layer = linear(W, BIAS, "relu", source=kernels, rows=rows, tune="wait")

    compute(layer, M)

    assert not kernels.tuned
    assert f"m = {M}: {OURS}" in layer.explain()


def test_a_signal_handler_may_ask_while_the_source_is_asked(kernels: Kernels) -> None:
    told: list[str] = []

    class Asking(Kernels):
        def find(self, wanted: WantedLayer) -> FoundLayer:
            told.append(layer.explain())
            return super().find(wanted)

    layer = linear(W, BIAS, "relu", source=Asking(kernels.kernel))
    compute(layer, M)

    assert told[0] == f"f32 *x{N}x{K} nk bias+relu"


def test_what_was_interrupted_is_asked_for_again(kernels: Kernels) -> None:
    kernels.is_tuned = True
    kernels.error = KeyboardInterrupt()
    layer = linear(W, BIAS, "relu", source=kernels)
    with pytest.raises(KeyboardInterrupt):
        layer(rows_of(M))
    kernels.error = None

    compute(layer, M)

    assert f"m = {M}: {OURS}" in layer.explain()


def test_a_layer_that_is_gone_is_not_tuned_further(kernels: Kernels) -> None:
    layer = linear(W, BIAS, "relu", source=kernels, tune="background")
    for count in (5, 6, 7):
        layer(rows_of(count))
    gone = ref(layer)
    assert ends(lambda: kernels.tuned == [(5,)])
    del layer
    gc.collect()
    kernels.may_end.set()

    assert gone() is None
    assert ends(lambda: all(one.name != "gemm-tuner" for one in threading.enumerate()))
    assert kernels.tuned == [(5,)]


def test_a_forked_child_computes_and_asks_itself(kernels: Kernels) -> None:
    layer = linear(W, BIAS, "relu", source=kernels, tune="background")
    compute(layer, M)
    assert ends(lambda: bool(kernels.tuned))

    child = os.fork()  # while the thread of the parent tunes
    if child == 0:
        kernels.is_tuned = True
        try:
            compute(layer, M)
            is_right = f"m = {M}: {OURS}" in layer.explain()
        finally:
            os._exit(0 if is_right else 1)
    kernels.may_end.set()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
def test_halves_are_computed_in_their_type(dtype: DTypeLike) -> None:
    w, x = W.astype(dtype), rows_of(5).astype(dtype)
    for bias in (BIAS, BIAS.astype(dtype), BIAS.astype(np.float64)):
        y = linear(w, bias)(x)

        exact = x.astype(np.float64) @ w.T.astype(np.float64) + bias.astype(dtype)
        assert y.dtype == dtype
        np.testing.assert_allclose(y.astype(np.float64), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_int8_rounds_x_by_row_and_w_by_channel(dtype: DTypeLike) -> None:
    layer = linear(W.astype(dtype), BIAS, "gelu_erf", dtype="int8")
    plain = linear(W, BIAS, "gelu_erf")
    channels = quantise_channels(W.astype(dtype))
    exact_w = channels.w.astype(np.float64) * channels.channel_scale[:, np.newaxis]

    for count in (0, 1, 5, 5, 64):
        x = rows_of(count).astype(dtype)
        made = quantise_activations(x)
        exact_x = made.scale[:, np.newaxis] * (
            made.x.astype(np.float64) - made.zero_point[:, np.newaxis]
        )
        y = layer(x)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, gelu(exact_x @ exact_w.T + BIAS), rtol=1e-4, atol=1e-4)
        # What docs/calling.md says of the error: for numbers like these, 2 % of the greatest.
        in_floats = plain(x.astype(np.float32))
        assert np.abs(y - in_floats).max(initial=0) <= 0.02 * np.abs(in_floats).max(initial=1)


def gelu(value: Array) -> Array:
    return np.asarray(STEP_KINDS["gelu_erf"].reference(np, value, None))


def test_a_row_of_nan_is_nan_in_int8_and_the_others_are_right() -> None:
    layer = linear(W, BIAS, dtype="int8")
    x = rows_of(4).copy()
    right = layer(x)
    x[2, 5] = np.nan

    y = layer(x)

    assert np.isnan(y[2]).all()
    for row in (0, 1, 3):
        np.testing.assert_array_equal(y[row], right[row])


def test_threads_share_a_layer_in_int8() -> None:
    layer = linear(W, BIAS, dtype="int8")
    x = [rows_of(3 + seed % 3, seed) for seed in range(8)]
    right = [layer(one) for one in x]

    def repeat(place: int) -> bool:
        return all(np.array_equal(layer(x[place]), right[place]) for _time in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(repeat, range(8)))


def test_a_call_inside_a_call_of_the_same_thread_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = linear(W, BIAS, dtype="int8")
    right = layer(rows_of(3))
    compute = FallbackKernel.__call__

    with monkeypatch.context() as once:

        def disturbed(*arguments: Any, **others: Any) -> Any:  # noqa: ANN401 - as what it calls
            once.undo()
            layer(rows_of(3, seed=2))  # as a signal handler may
            return compute(*arguments, **others)

        once.setattr(FallbackKernel, "__call__", disturbed)
        np.testing.assert_array_equal(layer(rows_of(3)), right)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_layer_that_multiplies_nothing_computes_its_bias(shape: tuple[int, int]) -> None:
    n, k = shape
    bias = BIAS[:n]

    y = linear(np.zeros(shape, np.float32), bias, "relu")(np.zeros((3, k), np.float32))

    np.testing.assert_array_equal(y, np.broadcast_to(np.maximum(bias, 0), (3, n)))


def test_a_layer_is_not_copied() -> None:
    with pytest.raises(InvalidSetting, match="cannot be copied or pickled"):
        copy.deepcopy(linear(W))


def test_the_example_says_what_computes_and_how_exactly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples" / "numpy_linear.py"
    monkeypatch.setattr(sys, "argv", [str(example), "never"])

    runpy.run_path(str(example), run_name="__main__")

    printed = capsys.readouterr().out
    errors = [float(line.split()[6].rstrip("%")) for line in printed.splitlines()[:2]]
    assert max(errors) < 4
    for problem in ("f32 *x256x64 nk bias+gelu_erf", "channel_scale+bias+gelu_erf"):
        assert problem in printed
    assert printed.count("m = 32: ") == 4


@pytest.mark.proof
def test_a_layer_tunes_itself_and_finds_it_again() -> None:
    layer = linear(W, BIAS, "relu", tune="wait", budget_s=0.5)
    compute(layer, M)
    assert "nothing was tuned" not in layer.explain()

    again = linear(W, BIAS, "relu")
    compute(again, M)
    assert again.explain() == layer.explain()


@pytest.mark.proof
def test_rows_of_a_fixed_order_have_the_same_bits_by_kernel_and_library() -> None:
    layer = linear(
        W, BIAS, "gelu_erf", reduction="fixed", tune="wait", budget_s=0.5, rows=["2..4", 8]
    )
    x = rows_of(8)

    y = layer(x)

    for count in (1, 2, 3, 5, 8):
        for first in range(0, 9 - count, count):
            np.testing.assert_array_equal(layer(x[first : first + count]), y[first : first + count])
    told = layer.explain()
    assert told.startswith(f"f32 *x{N}x{K} nk bias+gelu_erf fixed")
    assert "promises no order of additions" in told.partition("m = 8: gemm-tuner")[2]
