"""Random programs of products and steps, each as the pass changes it; skipped without PyTorch."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import K, check, passed  # noqa: E402

PROGRAMS = 60  # of each seed
SHAPES = ((K, K), (1, K, K), (2, K // 2, K), (4, K // 4, K), (K, 1, K))  # as many rows as columns
FUNCTIONS = (torch.relu, torch.tanh, torch.nn.functional.gelu, torch.nn.functional.silu)
# Of an array, numbers for its columns, another array of its shape, and what draws; how often each.
Operation = Callable[[Any, Any, Any, Random], Any]
OPERATIONS: dict[Operation, int] = {
    lambda y, vector, _other, _draw: y * vector: 3,
    lambda y, vector, _other, _draw: vector + y: 3,
    lambda y, vector, _other, _draw: vector - y: 1,
    lambda y, vector, _other, _draw: torch.add(y, vector, alpha=2): 1,
    lambda y, vector, _other, _draw: y.clone().mul_(vector).add_(vector): 1,
    lambda y, _vector, other, _draw: y + other: 3,
    lambda y, _vector, other, _draw: (other + y) / 2: 1,
    lambda y, _vector, _other, _draw: y + y.mean(-1, keepdim=True): 1,
    lambda y, _vector, _other, draw: draw.choice(FUNCTIONS)(y): 2,
    lambda y, _vector, _other, draw: y * draw.choice((2, 0.5, -1.5)): 1,
    lambda y, _vector, _other, draw: y.reshape(draw.choice(SHAPES)): 1,
    lambda y, _vector, _other, _draw: y.reshape(K, K).transpose(0, 1): 1,
    lambda y, _vector, _other, _draw: torch.nn.functional.dropout(y, 0.0, training=True): 1,
}
MOST_LAYERS = 3


class _Program(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Products, and operations that a seed draws, mostly on what the one before computed.

    All arrays are square or views of such, so that what is joined along the wrong dimension has
    the shape that is expected.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = Random(seed)
        self.seed = seed
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(K, K, bias=draw.random() < 0.6) for _ in range(MOST_LAYERS)
        )
        self.vectors = torch.nn.ParameterList(torch.randn(K) for _ in range(3))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        draw = Random(self.seed)
        made = [x]
        for layer in list(self.layers)[: draw.randint(1, MOST_LAYERS)]:
            made.append(layer(made[-1] if draw.random() < 0.8 else draw.choice(made)))
            for operation in draw.choices(
                list(OPERATIONS), list(OPERATIONS.values()), k=draw.randint(1, 5)
            ):
                y = made[-1] if draw.random() < 0.8 else draw.choice(made)
                other = draw.choice(made[-3:]).reshape(y.shape)
                made.append(operation(y, draw.choice(list(self.vectors)), other, draw))
        return made[-1], draw.choice([x, x, x, *made])


@pytest.mark.parametrize("seed", range(3))
def test_a_random_program_computes_what_it_did(seed: int) -> None:
    epilogues = set()
    for number in range(PROGRAMS):
        torch.manual_seed(seed)
        program = _Program(PROGRAMS * seed + number).eval()
        x, source = torch.randn(SHAPES[number % 3]), Kernels()
        with torch.no_grad():
            expected = program(x)
            computed = passed(gt.enable(source), program, x)(x)
        for one, wanted in zip(computed, expected, strict=True):
            largest = wanted.abs().max()
            check(one / largest, wanted / largest)
        epilogues |= {one.epilogue for one in source.asked}
    assert len(epilogues) > 5
