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
