"""PyTorch on products of bytes: its quantised linear layer, which runs on the oneDNN inside it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.baselines.chain import Chain, Link, split_chain
from gemm_tuner.bench.baselines.torch_steps import (
    Torch,
    followed_on_result,
    operand_of,
    tensor_of,
    weight_of,
)
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.spelling import Argument
from gemm_tuner.errors import BaselineMissing

_NOT_FUSED = ("none", "")


def make_call_on_bytes(torch: Torch, workload: Workload, w: NDArray[Any]) -> Callable[[], object]:
    """Return a call of the layer: products, scales, bias and an activation in one operator.

    Raises:
        BaselineMissing: it cannot be called with such weights, zero points or scales, or for such
            a y.
    """
    problem = workload.problem
    if problem.types.w is not DType.S8:
        raise BaselineMissing("PyTorch multiplies with signed bytes only; choose another baseline.")
    chain = split_chain(workload)
    others = list(chain.others)
    operator = others[0].step.kind.torch if others else None
    fused = operator.post_op if operator is not None else None
    scalars = list(others.pop(0).step.parameters) if fused is not None else []
    y_scale = 1.0
    if problem.types.y in {DType.U8, DType.S8}:
        y_scale = _scale_of_y(others, workload)
        others = []
    elif problem.types.y is DType.S32:
        raise BaselineMissing("PyTorch has no product of bytes in s32; choose another baseline.")
    y = tensor_of(torch, workload.y)
    post_op, algorithm = fused or _NOT_FUSED
    call = partial(
        torch.ops.onednn.qlinear_pointwise.default,
        tensor_of(torch, workload.x),
        _number(chain.scale, 1.0),
        int(_number(chain.x_zero_point, 0)),
        torch.ops.onednn.qlinear_prepack(
            weight_of(torch, workload, w).contiguous(), [workload.rows, problem.k]
        ),
        *_scales_of_w(torch, workload, chain),
        operand_of(torch, chain.bias),
        y_scale,
        int(_number(chain.y_zero_point, 0)),
        y.dtype,
        post_op,
        scalars,
        algorithm,
    )
    return followed_on_result(torch, call, others, y)


def _number(link: Link | None, default: float) -> float:
    return default if link is None or link.array is None else float(link.array[0])


def _scales_of_w(torch: Torch, workload: Workload, chain: Chain) -> tuple[Any, Any]:
    """Return the scales of w and its zero points, which are zero."""
    zero_points = torch.zeros(1, dtype=torch.int32)
    if chain.channel_scale is None:
        return torch.ones(1), zero_points
    return operand_of(torch, chain.channel_scale), zero_points.repeat(workload.problem.n)


def _scale_of_y(others: list[Link], workload: Workload) -> float:
    """Return the divisor of the operator before it rounds."""
    if not others:
        return 1.0
    is_one_scale = [link.argument for link in others] == [Argument.SCALE]
    scale = _number(others[0], 0.0) if is_one_scale else 0.0
    if scale <= 0.0:
        raise BaselineMissing(
            f"PyTorch rounds to bytes after one positive scale only, unlike "
            f"{workload.problem.epilogue.text!r}; choose another baseline."
        )
    return 1.0 / scale
