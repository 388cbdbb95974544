"""Models of PyTorch whose layers are tuned and judged inside the model."""

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.main import run
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from served import PROBLEM, keep_trial  # noqa: E402
from torch_kernels import Kernels, kernel_of  # noqa: E402 - after PyTorch was found
from torch_samples import HIDDEN, K, N, check, operator_calls, sample_model, sample_x  # noqa: E402

from gemm_tuner.layers.sources import open_source  # noqa: E402
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer  # noqa: E402
from gemm_tuner.torch.calls import Call, Capturing  # noqa: E402
from gemm_tuner.torch.eager.tuned_linear import TunedLinear  # noqa: E402
from gemm_tuner.torch.model import tuning  # noqa: E402

ROWS = 6


class Planned:
    """In the place of a clock: a layer takes a second, with kernels what the plan says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, list[float]]) -> None:
        self.seconds = seconds
        monkeypatch.setattr(tuning, "_timed", self.timed)

    def timed(self, model: Any, kinds: Sequence[Any], calls: Sequence[Call], **_how: bool) -> Any:  # noqa: ANN401
        for call in calls:
            call.on(model)
        times = tuple(self._time(kind) for kind in kinds)
        return tuning._Pass(sum(times), times)

    def _time(self, kind: Any) -> float:  # noqa: ANN401
        if type(kind.layers[0].module) is not TunedLinear:
            return 1.0
        return float(self.seconds[kind.layers[0].name][kind.ways.index(kind.way)])


class Two(Kernels):
    """Two kernels for each layer; only `tuned` of them were tuned."""

    def choices(self, wanted: WantedLayer) -> list[FoundLayer]:
        problems = [
            Problem.create(rows, wanted.n, wanted.k, dtype=wanted.dtype, epilogue=wanted.epilogue)
            for rows in (ROWS, "1..64")
        ]
        return [
            FoundLayer(kernels=(kernel_of(one, wanted.threads),), reasons=()) for one in problems
        ]


def test_kernels_stay_where_they_gain_inside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    Planned(monkeypatch, {"0": [0.5], "2": [1.5]})
    model, x = sample_model(), sample_x()
    names = list(model.state_dict())
    with torch.no_grad():
        expected = model(x)

        gain = gt.tune_model(model, x, source=Kernels(), budget_s=0)

        check(model(x), expected)
    assert [type(model[0]), type(model[2])] == [TunedLinear, torch.nn.Linear]
    assert gain.speedup == pytest.approx(2 / 1.5)
    assert {one.names: (one.is_taken, one.plain_s, one.tuned_s) for one in gain.layers} == {
        ("0",): (True, 1.0, 0.5),
        ("2",): (False, 1.0, None),
    }
    assert "no kernel is faster than what PyTorch calls" in str(gain)
    assert "1.333 times as fast" in str(gain)
    assert list(model.state_dict()) == names
    gt.restore(model)
    assert not operator_calls(model, x)


def test_what_a_verdict_serves_is_taken_where_it_is_as_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Planned(monkeypatch, {"0": [0.6, 0.59], "2": [0.9, 0.6]})

    gain = gt.tune_model(sample_model(), sample_x(), source=Two(), budget_s=0)

    layers = {one.names[0]: one for one in gain.layers}
    assert (layers["0"].tuned_s, layers["0"].is_served) == (0.6, True)
    assert (layers["2"].tuned_s, layers["2"].is_served) == (0.6, False)
    assert "which replace takes" in layers["2"].reason


def test_the_best_of_several_kernels_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Planned(monkeypatch, {"0": [0.9, 0.6], "2": [0.6, 0.9]})
    model = sample_model()

    gain = gt.tune_model(model, sample_x(), source=Two(), budget_s=0)

    assert [one.tuned_s for one in gain.layers] == [0.6, 0.6]
    rows = {
        name: module._tuned.layer.kernels[0].kernel.problem.m.text
        for name, module in model.named_children()
        if type(module) is TunedLinear
    }
    assert rows == {"0": "1..64", "2": str(ROWS)}


def test_a_kernel_that_wins_once_and_not_again_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Planned(monkeypatch, {"0": [0.9], "2": [0.5]})
    choose = tuning._choose

    def choose_then_slow(model: Any, kinds: Any, calls: Any) -> None:  # noqa: ANN401
        choose(model, kinds, calls)
        plan.seconds["0"] = [1.1]

    monkeypatch.setattr(tuning, "_choose", choose_then_slow)
    model = sample_model()

    gain = gt.tune_model(model, sample_x(), source=Kernels(), budget_s=0)

    assert [type(model[0]), type(model[2])] == [torch.nn.Linear, TunedLinear]
    [left] = [one for one in gain.layers if not one.is_taken]
    assert (left.names, left.tuned_s) == (("0",), 1.1)
    assert "faster in 0 of 11 rounds" in left.reason
    assert gain.speedup == pytest.approx(2 / 1.5)


def test_a_model_that_is_not_faster_as_a_whole_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slower(_model: object, kinds: Sequence[Any], _calls: object, **_how: bool) -> Any:  # noqa: ANN401
        is_on = [type(one.layers[0].module) is TunedLinear for one in kinds]
        return tuning._Pass(11.0 if any(is_on) else 10.0, tuple(1.0 - 0.5 * on for on in is_on))

    monkeypatch.setattr(tuning, "_timed", slower)
    model = sample_model()

    gain = gt.tune_model(model, sample_x(), source=Kernels(), budget_s=0)

    assert (gain.speedup, gain.plain_s, gain.tuned_s) == (1.0, 10.0, 10.0)
    assert [one.reason for one in gain.layers] == ["the whole model is not faster."] * 2
    assert type(model[0]) is type(model[2]) is torch.nn.Linear


def test_the_time_goes_to_the_layers_that_take_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tuning(Kernels):
        def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:  # noqa: ARG002 - as in Source
            if wanted.n == N:
                raise StoreFailed("the disk is gone")
            tuned.append((wanted.n, budget_s))

        def choices(self, wanted: WantedLayer) -> list[FoundLayer]:
            none = FoundLayer(kernels=(), reasons=("never tuned.",))
            return [none] if wanted.n == N else super().choices(wanted)

    monkeypatch.setattr(
        tuning,
        "_timed",
        lambda _model, kinds, _calls, **_how: tuning._Pass(
            10.0, tuple({HIDDEN: 6.0, N: 3.9, K: 0.1}[one.wanted[0].n] for one in kinds)
        ),
    )
    tuned: list[tuple[int, float]] = []
    steps: list[tuple[str, float]] = []
    model = torch.nn.Sequential(
        torch.nn.Linear(K, HIDDEN), torch.nn.Linear(HIDDEN, N), torch.nn.Linear(N, K)
    )

    gain = gt.tune_model(
        model,
        sample_x(),
        source=Tuning(),
        budget_s=100,
        on_step=lambda *step: steps.append(step),
    )

    assert tuned == [(HIDDEN, 60.0)]
    assert [round(left) for _step, left in steps] == [100, 100, 40, 0]
    reasons = {one.names[0]: one.reason for one in gain.layers}
    assert reasons["1"] == "the disk is gone"
    assert not any(one.is_taken for one in gain.layers)


def test_layers_are_not_timed_with_more_threads_than_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.machine.cpus.usable_cpus", lambda: 1)
    monkeypatch.setattr("gemm_tuner.torch.eager.model_layers.torch.get_num_threads", lambda: 2)
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    open_database(url).dispose()

    gain = gt.tune_model(sample_model(), sample_x(), source=url, budget_s=60)

    assert not any(one.is_taken for one in gain.layers)
    assert all("2 threads cannot be timed here" in one.reason for one in gain.layers)


def test_a_model_that_fails_is_as_before() -> None:
    class Fails(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = torch.nn.Linear(K, N), 0

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            self.calls += 1
            if self.calls == 12:  # after kernels are in it
                raise ValueError(type(self.layer).__name__)
            return self.layer(x)

    model = Fails()
    with pytest.raises(ValueError, match=r"^(Tuned)?Linear$"):
        gt.tune_model(model, sample_x(), source=Kernels(), budget_s=0)

    assert type(model.layer) is torch.nn.Linear
    assert not model.layer._forward_hooks
    assert not model.layer._forward_pre_hooks


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"example_inputs": []}, "no example inputs"),
        ({"budget_s": -1}, "budget_s is -1"),
        ({"source": "kernels.txt"}, "is none that is known"),
    ],
)
def test_what_cannot_be_used_is_refused(arguments: dict[str, Any], told: str) -> None:
    given = {"example_inputs": sample_x(), "source": Kernels(), "budget_s": 0, **arguments}
    with pytest.raises(InvalidSetting, match=told):
        gt.tune_model(sample_model(), **given)


def test_calls_are_kept_as_they_were_made() -> None:
    class Cached(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(K, N)

        def forward(self, x: Any, *, cache: list[Any], scale: float = 1.0) -> Any:  # noqa: ANN401
            cache.append(x)
            return self.layer(x) * scale * len(cache)

    model, other = Cached(), torch.nn.Linear(K, N)
    x = sample_x().requires_grad_()
    with Capturing() as capturing:
        first, *_same = (model(x * 1, cache=[], scale=2.0) for _ in range(3))
        model(sample_x(1, K), cache=[x])
        other(sample_x())
        with pytest.raises(TypeError):
            model()
    model(x, cache=[])

    of_model, of_other = capturing.models.values()
    calls = list(of_model.calls.values())
    assert (of_model.module, of_other.module) == (model, other)
    assert ([one.count for one in calls], of_model.failed) == ([3, 1], 1)
    for _ in range(2):  # what a call changes is its own
        check(calls[0].copied().on(model), first)
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl


def test_compiled_models_and_what_cannot_be_copied_are_left_out() -> None:
    class Locked(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(K, N)

        def forward(self, x: Any, _lock: object = None) -> Any:  # noqa: ANN401 - a tensor
            return self.layer(x)

    model, x = Locked(), sample_x()
    compiled = torch.compile(sample_model(), backend="eager")
    with Capturing() as capturing, torch.no_grad():
        compiled(x)
        model(x, Lock())

    [of_model] = capturing.models.values()
    assert (of_model.module, of_model.calls, of_model.left_out) == (model, {}, 1)


@pytest.mark.parametrize(
    ("budget_s", "expected"),
    [(100, {HIDDEN: 90, N: 7}), (9, {HIDDEN: 8.1}), (3, {HIDDEN: 2.7}), (1, {}), (0, {})],
)
def test_a_short_budget_goes_to_the_longest_layers(
    budget_s: float, expected: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tuning(Kernels):
        def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:  # noqa: ARG002 - as in Source
            tuned[wanted.n] = budget_s

    monkeypatch.setattr(
        tuning,
        "_timed",
        lambda _model, kinds, _calls, **_how: tuning._Pass(
            100.0, tuple({HIDDEN: 90.0, N: 7.0, K: 3.0}[one.wanted[0].n] for one in kinds)
        ),
    )
    tuned: dict[int, float] = {}
    model = torch.nn.Sequential(
        torch.nn.Linear(K, HIDDEN), torch.nn.Linear(HIDDEN, N), torch.nn.Linear(N, K)
    )

    gt.tune_model(model, sample_x(), source=Tuning(), budget_s=budget_s)

    assert {n: own for n, own in tuned.items() if n != K} == pytest.approx(expected)


SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 3))
with torch.no_grad():
    for rows in map(int, sys.argv[1:]):
        model(torch.ones(rows, 64))
"""


def test_the_models_of_a_script_are_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, url = tmp_path / "script.py", f"sqlite:///{tmp_path}/store.sqlite3"
    script.write_text(SCRIPT)
    command = ["tune-model", str(script), "--db", url, "--budget", "7s"]

    assert run([*command, "--json", "--", "8", "8", "1"]) == 0

    printed, told = capsys.readouterr()
    [model] = json.loads(printed)["models"]
    layers = {tuple(one["names"]): one for one in model["layers"]}
    assert (model["model"], model["calls"]) == ("Sequential", 3)
    assert layers[("0",)]["problem"] == "f32 1,8x96x64 bias"
    assert 0 < layers[("2",)]["share"] < 1
    assert "tuning f32 1,8x96x64 bias" in told
    assert run([*command, "--budget", "500ms", "--", "8"]) == 0
    assert "Sequential, 1 call:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("import torch", 2, "no model with linear layers was called"),
        ("import torch\ntorch.nn.ReLU()(torch.ones(3))", 2, "no model with linear layers"),
        (f"{SCRIPT}\nraise ValueError('of mine')", 2, "failed at"),
        (None, 2, "is no file"),
    ],
)
def test_scripts_without_models_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, code: int, told: str
) -> None:
    script = tmp_path / "script.py"
    if text is not None:
        script.write_text(text)

    url = f"sqlite:///{tmp_path}/store.sqlite3"
    assert run(["tune-model", str(script), "--db", url]) == code

    assert told in capsys.readouterr().err


def test_what_was_not_faster_alone_is_timed_in_the_model(tmp_path: Path) -> None:
    """A database offers the next best kernels too, the fastest first."""
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    repository = Repository(open_database(url))
    source = open_source(url)
    wanted = WantedLayer(n=32, k=16, rows=(8,), dtype="f32", epilogue="bias+relu", threads=1)
    assert [one.kernels for one in source.choices(wanted)] == [()]

    kept = []
    for tile, speed in (("2x4", 0.5), ("2x2", 0.9)):
        candidate = Candidate.parse(f"scalar_f32_{tile} mc8_nc32_kc16 jc_ic_jr_ir")
        family = family_named(candidate.micro_kernel.family)
        code = render(PROBLEM, candidate, family)
        build = compile_kernel(code, isa=family.isa, toolchain=find_toolchain())
        keep_trial(repository, build, cpu=detect_cpu(), speed=speed, candidate=candidate)
        kept.append(build.artifact.sha256)

    kernels = [one.kernels for one in source.choices(wanted)]
    assert kernels[0] == ()
    assert [one.artifact.sha256 for [one] in kernels[1:]] == kept[::-1]
