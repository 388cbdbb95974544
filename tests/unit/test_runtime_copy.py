"""A kernel is code that a process has loaded: it is shared, not copied."""

import copy
import pickle
from collections.abc import Callable

import pytest
from samples import make_artifact

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.runtime.load import Kernel


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_kernel_says_what_to_do_instead_of_copying_it(again: Callable[[Kernel], object]) -> None:
    kernel = Kernel.__new__(Kernel)
    kernel.artifact = make_artifact()

    with pytest.raises(InvalidSetting, match="another process asks for its own"):
        again(kernel)
