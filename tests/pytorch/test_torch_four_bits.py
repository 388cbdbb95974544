"""Weights of 4 bits, as torchao makes them: kernels read the elements that PyTorch has packed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Inductor's own path
]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torchao", reason="torchao is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import check, sample_x  # noqa: E402

from gemm_tuner.errors import InvalidSetting  # noqa: E402
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer  # noqa: E402
from gemm_tuner.torch.inductor import four_bits  # noqa: E402

# Columns in whole panels of PyTorch's format, beside a rest, and in a rest alone.
N, N_REST, N_FEW = 128, 80, 48
K = 64
EPILOGUES = ["bias+relu", "bias+add", "silu", "none", "bias"]


class Layers(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(K, N)
        self.same = torch.nn.Linear(N, N)
        self.gate = torch.nn.Linear(N, N_REST, bias=False)
        self.last = torch.nn.Linear(N_REST + N_FEW, N_FEW)
        self.short = torch.nn.Linear(N, N_FEW, bias=False)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - of PyTorch
        y = torch.relu(self.up(x))
        y = y + self.same(y)
        return self.last(torch.cat([torch.nn.functional.silu(self.gate(y)), self.short(y)], -1))


def four_bit_model(dtype: str, group: int = 32) -> Any:  # noqa: ANN401 - a module
    from torchao.prototype.quantization.int4 import (  # noqa: PLC0415 - it warns
        PrototypeInt4WeightOnlyConfig,
    )
    from torchao.quantization import quantize_  # noqa: PLC0415

    model = Layers().eval().to(getattr(torch, dtype))
    config = PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
    quantize_(model, config)
    return model


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_4_bits_are_packed_with_their_groups(dtype: str) -> None:
    model, x, source = four_bit_model(dtype), sample_x(2, 3, K, dtype=dtype), Kernels()
    with torch.no_grad():
        expected = model(x)
        enabled = gt.enable(source)
        compiled = torch.compile(model)
        y, [code] = torch._inductor.utils.run_and_get_code(compiled, x)
        found = gt.debug(compiled, x, folder=None)
    check(y, expected)
    assert code.count("torch.ops.gemm_tuner.linear.default(") == 5
    assert "int4" not in code
    assert found.wrong is None
    assert len(found.layers) == 5
    short = "f32" if dtype == "float32" else "bf16"
    assert [f"{one.dtype} {one.w_layout} {one.epilogue}" for one in source.asked] == [
        f"{short}_u4_f32_{short} nk:g32 {one}" for one in EPILOGUES
    ]
    assert all(one.is_taken for one in enabled.report)
    assert {one.name for one in enabled.report} == {"up", "same", "gate", "short", "last"}


@pytest.mark.usefixtures("loops_by_operators")
def test_rows_that_no_kernel_is_for_read_plain_weights() -> None:
    model = four_bit_model("float32", group=64)
    model.last = torch.nn.Identity()
    with torch.no_grad():
        enabled = gt.enable(Kernels(), dynamic_rows=["2..8"])
        compiled = torch.compile(model, dynamic=True)
        for rows in (6, 3, 40):
            x = sample_x(rows, K)
            check(compiled(x), model(x))
    assert [one.is_taken for one in enabled.report] == [True] * 4


@pytest.mark.usefixtures("loops_by_operators")
def test_kernels_that_read_no_floats_for_zero_points_are_left() -> None:
    model, x = four_bit_model("bfloat16"), sample_x(2, K, dtype="bfloat16")

    class Earlier(Kernels):
        def find(self, wanted: WantedLayer) -> FoundLayer:
            found = super().find(wanted)
            for one in found.kernels:
                one.takes_float_zero_points = False
            return found

    with torch.no_grad():
        expected = model(x)
        try:
            enabled = gt.enable(source := Earlier())
            y = torch.compile(model)(x)
        finally:
            for wanted in tuple(source.asked):
                for one in Kernels.find(source, wanted).kernels:
                    one.takes_float_zero_points = True
    assert torch.equal(y, expected)
    assert not any(one.is_taken for one in enabled.report)
    assert "zero points of floats" in enabled.report[0].reason


@pytest.mark.usefixtures("loops_by_operators")
def test_rows_of_three_dimensions_may_be_dynamic() -> None:
    model, source = four_bit_model("float32"), Kernels()
    enabled = gt.enable(source, dynamic_rows=["1..64"])
    with torch.no_grad():
        compiled = torch.compile(model, dynamic=True)
        for tokens in (4, 7):
            x = sample_x(2, tokens, K)
            check(compiled(x), model(x))
    assert [one.epilogue for one in source.asked] == EPILOGUES
    assert [one.is_taken for one in enabled.report] == [True] * 5


@pytest.mark.usefixtures("loops_by_operators")
def test_a_damaged_group_is_refused(tmp_path: Path) -> None:
    model, x = four_bit_model("float32"), sample_x(2, K)
    enabled = gt.enable(Kernels())
    with torch.no_grad():
        torch.compile(model)(x)
    enabled.write_kernels(tmp_path)
    layers = tmp_path / "layers.txt"
    text = layers.read_text()
    gt.load_kernels(tmp_path)
    assert " 32 10 0 " in text  # the group, the type, how w comes to a kernel
    for damaged in (" 64 10 0 ", " 0 10 0 ", " 32 8 0 ", " -32 10 0 ", " 1000 10 0 "):
        layers.write_text(text.replace(" 32 10 0 ", damaged, 1))
        with pytest.raises(InvalidSetting, match=r"not of the layer|not what this version"):
            gt.load_kernels(tmp_path)


class Given(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Multiplies by packed weights with these groups, or by those of a call."""

    def __init__(self, groups: Any, *, is_known: bool = True) -> None:  # noqa: ANN401 - a tensor
        super().__init__()
        elements = torch.randint(16, (N, K), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(elements, 1)
        self.groups, self.packed = (
            torch.nn.Parameter(one, requires_grad=False) for one in (groups, packed)
        )
        self.is_known = is_known

    def forward(self, x: Any, given: Any) -> Any:  # noqa: ANN401 - of PyTorch
        groups = self.groups if self.is_known else given
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, 32, groups)


@pytest.mark.usefixtures("loops_by_operators")
def test_groups_of_one_number_and_of_negative_scales() -> None:
    groups = torch.rand(K // 32, N, 2)
    groups[0, ::2, 0] = 0.0
    groups[1, ::3, 0] = -0.25
    groups[1, ::5] = 0.0
    groups[0, 1], groups[1, 1] = torch.tensor([1e-40, 1.0]), torch.tensor([1e-30, 1e8])
    groups[0, 3], groups[1, 3] = torch.tensor([0.0, 3e8]), torch.tensor([-1e-40, -1.0])
    model, x = Given(groups), sample_x(3, K)
    enabled = gt.enable(Kernels())
    with torch.no_grad():
        check(torch.compile(model)(x, groups), model(x, groups))
    assert [one.is_taken for one in enabled.report] == [True]


@pytest.mark.usefixtures("loops_by_operators")
def test_types_and_shapes_that_no_kernel_is_for_are_left() -> None:
    enabled = gt.enable(Kernels())
    for dtype, is_known in ((torch.float16, True), (torch.float32, False)):
        groups = torch.rand(K // 32, N, 2, dtype=dtype)
        model, x = Given(groups, is_known=is_known), torch.randn(3, K, dtype=dtype)
        with torch.no_grad():
            check(torch.compile(model)(x, groups), model(x, groups))
    assert len(enabled.report) == 0


CHECKED = """
import torch
from gemm_tuner.torch.inductor import four_bits
assert four_bits.can_be_read()
pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
for n, k in ((16, 32), (32, 64), (48, 32), (64, 2), (80, 96), (192, 32), (240, 128)):
    elements = torch.randint(16, (n, k), dtype=torch.int32)
    found = torch.ops.gemm_tuner.elements_of_int4(pack(elements, 1), n, k)
    assert torch.equal(found & 15, elements[:, ::2].to(torch.uint8)), (n, k)
    assert torch.equal(found >> 4, elements[:, 1::2].to(torch.uint8)), (n, k)
"""


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_elements_are_found_in_the_order_of_each_cpu(capability: str) -> None:
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", CHECKED], check=True, timeout=120, env=environment)


def test_an_operator_of_elements_is_one_of_pytorch() -> None:
    packed = torch.randint(256, (N_REST, K // 2), dtype=torch.uint8)
    assert four_bits.can_be_read()
    torch.library.opcheck(torch.ops.gemm_tuner.elements_of_int4.default, (packed, N_REST, K))
