"""oneDNN, loaded from its wheel and called through its C API."""

import ctypes
from pathlib import Path

from gemm_tuner.bench.baselines.baseline import CBaseline
from gemm_tuner.bench.baselines.chain import Link, split_chain
from gemm_tuner.bench.c_runner import CRunner
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import WeightLayout
from gemm_tuner.domain.spelling import Argument, OneDnnAlgorithm
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.onednn import (
    DATA_TYPES,
    find_onednn,
    load_library,
)
from gemm_tuner.machine.memory import address_of


class _StepStruct(ctypes.Structure):
    """`onednn_step` of bench/native/onednn.c."""

    _fields_ = (
        ("algorithm", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("operand_rows", ctypes.c_int32),
        ("operand_columns", ctypes.c_int32),
        ("operand_type", ctypes.c_int32),
        ("operand", ctypes.c_void_p),
    )


class _DescriptionStruct(ctypes.Structure):
    """`onednn_layer_description` of bench/native/onednn.c."""

    _fields_ = (
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x_type", ctypes.c_int32),
        ("w_type", ctypes.c_int32),
        ("y_type", ctypes.c_int32),
        ("w_k_stride", ctypes.c_int64),
        ("w_n_stride", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bias_type", ctypes.c_int32),
        ("x_scale", ctypes.c_void_p),
        ("w_scales", ctypes.c_void_p),
        ("x_zero_point", ctypes.c_void_p),
        ("y_zero_point", ctypes.c_void_p),
        ("steps", ctypes.POINTER(_StepStruct)),
        ("step_count", ctypes.c_int32),
    )


class OneDnn(CBaseline):
    """oneDNN with weights reordered once and the epilogue fused.

    Its threads are those of OpenMP: OMP_NUM_THREADS must be set before it is loaded.
    """

    fuses_epilogue = True
    is_of_openmp = True

    def __init__(self, driver: Path) -> None:
        """Load the library and its driver.

        Raises:
            BaselineMissing: the wheel is not installed, or its library does not load.
        """
        self._driver = load_onednn(find_onednn(), driver)
        self._driver.onednn_create.restype = ctypes.c_void_p
        self._driver.onednn_packed_weight_bytes.restype = ctypes.c_uint64
        numbers = (ctypes.c_int32 * 3)()
        self._driver.onednn_version(numbers)
        self.text = "onednn " + ".".join(str(number) for number in numbers)

    def prepare(self, workload: Workload) -> "_OneDnnRunner":
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: oneDNN refuses the problem, or has no such step.
        """
        for link in split_chain(workload).others:
            if link.step.kind.onednn is None or link.argument is Argument.Y_ZERO_POINT:
                raise BaselineMissing(
                    f"oneDNN cannot fuse the step {link.step.text!r} of {workload.problem.text}; "
                    "choose another baseline."
                )
        return _OneDnnRunner(self._driver, workload)


class _OneDnnRunner(CRunner):
    def __init__(self, driver: ctypes.CDLL, workload: Workload) -> None:
        self._driver = driver
        self._workload = workload
        status = ctypes.c_int32()
        description = _describe(workload)
        layer = driver.onednn_create(ctypes.byref(description), ctypes.byref(status))
        if not layer:
            raise BaselineMissing(
                f"oneDNN refuses {workload.problem.text} with status {status.value}; "
                "choose another baseline."
            )
        super().__init__(driver.onednn_time, ctypes.c_void_p(layer))

    @property
    def packed_weight_bytes(self) -> int:
        size: int = self._driver.onednn_packed_weight_bytes(self._layer)
        return size

    def pack(self, address: int) -> None:
        w = ctypes.c_void_p(address_of(self._workload.w))
        status = self._driver.onednn_pack_weights(self._layer, w, ctypes.c_void_p(address))
        _check_status("reorder", status)

    def _check_calls(self, status: int) -> None:
        _check_status("matmul", status)


def load_onednn(library: Path, driver: Path) -> ctypes.CDLL:
    """Return the driver, loaded after the library that it calls.

    Raises:
        BaselineMissing: the system cannot load one of them.
    """
    load_library(library, mode=ctypes.RTLD_GLOBAL)
    return load_library(driver)


def _describe(workload: Workload) -> _DescriptionStruct:
    problem = workload.problem
    is_nk = problem.w_layout is WeightLayout.NK
    # A bias at the head of the chain is an argument of the primitive: it costs least there.
    chain = split_chain(workload)
    steps = [_describe_step(link, workload) for link in chain.others]
    return _DescriptionStruct(
        workload.rows,
        problem.n,
        problem.k,
        DATA_TYPES[problem.types.x],
        DATA_TYPES[problem.types.w],
        DATA_TYPES[problem.types.y],
        1 if is_nk else problem.n,
        problem.k if is_nk else 1,
        address_of(workload.x),
        address_of(workload.y),
        _address_of(chain.bias),
        DATA_TYPES[chain.bias.dtype] if chain.bias else 0,
        _address_of(chain.scale),
        _address_of(chain.channel_scale),
        _address_of(chain.x_zero_point),
        _address_of(chain.y_zero_point),
        (_StepStruct * len(steps))(*steps),
        len(steps),
    )


def _describe_step(link: Link, workload: Workload) -> _StepStruct:
    (post_op,) = link.step.kind.onednn or ()
    if link.array is None:
        alpha, beta = post_op.alpha_beta(link.step.parameters)
        return _StepStruct(post_op.algorithm, alpha, beta, 0, 0, 0, None)
    shape = link.step.kind.operand
    if shape is OperandShape.SCALAR:
        # Known when the primitive is made, which gives oneDNN a constant instead of an operand.
        return _StepStruct(OneDnnAlgorithm.LINEAR, float(link.array[0]), 0.0, 0, 0, 0, None)
    return _StepStruct(
        post_op.algorithm,
        0.0,
        0.0,
        1 if shape is OperandShape.ROW_VECTOR else workload.rows,
        1 if shape is OperandShape.COLUMN_VECTOR else workload.problem.n,
        DATA_TYPES[link.dtype],
        address_of(link.array),
    )


def _address_of(link: Link | None) -> int | None:
    return address_of(link.array) if link is not None and link.array is not None else None


def _check_status(verb: str, status: int) -> None:
    if status != 0:
        raise BaselineMissing(
            f"{verb} of oneDNN failed with status {status}; choose another baseline."
        )
