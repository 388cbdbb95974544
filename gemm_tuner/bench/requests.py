"""What a session of trials is set up with, asked, and answers when it is ready."""

from dataclasses import dataclass

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
    one_thread_build: Build | None = None
    stall_timeout_s: float  # besides what the time of the baseline allows
    provers: int = 1  # builds that are verified at the same time, if memory suffices
    races: tuple[Race, ...] = (Race(),)
    sandbox: Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The baselines beside which builds are timed in a regime: names and versions, in order.

    `implementations` say for each by what it computes, and `raced` are the libraries that the first
    was chosen from. `product_only` are those that leave the epilogue out. `left_out` says by name
    why a baseline is not among them. `call_s` is about the time of a call of the slowest, in
    seconds.
    """

    texts: tuple[str, ...]
    implementations: dict[str, str]
    raced: tuple[Raced, ...]
    product_only: frozenset[str]
    left_out: dict[str, str]
    call_s: float

    @property
    def text(self) -> str:
        """Return the first."""
        return self.texts[0]

    @property
    def note(self) -> str:
        """Say why others were left out; empty if none was."""
        return " ".join(f"{name} was skipped: {reason}" for name, reason in self.left_out.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The baselines of a session in each regime that it was set up for.

    As many builds as `provers` can be verified at the same time.
    """

    baselines: dict[Regime, Baselines]
    provers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarRequest:
    """Ask for the build of our scalar loop, before a session opens: no library is a baseline."""


OPENINGS = Opening | ScalarRequest


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
