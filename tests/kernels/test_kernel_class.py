"""The class of kernels and that of packed weights, as native/direct_call.c needs them."""

import sys
from typing import Never

import numpy as np
import pytest
from test_direct_call import K, M, N, _arguments, _kernel, _random, needs_native

from gemm_tuner.arrays.packed import PackedWeights
from gemm_tuner.errors import InvalidArray
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.runtime.load import Kernel

HAVE_VECTORCALL = 1 << 11  # Py_TPFLAGS_HAVE_VECTORCALL


class Derived(Kernel):
    """A kernel of a class that is written in Python."""


class Overridden(Kernel):
    """A kernel that is called in another way."""

    def __call__(self, *_arguments: object, **_named: object) -> Never:
        raise NotImplementedError


@needs_native
def test_kernels_are_called_without_a_tuple_and_a_dictionary() -> None:
    assert Kernel.__flags__ & HAVE_VECTORCALL
    assert (Kernel.__name__, Kernel.__module__) == ("Kernel", "gemm_tuner.runtime.load")
    assert (Kernel.__doc__ or "").startswith("A loaded kernel")


@needs_native
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a class of Python inherits vectorcall")
def test_the_class_of_kernels_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="immutable"):
        Kernel.compute = None  # type: ignore[method-assign,assignment]  # what is tested


@needs_native
def test_only_what_can_be_called_directly_is_sealed() -> None:
    assert NATIVE is not None

    with pytest.raises(TypeError, match="derived from DirectCall"):
        NATIVE.seal(int, "int", None)


def test_a_class_derived_from_that_of_kernels_is_called() -> None:
    kernel = _kernel()
    derived = Derived(kernel.native, kernel.artifact)
    x, packed, operands = _random(M, K), kernel.pack(_random(N, K)), _arguments()

    y = derived(x, packed, **operands)

    assert np.array_equal(y, kernel(x, packed, **operands))
    with pytest.raises(InvalidArray, match="reads scale, bias, add, but got none"):
        derived(x, packed)


def test_a_derived_class_may_be_called_in_another_way() -> None:
    kernel = _kernel()
    overridden = Overridden(kernel.native, kernel.artifact)

    with pytest.raises(NotImplementedError):
        overridden(_random(M, K), kernel.pack(_random(N, K)), **_arguments())


def test_arrays_may_be_given_by_name() -> None:
    kernel = _kernel()
    x, packed, operands = _random(M, K), kernel.pack(_random(N, K)), _arguments()

    y, z = kernel(x, packed=packed, **operands), kernel(packed=packed, x=x, **operands)

    assert np.array_equal(y, kernel(x, packed, **operands))
    assert np.array_equal(z, y)


def test_packed_weights_are_equal_to_themselves_alone() -> None:
    packed = _kernel().pack(_random(N, K))
    same = packed._replace()

    assert (packed != same) is True
    assert len({packed, same, packed}) == 2


def test_packed_weights_without_fields_are_told() -> None:
    empty = tuple.__new__(PackedWeights)

    with pytest.raises(IndexError):
        _kernel()(_random(M, K), empty, **_arguments())
