"""Formats of packed weights for several m: what each would cost them, and which to search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, isinf

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.packed_format import packed_format
from gemm_tuner.domain.record import Stage
from gemm_tuner.errors import NoKernelFamily
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.earlier import earlier_trials
from gemm_tuner.tuning.generator import generator_version

MOST_FORMATS = 3
_BEST_OF_EACH = 3

# What losses at each m count together: the format with the least of these is best.
Price = Callable[[Sequence[float]], float | tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFormats:
    """What the sweep of one problem timed: the greatest speed of each format, and what has it.

    A kernel was `confirmed` in some of the formats.
    """

    space: Space
    speeds: dict[str, float] = field(default_factory=dict)
    examples: dict[str, Candidate] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)

    def best(self) -> list[str]:
        """Return the fastest formats."""
        return sorted(self.speeds, key=lambda name: -self.speeds[name])[:_BEST_OF_EACH]

    def same_tile(self, space: Space) -> tuple[Candidate, ...]:
        """Return the fastest kernel as it reads the format of a space, if it can."""
        best = self.best()[:1]
        return same_tile_in_format(self.examples[best[0]], space) if best else ()

    def expected_loss(self, name: str, like: Candidate) -> float:
        """Return the share of the greatest speed that a format costs, by the model if not timed."""
        if name in self.speeds:
            return 1.0 - self.speeds[name] / max(1.0, *self.speeds.values())
        in_format = replace(self.space, like=like)
        return max(0.0, 1.0 - _fewest_cycles(self.space) / _fewest_cycles(in_format))

    def is_searched(self, name: str, like: Candidate) -> bool:
        """Return whether there is nothing to search in a format any more."""
        return name in self.confirmed or is_empty(replace(self.space, like=like))


def same_tile_in_format(best: Candidate, space: Space) -> tuple[Candidate, ...]:
    """Return a kernel as it reads the format of a space, if its tile can and the space has it.

    What won in any format differs from that in the depth of its blocks, or reads several panels
    side by side. A short search in the format might not come to it.
    """
    like = space.like
    if like is None or like.micro_kernel.family != best.micro_kernel.family:
        return ()
    streams, rest = divmod(best.micro_kernel.nr, like.packed_columns)
    if rest:
        return ()
    blocking = replace(best.blocking, kc=like.blocking.kc, w_streams=streams)
    found = replace(best, blocking=blocking)
    return (found,) if found in space.cuts_of(found) else ()


def promising_formats(timed: Sequence[TimedFormats], price: Price) -> list[Candidate]:
    """Return a candidate of each format to search: those with the least price of their losses.

    They are fewer where some were searched before.
    """
    searched = {
        name
        for name, like in _examples(timed).items()
        if all(one.is_searched(name, like) for one in timed)
    }
    ranked = ranked_formats(timed, price)
    left = [like for name, like in ranked.items() if name not in searched]
    return left[: max(0, MOST_FORMATS - len(searched))]


def ranked_formats(timed: Sequence[TimedFormats], price: Price) -> dict[str, Candidate]:
    """Return the fastest formats of each problem, each with a candidate, the best for all first.

    That is the least price of what they cost by what was timed, or by the model where nothing was.
    """
    examples = _examples(timed)

    def expected(name: str) -> float | tuple[float, ...]:
        return price([one.expected_loss(name, examples[name]) for one in timed if one.speeds])

    fastest = {name for one in timed for name in one.best()}
    ranked = sorted(fastest, key=lambda name: (expected(name), name))
    return {name: examples[name] for name in ranked}


def _examples(timed: Sequence[TimedFormats]) -> dict[str, Candidate]:
    return {name: like for one in timed for name, like in one.examples.items()}


def timed_formats(
    space: Space, context: ExecutionContext, repository: Repository, toolchain: Toolchain
) -> TimedFormats:
    """Return what was timed of a problem in a context, beside the newest baseline."""
    measured = [
        (trial, trial.measurement)
        for trial in earlier_trials(repository, space.problem, space.cpu, toolchain)
        if trial.context == context and trial.measurement is not None
    ]
    found = TimedFormats(space=space)
    for trial, measurement in measured:
        if measurement.baseline == measured[-1][1].baseline:
            family = family_named(trial.candidate.micro_kernel.family)
            name = packed_format(space.problem, trial.candidate, family)
            speed = measurement.ratio.median
            if speed >= found.speeds.get(name, 0.0):
                found.speeds[name], found.examples[name] = speed, trial.candidate
            if trial.stage is Stage.CONFIRM and trial.generator == generator_version():
                found.confirmed.add(name)
    return found


def is_empty(space: Space) -> bool:
    """Return whether there is no candidate of a problem in a format."""
    return isinf(_fewest_cycles(space))


@lru_cache(maxsize=512)
def _fewest_cycles(space: Space) -> float:
    """Return what the model expects of the best candidate, infinity where there is none."""
    try:
        candidates = space.defaults()
    except NoKernelFamily:
        return inf
    return min(
        predict_cycles(space.problem, one, family_named(one.micro_kernel.family), space.cpu)
        for one in candidates
    )
