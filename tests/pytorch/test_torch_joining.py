"""Products of one x that are compiled as one; skipped where PyTorch is not installed."""

from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import HIDDEN, LINEAR, K, N, check, operator_calls, passed, sample_x  # noqa: E402

from gemm_tuner.domain.context import Regime  # noqa: E402
from gemm_tuner.layers.wanted import CallTime, FoundLayer, WantedLayer, WantedProduct  # noqa: E402
from gemm_tuner.torch.inductor.joining import joined_time  # noqa: E402


class Attention(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Has three products of one x, and two in a gated layer."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k = (torch.nn.Linear(K, N, bias=bias) for _ in range(2))
        self.v = torch.nn.Linear(K, K, bias=bias)
        self.gate, self.up = (torch.nn.Linear(K, HIDDEN, bias=bias) for _ in range(2))
        self.down = torch.nn.Linear(HIDDEN, K, bias=bias)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        y = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ self.v(x)
        return self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


def by_columns(wanted: WantedLayer) -> float:
    """Return a time by which fewer calls are better."""
    return 100.0 + wanted.n


def test_products_of_one_x_are_compiled_as_one() -> None:
    class Shown(Attention):
        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return super().forward(x), self.k.weight[1:]  # so k is no constant

    model, x = Shown().eval(), sample_x(2, 3, K)
    source = Kernels(
        time=by_columns,
        lack=lambda one: isinstance(one, WantedProduct) or one.n in (HIDDEN, 2 * HIDDEN),
    )
    tuned = gt.enable(source)
    concatenating = torch._inductor.config.patch({"cpp.enable_concat_linear": True})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), concatenating:
        compiled = torch.compile(model)
        for bad in (0.0, float("nan"), float("inf")):
            x[1, 2, 0] += bad
            check(compiled(x)[0], model(x)[0], equal_nan=True)
        assert operator_calls(compiled, x) == {LINEAR: 2}
    assert [one.name for one in tuned.report.taken] == ["q, v", "down"]
    assert {one.dtype for one in source.asked} == {"bf16"}


@pytest.mark.parametrize(
    ("source", "calls", "told"),
    [
        (Kernels(time=by_columns), 3, "as one, they take at most 158 ns, and 358 ns at least"),
        (Kernels(time=lambda one: one.n), 6, "would be one product: as one, they take at"),
        (Kernels(), 6, "no time of each"),
        (Kernels(time=lambda one: None if one.n == N else 50 + one.n), 5, "no time of each"),
        (
            Kernels(time=lambda one: None if one.n == 2 * N + K else 50 + one.n),
            5,
            f"no time of f32 6x{2 * N + K}x{K} bias",
        ),
        # as one, all three would be computed by the library, in less time
        (Kernels(time=lambda _one: 50.0, lack=lambda one: one.n == 2 * N + K), 5, "would be one"),
        (Kernels(time=by_columns, lack=lambda one: one.n == N), 3, "are one product"),
        # the function takes long, but it is computed in either case
        (Kernels(time=lambda one: 5e3 if "silu" in one.epilogue else one.n), 6, "would be one"),
    ],
)
def test_products_are_joined_where_times_say_so(source: Kernels, calls: int, told: str) -> None:
    model, x = Attention().eval(), sample_x()
    tuned = gt.enable(source)
    graph = passed(tuned, model, x)
    with torch.no_grad():
        check(graph(x), model(x))
    assert operator_calls(graph, x)[LINEAR] == calls
    assert told in str(tuned.report)


def _tied(one: Attention, x: Any) -> Any:  # noqa: ANN401 - a tensor
    one.k = one.q
    return one(x)


def _branch(x: Any, y: Any) -> Any:  # noqa: ANN401 - tensors
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (y,))


@pytest.mark.parametrize(
    ("compute", "joined"),
    [
        (_tied, [N + K, 2 * HIDDEN]),
        (lambda one, x: (one.q(x), one.k(x)), []),  # y leaves the graph
        (lambda one, x: (one.q(x).view(2, 3, N)[0], one.k(x).T), []),
        (lambda one, x: (one.v(x).chunk(2, 1)[1], one.k(x) * 2), []),
        (lambda one, x: _branch(x, one.q(x)) * one.k(x), []),
        (lambda one, x: (one.q(x) * 1, one.k(x) * 2), [2 * N]),
        (lambda one, x: (one.q(x).view(-1) * 1, one.k(x).view(2, 3, N) * 2), [2 * N]),
        (lambda one, x: one.gate(x).relu() + one.up(x).relu(), []),
        (lambda one, x: torch.nn.functional.gelu(one.gate(x)) * one.up(x), [2 * HIDDEN]),
        (lambda one, x: one.down(one.gate(x) * 1) + one.up(x).sum() + x, [2 * HIDDEN]),
        (lambda one, x: one.q(x[:3]) @ one.k(x[3:]).T, []),
        (lambda one, x: one.q(x.view(2, 3, K)) @ one.k(x.view(2, 3, K)).mT, [2 * N]),
        (lambda one, x: one.q(x.view(2, 3, K)).view(6, N) * one.k(x), [2 * N]),
        (lambda one, x: one.q(y := one.v(x)) * one.k(y), [2 * N]),
        (lambda one, x: (x @ one.q.weight.T) * (x @ one.k.weight.T), [2 * N]),
        (lambda one, x: (x @ one.q.weight.T) * one.k(x), []),  # one has a bias
        (lambda one, x: torch.addmm(one.q(x).sum(0), x, one.q.weight.T) * one.k(x), [2 * N]),
        (lambda one, x: (x @ one.v.weight) * (x @ one.v.weight.T), [2 * K]),
        (lambda one, x: one.down(torch.cat([one.k(x), one.k(x), x[:, :6]], 1)) * one.v(x), [N + K]),
    ],
)
def test_what_is_joined_computes_the_same(compute: Any, joined: list[int]) -> None:  # noqa: ANN401
    model, x, source = Attention().eval(), sample_x(), Kernels(time=by_columns)
    tuned = gt.enable(source)
    with torch.no_grad():
        graph = passed(tuned, lambda x: compute(model, x), x)
        check(graph(x), compute(model, x))
    names = [one.problem.split("x")[1] for one in tuned.report.taken if "," in one.name]
    assert names == [str(n) for n in joined]


def test_products_of_any_number_of_rows_are_joined() -> None:
    model = Attention().eval()
    source = Kernels(rows=("1..64",), time=by_columns)
    tuned = gt.enable(source, dynamic_rows=["1..64"])
    graph = passed(tuned, model, sample_x(2, 3, K), tracing_mode="symbolic")
    for rows in (4, 0, 64):  # the last by PyTorch's operators
        x = sample_x(2, rows, K)
        with torch.no_grad():
            check(graph(x), model(x))
    assert operator_calls(graph, x)[LINEAR] == 3


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_are_not_joined(dtype: str) -> None:
    model = Attention().to(getattr(torch, dtype))
    source = Kernels(time=by_columns)
    passed(gt.enable(source), lambda x: model.q(x) * model.k(x), sample_x(dtype=dtype))
    assert not source.asked


def test_products_are_tuned_as_one_once_their_own_times_are_known() -> None:
    class Tuning(Kernels):
        def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:  # noqa: ARG002 - as in Source
            assert budget_s == 3
            tuned.append((wanted.n, wanted.epilogue))

    tuned: list[tuple[int, str]] = []
    for source in (Tuning(), Tuning(time=by_columns)):
        tuned.clear()
        passed(gt.enable(source, tune="wait", budget_s=3), Attention(), sample_x())
        of_pair = [(n, chain) for n, chain in tuned if n in (HIDDEN, 2 * HIDDEN)]
        alone = [(HIDDEN, "bias+silu"), (HIDDEN, "bias")]
        assert of_pair == [*alone, *([(2 * HIDDEN, "bias")] if source.time else [])]


def _found(*times: tuple[float, float] | None, regime: Regime = Regime.HOT) -> FoundLayer:
    calls = [one and CallTime(least_ns=one[0], greatest_ns=one[1]) for one in times]
    return FoundLayer(kernels=(), reasons=(), regime=regime, times=tuple(calls))


@pytest.mark.parametrize(
    ("parts", "joined", "is_faster"),
    [
        ([[_found((10, 11))], [_found((20, 22))]], _found((25, 29)), True),
        ([[_found((10, 11))], [_found((20, 22))]], _found((25, 30)), False),  # intervals overlap
        ([[_found((10, 11))], [_found((20, 22))]], _found((28, 29.9)), False),  # by less than 2 %
        ([[_found((50, 50)), _found((10, 11))], [_found((20, 22))]], _found((25, 29)), True),
        ([[_found((50, 50)), _found((4, 4))], [_found((20, 22))]], _found((25, 29)), False),
        ([[_found((9, 9), (50, 50))]] * 2, _found((10, 10), (100, 101)), False),  # for some rows
        ([[_found((10, 10))], [_found(None)]], _found((1, 1)), None),
        ([[_found((10, 10))], [_found((9, 9))]], _found(None), None),
        ([[_found((10, 10))], [_found((9, 9), regime=Regime.COLD_WEIGHTS)]], _found((1, 1)), None),
        ([[_found((10, 10))], [_found()]], _found((1, 1)), None),
        ([[_found((10, 10))], [_found((9, 9))]], _found(), None),
    ],
)
def test_the_slow_end_of_one_beats_the_fast_ends_of_several(
    parts: list[list[FoundLayer]], joined: FoundLayer, *, is_faster: bool | None
) -> None:
    time = joined_time(parts, joined)
    assert (time and time.is_faster) == is_faster
