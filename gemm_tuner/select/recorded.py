"""What is recorded to have won a problem on this CPU model, here or elsewhere: worth trying first.

Records are hints. A kernel is served for what was proved and timed here alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gemm_tuner.derive import tells_speed
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu, isa_text
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import InvalidCandidate, InvalidRecord
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.space.limits import check_covers, is_possible
from gemm_tuner.space.model import predict_cycles
from gemm_tuner.store.exchange import shipped_lines
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import Origin
from gemm_tuner.store.wire.record import parse_record

MOST_WINNERS = 3
_MOST_LOOKED_AT = 50
_SLOWER_AT_MOST = 4.0  # by the model, than the best that is recorded

IN_STORE = "this database"
IMPORTED = "imported into this database"
SHIPPED = "shipped with gemm-tuner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A trial, and in words where its record lies."""

    trial: Trial
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of a problem on a CPU model, and in words which lines are none."""

    found: tuple[Recorded, ...]
    faults: tuple[str, ...] = ()

    def __add__(self, other: "Records") -> "Records":
        """Return these records, and then others."""
        return Records(found=self.found + other.found, faults=self.faults + other.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWinners:
    """The best records of a problem in a context, each of another candidate, the best first.

    `left_out` says in words which would be among them, and why they cannot be.
    """

    winners: tuple[Recorded, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Return the candidates, the best first."""
        return tuple(one.trial.candidate for one in self.winners)


def records_at_hand(repository: Repository, problem: Problem, cpu: Cpu) -> Records:
    """Return the records of a problem on the model of `cpu`, of a store and of the package.

    Of what was run into the store, only what is attested with a key that is believed.

    Raises:
        StoreFailed: the database does not answer, or a row of it is damaged.
    """
    of_store = tuple(
        Recorded(trial=trial, source=source)
        for origin, source in ((Origin.MEASURED, IN_STORE), (Origin.IMPORTED, IMPORTED))
        for trial in repository.trials(problem=problem, model_key=cpu.model_key, origin=origin)
    )
    return Records(found=of_store) + shipped_records_of(problem, cpu)


def shipped_records_of(problem: Problem, cpu: Cpu) -> Records:
    """Return the records of a problem on the model of `cpu` that ship with the package."""
    return parse_records(shipped_lines(cpu.model_key, problem), SHIPPED)


def parse_records(lines: Iterable[tuple[str, str]], source: str) -> Records:
    """Return the records in lines, each given with the words for its place."""
    found: list[Recorded] = []
    faults: list[str] = []
    for place, line in lines:
        try:
            found.append(Recorded(trial=parse_record(line), source=source))
        except InvalidRecord as error:
            faults.append(f"{place} is no record: {error}")
    return Records(found=tuple(found), faults=tuple(faults))


def recorded_winners(
    records: Records, space: Space, context: ExecutionContext, *, most: int = MOST_WINNERS
) -> RecordedWinners:
    """Return at most so many kernels that were the best on the model of the space's CPU.

    The sources take turns. Those timed on this very CPU come first, then those of its class, then
    those on the same model with other features. Among these, the newest generator comes first, what
    was confirmed before what was only in a final, and then the greater ratio to the baseline.
    """
    of_model = [
        one
        for one in records.found
        if one.trial.problem == space.problem
        and one.trial.cpu.model_key == space.cpu.model_key
        and not one.trial.emulated
    ]
    failed = {
        one.trial.build
        for one in of_model
        if one.source == IN_STORE  # what others saw fail is proved here, as all is
        and one.trial.artifact
        and one.trial.outcome not in {Outcome.CORRECT, Outcome.HUNG}
    }
    careful = [
        one
        for one in of_model
        if one.trial.context == context
        and one.trial.stage in {Stage.FINAL, Stage.CONFIRM}
        and tells_speed(one.trial)
        and one.trial.artifact
    ]
    possible: dict[Candidate, Recorded] = {}
    left_out: dict[Candidate, str] = {}
    for one in _ranked(careful, space.cpu):
        candidate = one.trial.candidate
        if candidate in possible or candidate in left_out:
            continue
        if len(possible) + len(left_out) == _MOST_LOOKED_AT:
            break
        reason = "it failed on such a CPU" if one.trial.build in failed else None
        reason = reason or _why_not_possible(candidate, space)
        if reason is None:
            possible[candidate] = one
        else:
            left_out[candidate] = reason
    cycles = {one: _predicted_cycles(one, space) for one in possible}
    for candidate, predicted in cycles.items():
        times = predicted / min(cycles.values())
        if times > _SLOWER_AT_MOST:
            left_out[candidate] = f"the model expects {times:.0f} times the time of another"
            del possible[candidate]
    return RecordedWinners(
        winners=_in_turn(list(possible.values()), most),
        left_out=tuple(f"{one.text} was left out: {why}" for one, why in left_out.items()),
    )


def _predicted_cycles(candidate: Candidate, space: Space) -> float:
    family = CATALOG[candidate.micro_kernel.family]
    return predict_cycles(space.problem, candidate, family, space.cpu)


def _in_turn(ranked: Sequence[Recorded], most: int) -> tuple[Recorded, ...]:
    """Return at most so many of ranked records, of each source in turn, in the order of all.

    Dates and ratios are what a record says of itself: those of one source cannot fill all places.
    """
    turns: dict[str, int] = {}
    places: list[tuple[int, int]] = []  # which of its source, and which of all
    for place, one in enumerate(ranked):
        turn = turns[one.source] = turns.get(one.source, -1) + 1
        places.append((turn, place))
    chosen = sorted(place for _turn, place in sorted(places)[:most])
    return tuple(ranked[place] for place in chosen)


def _ranked(careful: Iterable[Recorded], cpu: Cpu) -> list[Recorded]:
    """Return the records in the order of `recorded_winners`, one for each kernel and generator."""
    newest: dict[str, float] = {}
    latest: dict[tuple[Candidate, str, int], Recorded] = {}
    for one in sorted(careful, key=lambda one: (_is_confirmed(one), one.trial.created_at)):
        generator, at = one.trial.generator, one.trial.created_at.timestamp()
        newest[generator] = max(at, newest.get(generator, at))
        latest[one.trial.candidate, generator, _distance(one.trial.cpu, cpu)] = one

    def place(one: Recorded) -> tuple[int, float, bool, float, str]:
        trial = one.trial
        assert trial.measurement is not None
        return (
            _distance(trial.cpu, cpu),
            -newest[trial.generator],
            not _is_confirmed(one),
            -trial.measurement.ratio.median,
            trial.candidate.text,
        )

    return sorted(latest.values(), key=place)


def _is_confirmed(one: Recorded) -> bool:
    return one.trial.stage is Stage.CONFIRM


def _distance(cpu: Cpu, here: Cpu) -> int:
    """Return how far a CPU of this model is from this one: 0 is the same."""
    if cpu.exact_key == here.exact_key:
        return 0
    return 1 if cpu.class_key == here.class_key else 2


def _why_not_possible(candidate: Candidate, space: Space) -> str | None:
    """Return why a candidate is none of the space, None if it is one."""
    tile = candidate.micro_kernel
    family = CATALOG.get(tile.family)
    if family is None:
        return f"the catalog of this version has no family {tile.family}"
    if missing := family.isa - space.cpu.isa:
        return f"it needs {isa_text(missing)}, which this CPU lacks"
    try:
        check_covers(space.problem, candidate)
    except InvalidCandidate as error:
        return str(error)
    if not all(
        _is_made(kernel, rows, space) for rows, kernel in candidate.kernels(space.problem.m)
    ):
        return "this version makes no such kernel for the problem"
    return None


def _is_made(kernel: Candidate, rows: Rows, space: Space) -> bool:
    """Return whether a search makes a kernel, for its part of the range of m.

    It may have been tuned for another m of the range, so its tile may be higher than its part.
    """
    tile, family = kernel.micro_kernel, CATALOG[kernel.micro_kernel.family]
    of_part = replace(space, problem=replace(space.problem, m=rows))
    is_tried = is_possible(space.problem, space.cpu, family, tile.mr, tile.nr)
    return is_tried and kernel in of_part.cuts_of(kernel)


def problems_of(repository: Repository, cpu: Cpu) -> Iterator[tuple[Problem, ExecutionContext]]:
    """Yield each problem and context in which a kernel was confirmed here, each once.

    Raises:
        StoreFailed: the database does not answer, or a row of it is damaged.
    """
    trials = repository.trials(cpu_key=cpu.exact_key, only_decisive=True)
    yield from dict.fromkeys(
        (trial.problem, trial.context)
        for trial in trials
        if trial.stage is Stage.CONFIRM and trial.measurement is not None
    )
