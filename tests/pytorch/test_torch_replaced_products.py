"""Products of two activations and attention in eager mode; skipped without PyTorch."""

import copy
import inspect
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap, in PyTorch
]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import (  # noqa: E402
    ATTENTION,
    HEADS,
    MATMUL,
    MODULE,
    K,
    N,
    check,
    heads_of,
    operator_calls,
    sample_x,
)

from gemm_tuner.errors import InvalidSetting  # noqa: E402
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer, WantedProduct  # noqa: E402
from gemm_tuner.torch.calls import Call  # noqa: E402
from gemm_tuner.torch.model import tuning  # noqa: E402

WIDTH = HEADS * K
attend = torch.nn.functional.scaled_dot_product_attention


def by_hand(q: Any, k: Any, v: Any, mask: Any = None) -> Any:  # noqa: ANN401 - tensors
    scores = torch.matmul(q, k.transpose(2, 3)) * K**-0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ v


class Attending(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Projects x, and attends by a function."""

    def __init__(self, compute: Any = attend) -> None:  # noqa: ANN401 - a function
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.compute = compute

    def forward(self, x: Any, **how: Any) -> Any:  # noqa: ANN401 - tensors
        batch, rows, _width = x.shape
        q, k, v = self.qkv(x).view(batch, rows, 3, HEADS, K).permute(2, 0, 3, 1, 4)
        return self.compute(q, k, v, **how).transpose(1, 2).reshape(batch, rows, WIDTH)


class Products(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Computes of its inputs what a function does."""

    def __init__(self, compute: Any) -> None:  # noqa: ANN401 - a function
        super().__init__()
        self.compute = compute

    def forward(self, *given: Any, **how: Any) -> Any:  # noqa: ANN401 - tensors
        return self.compute(*given, **how)


def _no_layers(wanted: WantedLayer) -> bool:
    return not isinstance(wanted, WantedProduct)


SOURCE = Kernels(lack=_no_layers)
WAYS = {"attention": (attend, {ATTENTION: 1}), "products": (by_hand, {MATMUL: 2})}


def kernel_calls(model: Any, *inputs: Any, **how: Any) -> dict[str, int]:  # noqa: ANN401
    """Return how often operators of products and attention are called in kernels."""
    calls = operator_calls(lambda: model(*inputs, **how))
    return {name: count for name, count in calls.items() if name in (ATTENTION, MATMUL)}


@pytest.mark.parametrize("name", WAYS)
def test_modules_call_kernels_for_what_they_multiply(name: str) -> None:
    compute, expected_calls = WAYS[name]
    model, x = Attending(compute).eval(), sample_x(2, N, WIDTH)
    names = list(model.state_dict())
    with torch.no_grad():
        expected = model(x)

        report = gt.replace(model, x, source=SOURCE)

        for one in (model, copy.deepcopy(model)):
            check(one(x), expected)
            assert kernel_calls(one, x) == expected_calls
        assert len(report.taken) == sum(expected_calls.values())
        assert list(model.state_dict()) == names
        gt.restore(model)
        assert not kernel_calls(model, x)
        assert "forward" not in vars(model)


def test_the_report_names_the_operation_and_the_number_of_products() -> None:
    report = gt.replace(Attending(), sample_x(2, N, WIDTH), source=SOURCE)
    assert [one.problem for one in report.taken] == [
        f"{2 * HEADS} of attention f32 {N}x{N}x{K} scale"
    ]


def test_layers_inside_such_a_module_are_taken_too() -> None:
    model, x = Attending().eval(), sample_x(2, N, WIDTH)
    gt.replace(model, x, source=Kernels())
    calls = operator_calls(model, x)
    assert (calls[MODULE], calls[ATTENTION]) == (1, 1)


def test_without_a_kernel_a_module_stays_as_it_is() -> None:
    model = Attending()
    report = gt.replace(model, sample_x(2, N, WIDTH), source=Kernels(lack=lambda _wanted: True))
    assert not report.taken
    assert "forward" not in vars(model)


ROWS = 6
SEEN = torch.rand(ROWS, N) > 0.3
# What is computed of queries, keys and values; and how it is called.
TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "a scale": {"scale": 2.0},
    "a mask of floats": {"attn_mask": torch.randn(ROWS, N)},
    "a mask for all rows": {"attn_mask": torch.randn(1, 1, 1, N)},
    "a mask of each head": {"attn_mask": torch.randn(1, HEADS, ROWS, N)},
    "a mask of each head for all of the batch": {"attn_mask": torch.randn(HEADS, ROWS, N)},
    "a mask of booleans": {"attn_mask": SEEN},
    "a mask of booleans of each batch": {"attn_mask": SEEN.expand(2, 1, ROWS, N)},
}


class Scaled(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Computes products of its inputs, times a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, w) * self.factor


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_a_copy_computes_with_its_own_attributes(again: Any) -> None:  # noqa: ANN401
    model, arrays = Scaled(), (heads_of(ROWS), heads_of(N).mT)
    gt.replace(model, arrays, source=SOURCE)
    copied = again(model)
    copied.factor = 2.0
    with torch.no_grad():
        check(copied(*arrays), 2 * torch.matmul(*arrays))
        check(model(*arrays), torch.matmul(*arrays))
        assert kernel_calls(copied, *arrays) == {MATMUL: 1}
        gt.restore(model)
        assert kernel_calls(copied, *arrays) == {MATMUL: 1}
        assert not kernel_calls(copy.copy(model), *arrays)


@pytest.mark.parametrize(
    ("model", "given", "source", "name"),
    [
        (Scaled(), (heads_of(ROWS), heads_of(N).mT), SOURCE, "Scaled, which"),
        (torch.nn.Linear(K, N), sample_x(), Kernels(), "TunedLinear"),
    ],
    ids=["products", "layer"],
)
def test_a_model_with_kernels_is_not_scripted(
    model: Any,  # noqa: ANN401 - a module
    given: Any,  # noqa: ANN401 - tensors
    source: Kernels,
    name: str,
) -> None:
    gt.replace(model, given, source=source)
    with pytest.raises(InvalidSetting, match=f"cannot compile {name}.*gemm_tuner.torch.restore"):
        torch.jit.script(model)
    gt.restore(model)
    assert hasattr(torch.jit.script(model), "forward")


def test_a_mask_of_one_dimension_is_refused_as_by_pytorch() -> None:
    arrays, mask = (heads_of(ROWS), heads_of(N), heads_of(N)), torch.randn(N)
    model = Products(attend)
    gt.replace(model, _with_mask(arrays, {"attn_mask": mask.expand(ROWS, N)}), source=SOURCE)
    with torch.no_grad():
        with pytest.raises((IndexError, RuntimeError)) as refused:
            attend(*arrays, attn_mask=mask)
        with pytest.raises(refused.type) as ours:
            model(*arrays, attn_mask=mask)
    assert str(ours.value) == str(refused.value)


@pytest.mark.parametrize("name", TAKEN)
def test_attention_of_any_mask_is_taken(name: str) -> None:
    arrays, how = (heads_of(ROWS), heads_of(N), heads_of(N)), TAKEN[name]
    model = Products(attend)
    gt.replace(model, [(*arrays,)] if not how else _with_mask(arrays, how), source=SOURCE)
    with torch.no_grad():
        y, expected = model(*arrays, **how), attend(*arrays, **how)
        check(y, expected)
        assert y.stride() == expected.stride()  # what may follow is `view`
        assert kernel_calls(model, *arrays, **how) == {ATTENTION: 1}


def _with_mask(arrays: Sequence[Any], how: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(("query", "key", "value"), arrays, strict=True)) | how


def test_heads_that_share_keys_are_taken() -> None:
    arrays = heads_of(N, 2 * HEADS), heads_of(N), heads_of(N)
    how = {"is_causal": True, "enable_gqa": True}
    model = Products(attend)
    gt.replace(model, _with_mask(arrays, how), source=SOURCE)
    with torch.no_grad():
        check(model(*arrays, **how), attend(*arrays, **how))
        assert kernel_calls(model, *arrays, **how) == {ATTENTION: 1}


def test_heads_of_one_query_that_share_keys_are_rows_of_one_product() -> None:
    arrays = heads_of(1, 4 * HEADS), heads_of(N), heads_of(N)
    model = Products(attend)
    [report] = gt.replace(model, _with_mask(arrays, {"enable_gqa": True}), source=SOURCE)
    assert f"attention f32 4x{N}x{K}" in report.problem
    with torch.no_grad():
        check(model(*arrays, enable_gqa=True), attend(*arrays, enable_gqa=True))
        assert kernel_calls(model, *arrays, enable_gqa=True) == {ATTENTION: 1}


# Other calls of a module whose kernels are for `ROWS` queries and N keys.
LEFT: dict[str, tuple[Any, dict[str, Any]]] = {
    "other rows": (lambda: (heads_of(ROWS + 1), heads_of(N), heads_of(N)), {}),
    "other keys": (lambda: (heads_of(ROWS), heads_of(N + 1), heads_of(N + 1)), {}),
    "another mask": (
        lambda: (heads_of(ROWS), heads_of(N), heads_of(N)),
        {"attn_mask": torch.randn(ROWS, N)},
    ),
    "causal": (lambda: (heads_of(ROWS), heads_of(N), heads_of(N)), {"is_causal": True}),
    "columns apart": (
        lambda: (heads_of(K, columns=ROWS).mT, heads_of(N), heads_of(N)),
        {},
    ),
    "three dimensions": (lambda: tuple(sample_x(HEADS, rows, K) for rows in (ROWS, N, N)), {}),
    "another type": (
        lambda: tuple(one.double() for one in (heads_of(ROWS), heads_of(N), heads_of(N))),
        {},
    ),
    "no batch": (lambda: tuple(sample_x(0, HEADS, rows, K) for rows in (ROWS, N, N)), {}),
    "wider values": (
        lambda: (heads_of(ROWS), heads_of(N), heads_of(N, columns=K + 1)),
        {},
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_calls_that_no_kernel_is_for_are_those_of_pytorch(name: str) -> None:
    make, how = LEFT[name]
    model = Products(attend)
    gt.replace(model, (heads_of(ROWS), heads_of(N), heads_of(N)), source=SOURCE)
    arrays = make()
    with torch.no_grad():
        check(model(*arrays, **how), attend(*arrays, **how))
        assert not kernel_calls(model, *arrays, **how)


@pytest.mark.parametrize(
    "compute",
    [
        lambda q, k, v: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) @ v.flatten(0, 1),
        lambda q, k, v: q.matmul(k.transpose(-2, -1)).bmm(v) if q.dim() == 3 else q @ k.mT @ v,
        lambda q, k, v: q @ k[:, :1].mT @ v[:1, :1],
    ],
)
def test_products_are_taken_however_they_are_written(compute: Any) -> None:  # noqa: ANN401
    arrays = heads_of(ROWS), heads_of(N), heads_of(N)
    model = Products(compute)
    gt.replace(model, arrays, source=SOURCE)
    with torch.no_grad():
        check(model(*arrays), compute(*arrays))
        assert kernel_calls(model, *arrays) == {MATMUL: 2}


@pytest.mark.parametrize(
    "given",
    [
        (heads_of(ROWS), heads_of(N).mT),
        (heads_of(ROWS)[0], heads_of(N)[0, :1].mT),
        (heads_of(ROWS)[0], heads_of(N)[0, 0].mT),
        (heads_of(ROWS)[0, 0], heads_of(N)[0, 0].mT),
    ],
)
@pytest.mark.parametrize("compute", [torch.bmm, torch.Tensor.bmm])
def test_batches_that_pytorch_refuses_are_refused(given: Any, compute: Any) -> None:  # noqa: ANN401
    model = Products(compute)
    gt.replace(model, (heads_of(ROWS)[0], heads_of(N)[0].mT), source=SOURCE)
    with pytest.raises(RuntimeError, match=r"batch2|3D tensor"):
        model(*given)


@pytest.mark.parametrize("name", WAYS)
def test_what_is_recorded_traced_or_transformed_is_computed_as_before(name: str) -> None:
    model, x = Attending(WAYS[name][0]).eval(), sample_x(2, N, WIDTH)
    plain = copy.deepcopy(model)
    gt.replace(model, x, source=SOURCE)
    gradients = []
    for one in (model, plain):
        given = x.clone().requires_grad_()
        one(given).square().sum().backward()
        gradients.append(given.grad)
    check(*gradients)
    with torch.no_grad():
        expected = plain(x)
        check(torch.vmap(model)(x[None])[0], expected)
        check(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        check(torch.export.export(model, (x,)).module()(x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            check(model(x), plain(x))
            assert not kernel_calls(model, x)


def test_products_have_the_tangents_of_pytorch() -> None:
    model, x = Attending(by_hand).eval(), sample_x(2, N, WIDTH)
    plain = copy.deepcopy(model)
    gt.replace(model, x, source=SOURCE)
    with torch.no_grad():
        check(torch.func.jvp(model, (x,), (x,)), torch.func.jvp(plain, (x,), (x,)))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangents = [torch.autograd.forward_ad.unpack_dual(one(dual)) for one in (model, plain)]
            check(tangents[0].tangent, tangents[1].tangent)


def test_a_copy_in_another_process_asks_its_source_again() -> None:
    model, x = Products(attend), (heads_of(ROWS), heads_of(N), heads_of(N))
    gt.replace(model, x, source=SOURCE)
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301 - made here
    assert vars(loaded)["forward"].module is loaded
    check(loaded(*x), attend(*x))  # there is nobody to ask: the source of a test has no text


def test_a_module_whose_forward_was_replaced_is_left() -> None:
    model: Any = Products(attend)
    x = heads_of(ROWS), heads_of(N), heads_of(N)
    model.forward = model.forward
    [told] = gt.replace(model, x, source=SOURCE)
    assert "its forward was replaced" in told.reason
    assert not kernel_calls(model, *x)


class Static(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Has a `forward` that is given no module."""

    forward = staticmethod(attend)


class OfClass(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Has a `forward` that is given its class."""

    @classmethod
    def forward(cls, *given: Any) -> Any:  # noqa: ANN401 - tensors
        return attend(*given)


@pytest.mark.parametrize("made", [Static, OfClass])
def test_a_module_whose_forward_is_no_method_of_it_is_left(made: Any) -> None:  # noqa: ANN401
    model, x = made(), (heads_of(ROWS), heads_of(N), heads_of(N))
    [told] = gt.replace(model, x, source=SOURCE)
    assert "is no method of the module" in told.reason
    check(model(*x), attend(*x))


class Timed(Kernels):
    """Says what each kernel saves of a call, in ns."""

    def __init__(self, saved_ns: float) -> None:
        super().__init__(lack=_no_layers)
        self.saved_ns = saved_ns

    def find(self, wanted: WantedLayer) -> FoundLayer:
        return replace(super().find(wanted), saved_ns=self.saved_ns)


@pytest.mark.parametrize(("saved_ns", "count"), [(1e5, 2), (10.0, 0), (-10.0, 0)])
def test_replace_takes_what_saves_more_than_to_look_for_it(saved_ns: float, count: int) -> None:
    model, x = Attending(by_hand).eval(), sample_x(2, N, WIDTH)
    report = gt.replace(model, x, source=Timed(saved_ns))
    assert len(report.taken) == count
    reasons = {one.reason for one in report if one.name == "" and not one.is_taken}
    assert all("to look for its products among the" in one for one in reasons)


def test_layers_whose_attention_is_one_operator_are_as_before() -> None:
    model = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True).eval()
    x = sample_x(2, N, WIDTH)
    with torch.no_grad():
        expected = model(x)
        report = gt.replace(model, x, source=SOURCE)
        check(model(x), expected)
    assert not report.taken


def test_debug_judges_products_and_names_their_module() -> None:
    model, x = torch.nn.Sequential(Attending(), Attending(by_hand)).eval(), sample_x(2, N, WIDTH)
    gt.replace(model, x, source=SOURCE)
    found = gt.debug(model, x)
    assert found.wrong is None
    assert {one.name for one in found.layers} == {"0", "1"}


class Planned:
    """In the place of a clock: a module takes a second, with kernels what the plan says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, list[float]]) -> None:
        self.seconds = seconds
        monkeypatch.setattr(tuning, "_timed", self.timed)

    def timed(self, model: Any, kinds: Sequence[Any], calls: Sequence[Call], **_how: bool) -> Any:  # noqa: ANN401
        for call in calls:
            call.on(model)
        times = tuple(self._time(kind) for kind in kinds)
        return tuning._Pass(sum(times), times)

    def _time(self, kind: Any) -> float:  # noqa: ANN401
        one = kind.layers[0]
        if "forward" not in vars(one.module):
            return 1.0
        return float(self.seconds[one.name][kind.ways.index(kind.way)])


def test_attention_stays_where_it_gains_inside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    Planned(monkeypatch, {"0": [0.5], "1": [1.5, 1.5, 0.25]})
    model, x = torch.nn.Sequential(Attending(), Attending(by_hand)).eval(), sample_x(2, N, WIDTH)
    with torch.no_grad():
        expected = model(x)

        gain = gt.tune_model(model, x, source=SOURCE, budget_s=0)

        check(model(x), expected)
        assert kernel_calls(model, x) == {ATTENTION: 1, MATMUL: 1}
    told = {one.problem: one for one in gain.layers}
    attention = told[f"{2 * HEADS} of attention f32 {N}x{N}x{K} scale"]
    assert (attention.is_taken, attention.tuned_s, attention.is_served) == (True, 0.5, True)
    products = told[
        f"{2 * HEADS} of matmul f32 {N}x{N}x{K} nk none, "
        f"{2 * HEADS} of matmul f32 {N}x{K}x{N} kn none"
    ]
    assert (products.tuned_s, products.is_served) == (0.25, False)
    assert f"of 2 products, matmul f32 {N}x{K}x{N} kn none alone" in products.reason


def test_attention_that_gains_nothing_in_the_model_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Planned(monkeypatch, {"": [1.5]})
    model, x = Attending().eval(), sample_x(2, N, WIDTH)
    gain = gt.tune_model(model, x, source=SOURCE, budget_s=0)
    [told] = [one for one in gain.layers if "attention" in one.problem]
    assert "no kernel is faster than what PyTorch calls" in told.reason
    assert "forward" not in vars(model)


def test_a_module_of_products_is_timed_without_the_layers_in_it() -> None:
    """Counted twice, the layers would make far more than the whole in each of several tries."""
    model, x = Attending().eval(), sample_x(2, N, WIDTH)

    def shares() -> float:
        gain = gt.tune_model(model, x, source=Kernels(lack=lambda _wanted: True), budget_s=0)
        assert all(one.plain_s > 0 for one in gain.layers)
        return float(sum(one.share for one in gain.layers))

    assert any(shares() < 1.3 for _try in range(5))


class Unasked(Kernels):
    """A source that fails for products alone."""

    def find(self, wanted: WantedLayer) -> FoundLayer:
        if isinstance(wanted, WantedProduct):
            raise gt_error("nobody answers.")
        return super().find(wanted)


def gt_error(text: str) -> Exception:
    from gemm_tuner.errors import StoreFailed  # noqa: PLC0415

    return StoreFailed(text)


def test_a_source_that_fails_is_told_of_and_changes_nothing() -> None:
    model, x = Attending().eval(), sample_x(2, N, WIDTH)
    report = gt.replace(model, x, source=Unasked())
    assert [(one.name, one.reason) for one in report.left] == [("", "nobody answers.")]
