"""What a session of trials is set up with, asked, and answers when it is ready."""

from dataclasses import dataclass, field

from gemm_tuner.bench.baselines.choose import Race
from gemm_tuner.bench.drivers import Drivers
from gemm_tuner.bench.emulator import Emulation
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.sandbox import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The arguments of a session. The problem is in its text form, because steps hold functions."""

    problem_text: str
    threads: int
    baselines: tuple[str, ...]
    drivers: Drivers
    seed: int
    scalar_build: Build
    one_thread_build: Build | None = None
    stall_timeout_s: float  # besides what the time of the baseline allows
    provers: int = 1  # builds that are verified at the same time, if memory suffices
    race: Race = field(default_factory=Race)
    sandbox: Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The baselines of a session: their names and versions, in order.

    `implementations` say by what each computes, and `raced` are the libraries that the first was
    chosen from. `product_only` are those that leave the epilogue out. `left_out` says by name why a
    baseline is not among them. `slowest_call_s` is the least time of a call of
    the slowest. As many builds as `provers` can be verified at the same time.
    """

    baselines: tuple[str, ...]
    implementations: tuple[str, ...]
    raced: tuple[Raced, ...]
    product_only: frozenset[str]
    left_out: dict[str, str]
    slowest_call_s: float
    provers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """Ask whether a build is right, on this CPU or with features that it lacks."""

    build: Build
    emulation: Emulation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRequest:
    """Ask how fast builds for the same thing are, beside each other and the baselines.

    With `reads`, a loop that only reads takes part. With `checks_large_ratios`, a baseline that is
    much slower than a build is timed without the epilogue, too. `process` numbers the processes in
    which the same is timed: in each, arrays lie elsewhere. With `keeps_all`, every sample of each
    is in the answer.
    """

    builds: tuple[Build, ...]
    regime: Regime
    pairs: int
    sample_ns: int
    reads: bool = False
    checks_large_ratios: bool = False
    process: int = 0
    keeps_all: bool = False
