"""`gemm-tuner bench-models` with models of PyTorch, in processes of their own."""

import json
import signal
import subprocess
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.cli.main import run
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.models.messages import ORDER, Order, Ready
from gemm_tuner.models.process import CHILD, WayProcess
from gemm_tuner.models.quantising import with_weights_of_4_bits
from gemm_tuner.models.row import Built, Prepared, Work
from gemm_tuner.models.shares import time_shares
from gemm_tuner.models.table import MODELS, PRECISIONS, WAYS

pytestmark = [
    pytest.mark.proof,
    # To import it takes each process that collects tests over a second.
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
ours: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found

SMALL = Order(
    model="dlrm",
    way="eager",
    dtype="f32",
    threads=1,
    batch=1,
    is_small=True,
    db="",
    budget_s=0,
)


def test_a_small_model_is_tuned_and_timed_in_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    ways = ["--ways", "eager,replace", "--budget", "500ms", "--rounds", "2", "--small"]
    places = [
        "--db",
        f"sqlite:///{tmp_path}/store.sqlite3",
        "--out",
        str(tmp_path / "results.json"),
    ]

    assert run(["bench-models", "dlrm", *ways, *places, "--json"]) == 0

    printed = capsys.readouterr()
    [facts] = json.loads(printed.out)["models"]
    eager, ours = facts["ways"]
    assert [eager["reason"], ours["reason"]] == [None, None]
    assert "were not all tuned" not in printed.err
    assert eager["error"] == 0.0
    assert ours["error"] < 1e-4
    assert ours["taken"] + ours["left"] == 3
    assert 0.0 < eager["share_left"] < 1.0
    assert eager["share_taken"] == 0.0
    # Beside other work, a call of so few layers may be shorter than what the profiler adds up.
    assert (facts["why_no_limit"] is None) is (facts["share_of_limit"] is not None)
    assert facts["share_of_limit"] is None or facts["share_of_limit"] > 0.0
    # What is there is not measured again.
    assert run(["bench-models", "dlrm", *ways, *places, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == [facts]


def test_the_time_of_a_kernel_is_that_of_a_layer_that_was_taken() -> None:
    # A call of milliseconds, beside which what the profiler takes is nothing.
    x, model = torch.randn(512, 512), torch.nn.Sequential(torch.nn.Linear(512, 1024))
    ours.replace(model, x, source=Kernels())
    with torch.no_grad():
        shares = time_shares(lambda: model(x))
    assert shares.left == 0
    assert 0.5 < shares.taken < 1


def test_the_process_of_a_way_ends_with_the_one_that_measures() -> None:
    # Making its weights takes seconds.
    order = replace(SMALL, model="bert-large", is_small=False)
    with subprocess.Popen(CHILD, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        process.stdin.write(ORDER.dump_json(order) + b"\n")
        process.stdin.close()

        assert process.wait(timeout=100) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # that is how it converts
def test_openvino_compiles_for_the_shapes_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    from gemm_tuner.models.child import prepare  # noqa: PLC0415 - as a process of a way does

    compiled = []

    def compile_model(model: Any, *options: Any) -> Any:  # noqa: ANN401 - of OpenVINO
        compiled.append(model)
        return openvino.Core().compile_model(model, *options)

    monkeypatch.setattr(openvino, "compile_model", compile_model)
    order = replace(SMALL, way="openvino")
    with torch.no_grad():
        _prepared, ready = prepare(order)

    assert ready.error < 1e-4
    assert [one.is_dynamic() for one in compiled] == [False]


@pytest.mark.parametrize("way", ["openvino", "onnxruntime"])
def test_a_package_tells_nobody_of_its_use(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(way, reason=f"{way} is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody is there
    order = replace(SMALL, way=way)

    with WayProcess(order, deadline_s=100) as process:
        process.answer(Ready)

    # Each would keep a number there, by which it knows this user again.
    assert not list(tmp_path.glob("intel/*"))
    assert not list(tmp_path.glob(".cache/Microsoft/**/*"))


@pytest.mark.parametrize("model", MODELS)
def test_each_small_model_computes_the_same_twice(model: str) -> None:
    from gemm_tuner.models.child import prepare  # noqa: PLC0415 - as a process of a way does

    order = replace(SMALL, model=model, batch=2)
    with torch.no_grad():
        prepared, ready = prepare(order)

    assert ready.error == 0.0
    assert prepared.plain is not None
    assert all(len(one) % 2 == 0 for one in prepared.outputs(prepared.call()))  # of both in a batch


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torchao
def test_a_model_without_layers_of_4_bits_is_none() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    layers = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.Linear(24, 16))

    with pytest.raises(InvalidSetting, match="no linear layer"):
        with_weights_of_4_bits(Built(module=layers, inputs={}))
    mixed = torch.nn.Sequential(*layers, torch.nn.Linear(96, 48), torch.nn.Linear(512, 16))
    with_weights_of_4_bits(Built(module=mixed, inputs={}))

    is_plain = [type(one.weight) is torch.nn.Parameter for one in mixed]
    assert is_plain == [True, True, False, False]
    assert [one.weight.block_size for one in mixed[2:]] == [[1, 32], [1, 128]]
    layouts = [PRECISIONS["bf16_u4"].w_layout(*one.weight.shape) for one in mixed]
    assert layouts == [None, None, "nk:g32", "nk:g128"]


def test_a_product_with_weights_of_integers_alone_counts_as_a_layer() -> None:
    x, w = torch.randn(64, 512).bfloat16(), torch.ones(512, 512, dtype=torch.int8)
    ops, scales, groups = torch.ops.aten, torch.ones(512).bfloat16(), torch.ones(4, 512, 2)
    packed = ops._convert_weight_to_int4pack_for_cpu(w.int(), 1)
    with torch.no_grad():
        for call in (
            lambda: ops._weight_int8pack_mm(x, w, scales),
            lambda: ops._weight_int4pack_mm_for_cpu(x, packed, 128, groups.bfloat16()),
        ):
            assert time_shares(call).left > 0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torchao
@pytest.mark.parametrize("dtype", ["int8", "bf16_s8", "bf16_u4"])
def test_openvino_multiplies_what_was_quantised(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    pytest.importorskip("torchao", reason="torchao is not installed")
    from gemm_tuner.models.child import prepare  # noqa: PLC0415 - as a process of a way does

    compiled = []

    def compile_model(*given: Any) -> Any:  # noqa: ANN401 - of OpenVINO
        compiled.append(openvino.Core().compile_model(*given))
        return compiled[0]

    monkeypatch.setattr(openvino, "compile_model", compile_model)
    order = replace(SMALL, model="mixer", way="openvino", dtype=dtype)
    with torch.no_grad():
        _prepared, ready = prepare(order)

    assert ready.wrong == ""
    assert ready.agreement > (0.7 if dtype == "bf16_u4" else 0.9)
    ran = [one.get_rt_info() for one in compiled[0].get_runtime_model().get_ops()]
    w_type = "u4" if dtype == "bf16_u4" else "i8"
    weights = [one for one in ran if one["outputPrecisions"].value == w_type]
    products = [one for one in ran if one["layerType"].value == "FullyConnected"]
    assert len(products) == 4
    # Those of 4 bits have zero points; of the small Mixer, half have sizes that PyTorch packs.
    assert len(weights) == 4
    built = MODELS["mixer"].build(1, is_small=True)
    sizes = [one.weight.shape for one in built.module.modules() if isinstance(one, torch.nn.Linear)]
    packed = [one for one in sizes if PRECISIONS["bf16_u4"].w_layout(*one)]
    assert (len(sizes), len(packed)) == (4, 2)
    assert all((one["runtimePrecision"].value == "u8") is (dtype == "int8") for one in products)


def _flipped(layer: str, work: Work) -> Prepared:
    """Run a model as it is, but for one layer, whose outputs are in another order."""
    built = work.plain()
    weight = built.module.get_submodule(layer).weight
    weight.data = weight.data.flip(0).contiguous()
    return WAYS["eager"].prepare(replace(work, built=work.precision.convert(built)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torchao
@pytest.mark.parametrize(
    "layer", ["", "attention.self.value", "attention.output.dense", "intermediate.dense"]
)
@pytest.mark.parametrize("dtype", ["bf16", "int8", "bf16_s8", "bf16_u4"])
def test_one_wrong_small_layer_is_seen(
    dtype: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if PRECISIONS[dtype].needs:
        pytest.importorskip(PRECISIONS[dtype].needs)
    from gemm_tuner.models.child import prepare  # noqa: PLC0415 - as a process of a way does

    if layer:
        flipped = partial(_flipped, f"model.encoder.layer.0.{layer}")
        way = replace(WAYS["eager"], name="flipped", prepare=flipped)
        monkeypatch.setitem(WAYS, "flipped", way)
    order = replace(SMALL, model="bert-base", way="flipped" if layer else "eager", dtype=dtype)
    with torch.no_grad():
        _prepared, ready = prepare(order)

    assert ready.error < 0.05  # of the largest element: a fixed tolerance sees nothing
    assert ("of the norm" in ready.wrong) is bool(layer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own freezing
def test_kernels_are_called_without_python_between() -> None:
    torch.manual_seed(1)
    source: Any = Kernels()  # in the place of the URL of a database
    built = MODELS["dlrm"].build(1, is_small=True)
    with torch.no_grad():
        expected = built.call()
        work = Work(
            built=built,
            plain=lambda: built,
            precision=PRECISIONS["f32"],
            threads=1,
            db=source,
            budget_s=0,
        )
        prepared = WAYS["enable-cpp-wrapper"].prepare(work)
        outputs = prepared.outputs(prepared.call())
        with torch.profiler.profile() as profile:
            prepared.call()
        names = [one.name for one in profile.events()]

    assert prepared.report is not None
    assert len(prepared.report().taken) == 3
    assert len([one for one in names if one.startswith("gemm-tuner ")]) == 3
    assert not [one for one in names if one.startswith("gemm_tuner::")]  # of the dispatcher
    for y, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    ours.disable()
