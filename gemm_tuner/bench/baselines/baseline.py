"""A baseline, and the row that makes a library one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gemm_tuner.bench.drivers import Drivers
from gemm_tuner.bench.inputs import Inputs
from gemm_tuner.bench.workload import Runner, Workload
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem


class Baseline(Protocol):
    """A library that candidates are compared with. To make one loads nothing."""

    @property
    def text(self) -> str:
        """Return the name and version kept in records: `onednn 3.2.0`; known once prepared."""

    @property
    def implementation(self) -> str:
        """Return by what, and how it is asked, it computes the problem last prepared."""

    @property
    def fuses_epilogue(self) -> bool:
        """Say whether it computes the epilogue, or the product alone."""

    @property
    def most_weight_copies(self) -> int | None:
        """Return over how many copies of the weights its calls can rotate, None for any number.

        Few copies are cold too, as all else is read before each sample; one cannot be.
        """

    @property
    def is_of_openmp(self) -> bool:
        """Say whether its threads are those of GNU OpenMP."""

    @property
    def preparation_s(self) -> float:
        """Return how long `prepare` may take, in seconds, besides what any call may take."""

    @property
    def starts_programs(self) -> bool:
        """Say whether it runs a compiler."""

    def check_problem(self, problem: Problem) -> None:
        """Refuse a problem for which the library need not even be loaded.

        Raises:
            BaselineMissing: the library does not compute such a problem.
        """

    def prepare(self, workload: Workload) -> Runner:
        """Return a runner that works on `workload`, whose problem was checked.

        Raises:
            BaselineMissing: the library cannot compute this problem.
        """

    def computed(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """Return what it computes where `problem` is asked of it: with other weights, perhaps."""

    @property
    def choice(self) -> Mapping[str, str]:
        """Return what `prepare` chose, by problem and threads; other processes may get it."""

    def settle(self, choice: Mapping[str, str]) -> None:
        """Choose so from now on for the same problems, without timing."""

    def preload(self) -> None:
        """Load the library here, so that forks of this process need not."""


# Of runtimes in which each copy of the weights is a model of its own, made in milliseconds: a
# sample calls each once.
MOST_MODELS = 64


class AnyBaseline:
    """The common parts of baselines, with defaults."""

    text = ""
    implementation = ""
    most_weight_copies: int | None = None
    is_of_openmp: bool = False
    preparation_s: float = 0.0
    starts_programs: bool = False

    def check_problem(self, problem: Problem) -> None:
        """Refuse none: the library is asked."""

    def computed(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """Return what is asked of it."""
        return problem, inputs

    @property
    def choice(self) -> Mapping[str, str]:
        """Return none: there is nothing to choose."""
        return {}

    def settle(self, choice: Mapping[str, str]) -> None:
        """Do nothing: there is nothing to choose."""

    def preload(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """The materials of baselines: the drivers, and kernels of ours.

    The scalar loop is built when it is asked for first.
    """

    drivers: Drivers
    scalar_build: Callable[[], Build]
    one_thread_build: Build | None
    cpu: Cpu


class Package(NamedTuple):
    """The package of a library: its name and version, and how long the library takes to start."""

    text: str
    start_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One installed copy of a library."""

    package: str  # the text of it
    baseline: Baseline
    start_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One library, or one way to call it: all that other modules know of it.

    `find` returns the installed copies, the preferred one first, or raises `BaselineMissing`;
    `installed` names their packages without anything built. Of rows that are `raced`, the fastest
    is the baseline `auto`; a copy that takes `start_s` seconds to start is left out where the race
    may not last as long. A last resort is a kernel of ours, for where no other can be used. `place`
    is the order in which rows are listed; they are prepared from the last to the first. A row that
    `takes_quantised` weights gets them as they are. One that computes `one_problem` was built for
    it, and cannot be asked for its product alone. One that `takes_activations` also multiplies two
    of them: it gets w in each call as its caller stores it. One that `attends` computes attention,
    and one for `attention_alone` nothing else. One that `is_usual` is what `bench`
    times beside unless it is told otherwise.
    """

    name: str
    place: int
    find: Callable[[Materials], Sequence[Copy]]
    installed: Callable[[], Sequence[Package]] = tuple
    is_raced: bool = False
    is_last_resort: bool = False
    takes_quantised: bool = False
    one_problem: bool = False
    takes_activations: bool = False
    attends: bool = False
    attention_alone: bool = False
    is_usual: bool = True

    def computes(self, operation: Operation) -> bool:
        """Return whether the library computes an operation."""
        if operation.has_values:
            return self.attends
        return not self.attention_alone and (operation.packs_ahead or self.takes_activations)
