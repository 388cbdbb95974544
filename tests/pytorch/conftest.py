"""Each test of PyTorch leaves it as it was."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    if find_spec("torch") is None:
        yield
        return
    import torch  # noqa: PLC0415 - where it is installed

    import gemm_tuner.torch  # noqa: PLC0415

    threads = torch.get_num_threads()
    torch.manual_seed(3)
    yield
    gemm_tuner.torch.disable()
    torch.set_grad_enabled(True)  # which a baseline, in a process of its own, does without
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.fixture
def loops_by_operators() -> Iterator[None]:
    """Let operators of PyTorch compute what Inductor writes loops for, so that no compiler runs.

    It is for tests of what the pass makes of a graph, which comes before and is the same.
    """
    import torch._inductor  # noqa: PLC0415 - where it is installed

    with torch._inductor.config.patch(fallback_by_default=True):
        yield
