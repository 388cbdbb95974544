"""What the products of AMX are, in exact arithmetic, from the pseudocode of Intel's manual.

Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: TDPBF16PS, TDPFP16PS and
TDPB[SU,US,SS,UU]D.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

LEAST_NORMAL = Fraction(1, 1 << 126)
LARGEST_EXPONENT = 127


def bf16(bits: int) -> float:
    return float(np.array(bits << 16, np.uint32).view(np.float32))


def f16(bits: int) -> float:
    return float(np.array(bits, np.uint16).view(np.float16))


def flushed(value: float) -> float:
    """Return a number as DAZ reads it: 0 for a subnormal one."""
    is_subnormal = value != 0 and abs(value) < LEAST_NORMAL
    return math.copysign(0.0, value) if is_subnormal else value


def rounded(exact: Fraction) -> float:
    """Return the nearest float32, ties to even; what is subnormal after that becomes 0 (FTZ)."""
    sign = -1.0 if exact < 0 else 1.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    nearest = round(magnitude / unit) * unit  # to even
    if nearest >= Fraction(2) ** (LARGEST_EXPONENT + 1):
        return math.copysign(math.inf, sign)
    return math.copysign(0.0 if nearest < LEAST_NORMAL else float(nearest), sign)


def fma(a: float, b: float, c: float) -> float:
    """Return a * b + c in float32, with DAZ and FTZ."""
    a, b, c = flushed(a), flushed(b), flushed(c)
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    # The sign of a zero is that of a sum of zeros, and plus where numbers cancel.
    return rounded(exact) if exact else math.copysign(0.0, a) * math.copysign(1.0, b) + c * 0.0


def float_product(
    sums: NDArray[np.float32],
    x: NDArray[np.uint16],
    w: NDArray[np.uint16],
    value_of: Callable[[int], float],
) -> NDArray[np.float32]:
    """Return sums (m, n) + x (m, 2 k) w (k, 2 n), where pairs lie side by side in x and in w."""
    result = sums.copy()
    for m, n in np.ndindex(sums.shape):
        even = odd = 0.0
        for k in range(len(w)):
            even = fma(value_of(int(x[m, 2 * k])), value_of(int(w[k, 2 * n])), even)
            odd = fma(value_of(int(x[m, 2 * k + 1])), value_of(int(w[k, 2 * n + 1])), odd)
        result[m, n] = fma(1.0, float(sums[m, n]), fma(1.0, even, odd))
    return result


def integer_product(
    sums: NDArray[np.int32], x: NDArray[np.integer], w: NDArray[np.integer]
) -> NDArray[np.int32]:
    """Return sums (m, n) + x (m, 4 k) w (k, 4 n), where four bytes lie side by side; it wraps."""
    depth, width = w.shape
    groups_of_x = x.reshape(len(x), depth, 4).astype(np.int64)
    groups_of_w = w.reshape(depth, width // 4, 4).astype(np.int64)
    exact = sums + np.einsum("mkb,knb->mn", groups_of_x, groups_of_w)
    wrapped: NDArray[np.int32] = (exact & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    return wrapped
