"""One packed copy of the weights for several m: the fewest formats at a bounded loss of speed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from gemm_tuner.derive import decide_by
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.layer_problems import MAX_LOSS, check_sharing
from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.packed_format import packed_format
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.select.choose import Match, choose
from gemm_tuner.select.lookup import servable
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.repository import Repository

LIBRARY = "library"  # the format of weights that oneDNN or NumPy computes with


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to compute a problem: a verdict, the format of its packed weights, what it costs.

    `loss` is the share of the speed of the problem's best kernel, or of the library that runs
    instead where that is better, that this one lacks.
    """

    verdict: Verdict
    packed_format: str
    loss: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKernel:
    """The kernel for one problem among others, the best for it alone, and why."""

    best: Option
    chosen: Option
    explain: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The kernels for several problems, in their order. `serial` is the greatest of the matches."""

    kernels: tuple[SharedKernel, ...]
    serial: int

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the formats in which weights have to be packed, each once."""
        return tuple(dict.fromkeys(one.chosen.packed_format for one in self.kernels))

    @property
    def best_formats(self) -> tuple[str, ...]:
        """Return the formats that the best kernel of each problem would need, each once."""
        return tuple(dict.fromkeys(one.best.packed_format for one in self.kernels))


def share(
    repository: Repository,
    problems: Sequence[Problem],
    *,
    cpu: Cpu,
    context: ExecutionContext,
    max_loss: float = MAX_LOSS,
) -> Sharing:
    """Return kernels that read the weights in as few formats as a loss of `max_loss` allows.

    Of equally few formats, those with the least loss in all are chosen. Where nothing is as fast as
    the baseline, and no kernel that is at most `max_loss` slower reads what others need, the
    baseline is left to compute, with a copy of its own.

    Raises:
        InvalidSetting: the problems do not have the same weights, or are too many, or the loss is
            not a share.
    """
    check_sharing(problems, max_loss)
    matches = [choose(repository, one, cpu=cpu, context=context) for one in problems]
    options = [_options(match, max_loss, _confirmed(repository, match, cpu)) for match in matches]
    formats = fewest_formats(
        [{name: one.loss for name, one in by_format.items()} for by_format in options]
    )
    return Sharing(
        kernels=tuple(
            _shared_kernel(match, by_format, formats)
            for match, by_format in zip(matches, options, strict=True)
        ),
        serial=max(match.serial for match in matches),
    )


def could_be_served(repository: Repository, match: Match, cpu: Cpu) -> tuple[Verdict, ...]:
    """Return the kernels that could compute in the place of a verdict's, the fastest first."""
    best = match.verdict
    ratio = best.ratio
    if ratio is None:
        return ()
    options = [_option(best, trial, ratio) for trial in _confirmed(repository, match, cpu)]
    options.sort(key=lambda one: -one.verdict.ratio.median if one.verdict.ratio else 0.0)
    return tuple(one.verdict for one in options)


def fewest_formats(losses: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """Return the fewest formats of which each problem has one, then those with the least loss.

    Args:
        losses: for each problem, the formats that it may use, and what each costs it.
    """
    names = _undominated(losses)
    useful = [{name: one[name] for name in names if name in one} for one in losses]
    for count in range(1, len(losses) + 1):
        found = list(_covers(useful, count))
        if found:
            return min(found, key=lambda formats: _total_loss(losses, formats))
    return ()


def _covers(losses: Sequence[Mapping[str, float]], count: int) -> Iterator[tuple[str, ...]]:
    """Yield all choices of at most `count` formats of which each problem has one."""
    if not losses:
        yield ()
    elif count > 0:
        for name in min(losses, key=len):
            without = [one for one in losses if name not in one]
            for others in _covers(without, count - 1):
                yield (name, *others)


def loss_beside(best: Ratio, ratio: Ratio) -> float:
    """Return the share of the speed `best` that `ratio` lacks, both over the same baseline.

    It is that of the medians. Where one of these lies in the confidence interval of the other, the
    difference may be noise, and the fastest samples have to show it too.
    """
    loss = 1.0 - ratio.median / best.median
    if ratio.low <= best.median <= ratio.high or best.low <= ratio.median <= best.high:
        loss = min(loss, 1.0 - ratio.of_minimums / best.of_minimums)
    return max(0.0, loss)


def _undominated(losses: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the formats in order, without those that another can replace everywhere for less."""
    names = list(dict.fromkeys(name for of_one in losses for name in of_one))

    def is_no_better(name: str, other: str) -> bool:
        return all(
            name not in of_one or of_one.get(other, inf) <= of_one[name] for of_one in losses
        )

    return [
        name
        for place, name in enumerate(names)
        if not any(
            is_no_better(name, other) and (before < place or not is_no_better(other, name))
            for before, other in enumerate(names)
            if other != name
        )
    ]


def _total_loss(losses: Sequence[Mapping[str, float]], formats: Sequence[str]) -> float:
    return sum(min(of_one.get(name, inf) for name in formats) for of_one in losses)


def _confirmed(repository: Repository, match: Match, cpu: Cpu) -> tuple[Trial, ...]:
    """Return the trials of all kernels that could be served in the place of a verdict's.

    One kernel for a range may be slow at any m but the greatest, and takes no place of several.
    """
    if match.source is None:
        return ()
    verdict = match.verdict
    _again, confirmed = servable(
        repository,
        match.source,
        problem=verdict.problem,
        cpu=cpu,
        context=verdict.context,
        basis=verdict.basis,
    )
    is_several = bool(verdict.candidate and verdict.candidate.below)
    return tuple(one for one in confirmed if one.candidate.below or not is_several)


def _options(match: Match, max_loss: float, confirmed: Sequence[Trial]) -> dict[str, Option]:
    """Return the ways to compute a problem, the best and those within `max_loss`, by format."""
    best = match.verdict
    own = Option(verdict=best, packed_format=_format_of(best))
    found = {own.packed_format: own}
    if best.ratio is None:
        return found
    best_ratio = best.ratio if best.artifact else _ratio_of(speed_of_library(best))
    for option in [_option(best, trial, best_ratio) for trial in confirmed]:
        name = option.packed_format
        if option.loss <= max_loss and (name not in found or option.loss < found[name].loss):
            found[name] = option
    return found


def speed_of_library(verdict: Verdict) -> float:
    """Return the speed of what runs where no kernel is served, over that of the baseline."""
    instead = verdict.comparison.instead if verdict.comparison else None
    return instead.speed if instead else 1.0


def _ratio_of(speed: float) -> Ratio:
    return Ratio(median=speed, low=speed, high=speed, of_minimums=speed)


def _option(best: Verdict, trial: Trial, best_ratio: Ratio) -> Option:
    """Return the kernel of a confirmed trial as one to use in the place of the best."""
    assert trial.measurement is not None
    verdict = replace(
        best,
        decision=decide_by(trial),
        basis=Basis.SHARED if best.basis is Basis.MEASURED else best.basis,
        candidate=trial.candidate,
        artifact=trial.artifact,
        measurement=Evidence.of(trial.measurement),
        generator=trial.generator,
        tried_at=trial.created_at,
    )
    loss = loss_beside(best_ratio, trial.measurement.ratio)
    return Option(verdict=verdict, packed_format=_format_of(verdict), loss=loss)


def _format_of(verdict: Verdict) -> str:
    if verdict.artifact is None or verdict.candidate is None:
        return LIBRARY
    try:
        family = family_named(verdict.candidate.micro_kernel.family)
    except InvalidCandidate:
        return verdict.artifact.sha256  # of an earlier catalog: it shares with no other
    return packed_format(verdict.problem, verdict.candidate, family)


def _shared_kernel(
    match: Match, options: Mapping[str, Option], formats: Sequence[str]
) -> SharedKernel:
    best, *_others = options.values()
    chosen = min((options[name] for name in formats if name in options), key=lambda one: one.loss)
    return SharedKernel(best=best, chosen=chosen, explain=(*match.explain, _say(best, chosen)))


def _say(best: Option, chosen: Option) -> str:
    if chosen.packed_format == LIBRARY:
        return "shared: left to the baseline, with a copy of the weights of its own."
    reads = f"reads weights in the format {chosen.packed_format!r}"
    if chosen is best:
        return f"shared: the best kernel {reads}."
    return (
        f"shared: this kernel {reads}, and has {chosen.loss:.1%} less speed than what is best for "
        "this m alone."
    )
