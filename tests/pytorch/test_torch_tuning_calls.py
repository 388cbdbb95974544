"""How `tune-model` and `tune_model` repeat calls, and what they say of those that they cannot."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.cli import tune_model as command
from gemm_tuner.cli.arguments.script import run_script
from gemm_tuner.cli.main import INTERRUPTED, run
from gemm_tuner.errors import InvalidSetting

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import K, N, sample_model, sample_x  # noqa: E402

from gemm_tuner.layers.wanted import FoundLayer, WantedLayer  # noqa: E402
from gemm_tuner.torch.calls import Capturing, Mode, NotRepeated  # noqa: E402
from gemm_tuner.torch.eager.tuned_linear import TunedLinear  # noqa: E402
from gemm_tuner.torch.model import tuning  # noqa: E402

MODEL = """
import sys
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
x = torch.ones(8, 64)
with torch.no_grad():
    model(x)
"""


class Told(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Tells in which mode it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(K, N)
        self.modes: list[tuple[Mode, bool]] = []

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        self.modes.append((Mode.now(), torch.is_grad_enabled()))
        return self.layer(x)


def _run(folder: Path, text: str, *options: str) -> int:
    script = folder / "script.py"
    script.write_text(text)
    url = f"sqlite:///{folder}/store.sqlite3"
    return run(["tune-model", str(script), "--db", url, "--budget", "0", *options])


def test_a_call_that_fails_when_it_is_made_again_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"""{MODEL}
    try:
        model(torch.ones(8, 63))
    except RuntimeError:
        pass
    model.to(torch.bfloat16)(x.to(torch.bfloat16))
"""

    assert _run(tmp_path, text, "--json") == 0

    printed, told = capsys.readouterr()
    [model] = json.loads(printed)["models"]
    assert model["calls"] == 1
    assert {one["problem"].split()[0] for one in model["layers"]} == {"bf16"}
    assert "a call with 8x64 is left out, because it fails when it is made again: Runtime" in told
    assert "because they failed in the script: 1." in told


def test_a_model_of_which_no_call_can_be_repeated_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, f"{MODEL}model.to(torch.bfloat16)") == 2

    told = capsys.readouterr().err
    assert "no call of the models" in told
    assert "report it" not in told


def test_calls_are_repeated_in_the_mode_that_they_were_made_in() -> None:
    model, x = Told(), sample_x()
    with Capturing() as capturing:
        model(x)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        with torch.inference_mode():
            model(x)
    [captured] = capturing.models.values()
    made = [mode for mode, _has_gradients in model.modes]
    model.modes.clear()

    for call in captured.calls.values():
        call.copied().on(model)

    assert len(set(made)) == 3
    assert model.modes == [(mode, False) for mode in made]


def test_what_a_repeated_call_raises_names_the_call() -> None:
    model = Told()
    with Capturing() as capturing, torch.no_grad():
        model(sample_x())
    [captured] = capturing.models.values()
    [(key, call)] = captured.calls.items()
    model.to(torch.float64)

    with pytest.raises(NotRepeated, match="RuntimeError") as caught:
        call.copied().on(model)

    assert caught.value.key == key


def test_under_autocast_layers_are_left() -> None:
    model = sample_model()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        gain = gt.tune_model(model, sample_x(), source=Kernels(), budget_s=0)

    assert {one.is_taken for one in gain.layers} == {False}
    assert all("under autocast" in one.reason for one in gain.layers)


def test_kernels_that_no_verdict_serves_are_told_of() -> None:
    class OfTrials(Kernels):
        def choices(self, wanted: WantedLayer) -> list[FoundLayer]:
            return [FoundLayer(kernels=(), reasons=("never tuned.",)), *super().choices(wanted)]

    for source, is_served in ((OfTrials(), False), (Kernels(), True)):
        model = torch.nn.Linear(256, 512, bias=False)  # where kernels gain a lot, or not at all
        gain = gt.tune_model(model, torch.ones(8, 256), source=source, budget_s=0)
        for one in gain.layers:
            assert one.is_served == (is_served and one.is_taken)
            assert ("replace does not" in one.reason) == (one.is_taken and not is_served)


def test_a_layer_that_is_no_longer_called_is_left() -> None:
    class Fading(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = torch.nn.Linear(K, N), 0

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            self.calls += 1
            return self.layer(x) if self.calls < 9 else x

    gain = gt.tune_model(Fading(), sample_x(), source=Kernels(), budget_s=0)

    [layer] = gain.layers
    assert (layer.is_taken, layer.speedup) == (False, None)
    assert "0.0%" in str(gain)


def test_a_fast_path_stays_fast_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.Sequential(encoder, torch.nn.Linear(16, 8)).eval()
    fast = torch._transformer_encoder_layer_fwd
    calls = [0, 0]

    def count(*arguments: object) -> Any:  # noqa: ANN401 - a tensor
        calls[0] += 1
        return fast(*arguments)

    def count_all(_module: object, _inputs: object) -> None:
        calls[1] += 1

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", count)
    model.register_forward_pre_hook(count_all)

    gain = gt.tune_model(model, torch.ones(2, 4, 16), source=Kernels(), budget_s=0)

    assert calls[0] >= calls[1] - 1 > 0  # but the one that sees how many rows there are
    assert {one.plain_s for one in gain.layers if "0.linear1" in one.names} == {0.0}


def test_a_layer_inside_another_is_counted_once() -> None:
    class Outer(torch.nn.Linear):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__(K, K)
            self.inner = torch.nn.Linear(K, K)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            for _ in range(20):
                x = self.inner(x)
            return x

    gain = gt.tune_model(
        torch.nn.Sequential(Outer()), torch.ones(64, K), source=Kernels(), budget_s=0
    )

    shares = {one.names[0]: one.share for one in gain.layers}
    assert shares["0.inner"] == 0
    assert shares["0"] > 0


def test_models_that_are_compiled_in_place_are_not_seen() -> None:
    model = sample_model()
    model.compile(backend="eager")

    with Capturing() as capturing, torch.no_grad():
        model(sample_x())

    assert not capturing.models
    assert list(capturing.compiled) == ["Sequential"]


def test_what_is_not_kept_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"""{MODEL}
    for rows in range(9, 20):
        model(torch.ones(rows, 64))
    for _ in range(20):
        torch.nn.ReLU()(x)
    others = [torch.nn.Linear(64, 1) for _ in range(18)]
    for one in others:
        one(x)
    raise ValueError("enough")
"""
    script = tmp_path / "script.py"
    script.write_text(text)
    with Capturing() as capturing:
        run_script(script, [])

    command._tell_of_what_is_not_kept(capturing)

    told = capsys.readouterr().err
    assert "Left out: 3 more models that" in told
    assert "Sequential: calls that are left out, because they differ" in told
    assert "8 kinds that are kept: 4." in told


@pytest.mark.parametrize(
    "end",
    [
        "sys.stdout.close()",
        "sys.stderr.close()",
        "import io; sys.stdout = io.StringIO()",
        "import os; os.close(1)",
        "import os; os.chdir('/')",
    ],
)
def test_a_script_may_do_what_it_wants_with_its_output(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = sys.stdout, sys.stderr

    assert _run(tmp_path, f"{MODEL}\nprint('mine')\n{end}") == 0

    assert (sys.stdout, sys.stderr) == (out, err)
    assert Path.cwd() == tmp_path
    printed, told = capfd.readouterr()
    assert printed.startswith("mine\n")
    assert "Sequential, 1 call:" in printed
    assert "kernels inside the model" in told


def test_what_a_script_prints_is_not_in_the_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = MODEL.replace("torch.nn.ReLU()", "Loud()").replace(
        "torch.set_num_threads(1)",
        """
class Loud(torch.nn.Module):
    def forward(self, x):
        print("loud")
        return x
""",
    )

    assert _run(tmp_path, f"{text}\nimport os\nos.system('echo of a child')", "--json") == 0

    printed, told = capfd.readouterr()
    assert len(json.loads(printed)["models"]) == 1
    assert "loud" in told
    assert "of a child" in told


def test_ctrl_c_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_arguments: object, **_keywords: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_script", interrupt)

    assert _run(tmp_path, MODEL) == INTERRUPTED

    assert "Aborted; what was found before is kept." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (None, "of type NoneType"),
        ((one for one in [1]), "of type generator"),
        (((one for one in [1]),), "cannot be copied"),
    ],
)
def test_inputs_that_cannot_be_used_are_refused(inputs: object, told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        gt.tune_model(sample_model(), inputs, source=Kernels(), budget_s=0)


@pytest.mark.parametrize("budget_s", ["3", None, float("nan"), float("inf"), 1e9, True])
def test_budgets_that_are_no_seconds_are_refused(budget_s: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSetting, match="budget_s is"):
        gt.tune_model(sample_model(), sample_x(), source=Kernels(), budget_s=budget_s)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="of type builtin_function_or_method"):
        gt.tune_model(torch.relu, sample_x(), source=Kernels(), budget_s=0)


def test_inputs_with_a_gradient_are_taken() -> None:
    x = sample_x().requires_grad_() * 2

    assert gt.tune_model(sample_model(), x, source=Kernels(), budget_s=0).layers


def test_a_model_whose_calls_change_it_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.BatchNorm1d(N))

    with caplog.at_level(logging.WARNING, logger="gemm_tuner"):
        gt.tune_model(model, sample_x(), source=Kernels(), budget_s=0)

    assert "1 is in training mode" in caplog.text


def test_a_model_that_is_a_layer_keeps_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_calls = tuning.tune_calls

    def tuned(module: Any, calls: Any, **given: Any) -> Any:  # noqa: ANN401
        gain = tune_calls(module, calls, **{**given, "source": Kernels()})
        module.__class__ = TunedLinear
        return gain

    monkeypatch.setattr(tuning, "tune_calls", tuned)

    assert _run(tmp_path, "import torch\ntorch.nn.Linear(64, 4)(torch.ones(8, 64))") == 0

    assert capsys.readouterr().out.startswith("Linear, 1 call:")
