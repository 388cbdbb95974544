"""What was recorded of a problem in a context, and the file of a CPU: JSON Lines in gzip.

A line is one problem in one context: its candidates with the times of their builds and proofs, and
every request to time some of them, with all samples in order.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field, ValidationError, model_validator

from gemm_tuner.bench.sample import Sample
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import MAX_THREADS, ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage
from gemm_tuner.errors import InvalidRecord, InvalidSetting
from gemm_tuner.files import read_bounded
from gemm_tuner.resources import tuning_db_dir
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.wire.measurement import MAX_SAMPLES
from gemm_tuner.store.wire.members import Line
from gemm_tuner.store.wire.record import MAX_DETAIL, WireCpu
from gemm_tuner.strict_model import StrictModel
from gemm_tuner.user_file import make_folder_of, user_file

_MAX_FILE_BYTES = 1 << 28
_MAX_TEXT_BYTES = 1 << 30

Seconds = Annotated[float, Field(ge=0, le=1e7)]
Count = Annotated[int, Field(ge=1, lt=2**20)]
Nanoseconds = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**44)], ...], Field(min_length=1, max_length=MAX_SAMPLES)
]


class Series(StrictModel):
    """The samples of one runner in order: each is the time of `calls` calls, in ns.

    `switches` counts how often the system took the processor away in each, and `waited_ns` is how
    long its threads were ready to run while others ran.
    """

    calls: Count
    elapsed_ns: Nanoseconds
    switches: Nanoseconds
    waited_ns: Nanoseconds

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = {len(self.elapsed_ns), len(self.switches), len(self.waited_ns)}
        if len(counts) > 1 or min(self.elapsed_ns) < 1:
            raise ValueError("a series has as many switches and waits as positive times.")
        return self

    @classmethod
    def of(cls, calls: int, samples: Sequence[Sample]) -> Self:
        """Return the series of samples of so many calls."""
        return cls(
            calls=calls,
            elapsed_ns=tuple(one.elapsed_ns for one in samples),
            switches=tuple(one.involuntary_switches for one in samples),
            waited_ns=tuple(one.waited_ns for one in samples),
        )

    @property
    def samples(self) -> list[Sample]:
        """Return the samples."""
        return [
            Sample(elapsed_ns=elapsed_ns, involuntary_switches=switches, waited_ns=waited_ns)
            for elapsed_ns, switches, waited_ns in zip(
                self.elapsed_ns, self.switches, self.waited_ns, strict=True
            )
        ]


class RecordedCandidate(StrictModel):
    """A candidate: what came of it, and how long its build and its proof took, in seconds.

    `cycles` is what the model predicted for a call.
    """

    text: Line
    outcome: Outcome
    detail: Annotated[str, Field(max_length=MAX_DETAIL)] = ""
    compile_s: Seconds
    prove_s: Seconds = 0.0
    cycles: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        family_named(self.candidate.micro_kernel.family)
        return self

    @property
    def candidate(self) -> Candidate:
        """Return the candidate."""
        return Candidate.parse(self.text)


class RecordedRequest(StrictModel):
    """Some candidates timed together, in the same rounds as the baseline.

    `candidates` are their places among those recorded, and `series` their samples. It began
    `begin_s` after the first of its context and took `wall_s` in all. `stolen` and `others` are as
    in an `Interference`. All requests `of_leaders` are finals of the same candidates, those that
    were the fastest before.
    """

    stage: Stage
    of_leaders: bool = False
    sample_ns: Annotated[int, Field(ge=1, lt=2**40)]
    begin_s: Seconds
    wall_s: Seconds
    stolen: Annotated[float, Field(ge=0, le=1)]
    others: Annotated[float, Field(ge=0)]
    candidates: tuple[Annotated[int, Field(ge=0)], ...]
    series: tuple[Series, ...]
    baseline: Series

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stage not in {Stage.RACE, Stage.FINAL}:
            raise ValueError("candidates are recorded as in a race or in a final.")
        if self.of_leaders and self.stage is not Stage.FINAL:
            raise ValueError("leaders are timed as in a final.")
        if len(set(self.candidates)) < len(self.candidates):
            raise ValueError("a candidate takes part in a request once.")
        rounds = {len(one.elapsed_ns) for one in (*self.series, self.baseline)}
        if len(self.candidates) != len(self.series) or len(rounds) > 1:
            raise ValueError("each candidate of a request has a sample in each of its rounds.")
        return self


class Recording(StrictModel):
    """All that was recorded of a problem in a context.

    As many compilers ran at once as there were `builders`, and as many proofs as `provers`. What
    trials need was ready after `prepare_s` seconds, and a call of the baseline then took about
    `baseline_call_s`. `recipes` is the sha256 of what the kernels were made of.
    """

    format: Literal[1] = 1
    recorded_at: AwareDatetime
    cpu: WireCpu
    toolchain: Line
    generator: Line
    recipes: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    problem: Line
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)]
    regime: Regime
    baseline: Line
    baseline_call_s: Seconds
    builders: Count
    provers: Count
    prepare_s: Seconds
    candidates: tuple[RecordedCandidate, ...]
    requests: tuple[RecordedRequest, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        problem = Problem.parse(self.problem)
        problem.check_work(self.regime)
        for one in self.candidates:
            family = family_named(one.candidate.micro_kernel.family)
            if problem.product_types not in family.types:
                raise ValueError(f"{one.text!r} does not compute {problem.product_types.text}.")
        texts = {one.text for one in self.candidates}
        if len(texts) != len(self.candidates):
            raise ValueError("a candidate is recorded twice.")
        timed: dict[Stage, set[int]] = {Stage.RACE: set(), Stage.FINAL: set()}
        for request in self.requests:
            if not request.of_leaders:
                timed[request.stage].update(request.candidates)
        correct = {
            place for place, one in enumerate(self.candidates) if one.outcome is Outcome.CORRECT
        }
        if not correct or any(places != correct for places in timed.values()):
            raise ValueError("what is correct has samples of a race and of a final, and no other.")
        leaders = {frozenset(one.candidates) for one in self.requests if one.of_leaders}
        if len(leaders) > 1 or not all(one <= correct for one in leaders):
            raise ValueError("all requests of leaders are of the same correct candidates.")
        return self

    @property
    def key(self) -> tuple[str, ExecutionContext]:
        """Return the problem's text and the context."""
        return self.problem, self.context

    @property
    def context(self) -> ExecutionContext:
        """Return the context."""
        return ExecutionContext(threads=self.threads, regime=self.regime)


def recording_path(cpu: Cpu) -> Path:
    """Return the file of a CPU that ships with the package, whether it is there or not."""
    return tuning_db_dir() / "replay" / f"{cpu.exact_key}.jsonl.gz"


def read_recordings(path: Path, *, may_be_empty: bool = False) -> list[Recording]:
    """Return what a file holds, in its order.

    Raises:
        InvalidSetting: the file cannot be read, or is empty where it may not be.
        InvalidRecord: it is damaged, or a line does not follow the schema.
    """
    try:
        content = read_bounded(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidSetting(
            f"{path} cannot be read: {error.strerror or error}; name a file that "
            '"gemm-tuner model record" wrote.'
        ) from None
    found: list[Recording] = []
    keys: set[tuple[WireCpu, str, ExecutionContext]] = set()
    for number, line in enumerate(_lines(content, path), start=1):
        one = _parsed(line, f"{path}, line {number}")
        if (key := (one.cpu, *one.key)) in keys:
            raise InvalidRecord(
                f"{path}, line {number}: {one.problem!r} is there in this context already; leave "
                "one of both out."
            )
        keys.add(key)
        found.append(one)
    if not (found or may_be_empty):
        raise InvalidSetting(f'{path} is empty; fill it by "gemm-tuner model record".')
    return found


def _lines(content: bytes, path: Path) -> Iterator[bytes]:
    """Yield one line after the other: a small file may hold more than memory does."""
    left = _MAX_TEXT_BYTES
    try:
        with gzip.open(BytesIO(content)) as file:
            while line := file.readline(left + 1):
                left -= len(line)
                if left < 0:
                    raise InvalidRecord(
                        f"{path} holds more than {_MAX_TEXT_BYTES} bytes; split it."
                    )
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRecord(
            f"{path} is damaged: {error}; take it from a copy, or record it again."
        ) from None


def _parsed(line: bytes, place: str) -> Recording:
    try:
        return Recording.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "recording"
        raise InvalidRecord(
            f"{place}: {where}: {first['msg']}; record it again, or leave the line out."
        ) from None


def write_recordings(path: Path, recordings: Iterable[Recording]) -> None:
    """Write a file of recordings; its folder is made if there is none.

    Raises:
        InvalidSetting: it cannot be written.
    """
    text = "".join(f"{one.model_dump_json()}\n" for one in recordings)
    make_folder_of(path)
    with user_file(path) as file:
        file.write(gzip.compress(text.encode(), mtime=0))
