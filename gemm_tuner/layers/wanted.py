"""What a model asks of a source of kernels, and what it is told."""

from dataclasses import dataclass
from typing import Any

from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.layer_problems import MAX_LOSS, layer_problems
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.runtime.load import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLayer:
    """A linear layer of a model: y (rows, n) = epilogue(x (rows, k) @ w.T), for several `rows`.

    `beside` are libraries, by name, that compute it where it is left, and that other callers lack:
    a kernel that one of them was faster than is not taken.
    """

    n: int
    k: int
    rows: tuple[int | str, ...]
    dtype: str
    epilogue: str
    threads: int
    w_layout: str = "nk"
    reduction: str = "any"
    beside: tuple[str, ...] = ()
    operation: str = Operation.LINEAR.value

    @property
    def asked(self) -> dict[str, Any]:
        """Return the arguments that each function which finds or tunes a layer takes by name."""
        names = ("n", "k", "dtype", "epilogue", "w_layout", "reduction")
        return {"m": self.rows} | {name: getattr(self, name) for name in names}

    @property
    def regimes(self) -> tuple[Regime, ...]:
        """Return where the weights of a model are at a call: they seldom stay in a cache."""
        return (Regime.COLD_WEIGHTS, Regime.HOT)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the problem of each of the rows.

        Raises:
            InvalidInput: there are none, or too many, or a number cannot be used.
        """
        return layer_problems(**self.asked, max_loss=MAX_LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedProduct(WantedLayer):
    """A product of two activations: y (rows, n) = epilogue(x (rows, k) @ w), for several `rows`.

    Or attention of as many rows to n keys, or to a number from `least_n` to n, with heads of k
    elements.
    """

    operation: str = Operation.MATMUL.value
    least_n: int | None = None

    @property
    def columns(self) -> str:
        """Return n as text, `4096` or `1..4096`."""
        return str(self.n) if self.least_n is None else f"{self.least_n}..{self.n}"

    @property
    def regimes(self) -> tuple[Regime, ...]:
        """Return where both factors are: they were just computed."""
        return (Regime.HOT,)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the problem of each of the rows."""
        words = self.asked | {"n": self.columns, "operation": self.operation}
        return tuple(Problem.create(**words | {"m": rows}) for rows in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGroups(WantedProduct):
    """Products of groups of rows, each with weights of its own, as of experts.

    A kernel reads the weights as the model holds them, and computes one group. It is chosen by its
    time where these are in a cache, as those of other products are timed.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """Between what the time of a call lies, in ns, by the interval of its measurement."""

    least_ns: float
    greatest_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayer:
    """The kernels for some of the rows, and why there are none for the others.

    `times` are those of a call for each of the rows, in `regime`: of its kernel, or where there is
    none, of the fastest library. None was not measured; all are left out by a source without times.
    `fastest` names the libraries that won where there is no kernel. `saved_ns` is the least time
    that the kernels save of a call, None where it is not known.
    """

    kernels: tuple[Kernel, ...]
    reasons: tuple[str, ...]
    regime: Regime | None = None
    times: tuple[CallTime | None, ...] = ()
    fastest: tuple[str, ...] = ()
    saved_ns: float | None = None

    @property
    def was_timed(self) -> bool:
        """Return whether a kernel was compared with a library that won."""
        return bool(self.fastest)
