"""Recordings with known times, made without a machine."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

from samples import CPU

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage
from gemm_tuner.replay.recording import RecordedCandidate, RecordedRequest, Recording, Series
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.wire.record import WireCpu
from gemm_tuner.strategies.features import FEATURES
from gemm_tuner.strategies.ranker import Ranker, Tree

PROBLEM = Problem.parse("f32 64x64x64 nk none")
BASELINE_NS = 1000
VISITS = {Stage.RACE: (15,), Stage.FINAL: (33,)}
VISITS_WITH_LUCK = {Stage.RACE: (15,), Stage.FINAL: (21, 6, 6)}
ROUNDS_OF_LEADERS = 31
SAMPLE_NS = {Stage.RACE: 400_000, Stage.FINAL: 2_000_000}


def first_candidates(count: int | None = None, problem: Problem = PROBLEM) -> list[Candidate]:
    """Return the candidates that the model ranks first; each tile's first without a count."""
    return shortlist(Space(problem=problem, cpu=CPU), count)


def make_recording(
    call_ns: Mapping[Candidate, float],
    *,
    problem: Problem = PROBLEM,
    regime: Regime = Regime.HOT,
    failed: Sequence[Candidate] = (),
    compile_s: float = 1.0,
    prove_s: float = 0.25,
    waited_ns: int = 0,
    lucky: Candidate | None = None,
    leaders: Mapping[Candidate, Sequence[float]] = MappingProxyType({}),
) -> Recording:
    """Return a recording in which each call of a candidate takes the same time.

    Those that `failed` were wrong. Threads waited so long in each sample. The `lucky` one took a
    quarter less in the first and longest of three visits of finals. `leaders` took so long in the
    rounds of each final of their own, in ns.
    """
    correct = list(call_ns)

    def series(one_ns: float, stage: Stage, rounds: int) -> Series:
        calls = max(1, round(SAMPLE_NS[stage] / one_ns))
        return Series(
            calls=calls,
            elapsed_ns=(round(calls * one_ns),) * rounds,
            switches=(0,) * rounds,
            waited_ns=(waited_ns,) * rounds,
        )

    def request(stage: Stage, visit: int, rounds: int) -> RecordedRequest:
        is_luck = stage is Stage.FINAL and visit == 0
        return RecordedRequest(
            stage=stage,
            sample_ns=SAMPLE_NS[stage],
            begin_s=0.0,
            wall_s=1.0,
            stolen=0.0,
            others=0.0,
            candidates=tuple(range(len(correct))),
            series=tuple(
                series(0.75 * one_ns if is_luck and one == lucky else one_ns, stage, rounds)
                for one, one_ns in call_ns.items()
            ),
            baseline=series(BASELINE_NS, stage, rounds),
        )

    def final_of_leaders(final: int) -> RecordedRequest:
        one = request(Stage.FINAL, final + 1, ROUNDS_OF_LEADERS)
        series_of = [
            series(times[final], Stage.FINAL, ROUNDS_OF_LEADERS) for times in leaders.values()
        ]
        return one.model_copy(
            update={
                "of_leaders": True,
                "candidates": tuple(correct.index(leader) for leader in leaders),
                "series": tuple(series_of),
            }
        )

    return Recording(
        recorded_at=datetime(2026, 11, 26, tzinfo=UTC),
        cpu=WireCpu.of(CPU),
        toolchain="gcc 12.2.0",
        generator="0.1.0-aaaa",
        problem=problem.text,
        threads=1,
        regime=regime,
        baseline="onednn 3.2.0",
        baseline_call_s=BASELINE_NS / 1e9,
        builders=2,
        provers=2,
        prepare_s=2.0,
        candidates=tuple(
            RecordedCandidate(
                text=one.text,
                outcome=Outcome.WRONG if one in failed else Outcome.CORRECT,
                compile_s=compile_s,
                prove_s=prove_s,
                cycles=1000.0,
            )
            for one in (*correct, *failed)
        ),
        requests=(
            *(
                request(stage, visit, rounds)
                for stage, visits in (VISITS_WITH_LUCK if lucky else VISITS).items()
                for visit, rounds in enumerate(visits)
            ),
            *map(final_of_leaders, range(max(map(len, leaders.values()), default=0))),
        ),
    )


def make_ranker() -> Ranker:
    """Return a ranker of two trees, one a leaf: tiles of up to four rows first."""
    tree = Tree(
        feature=(FEATURES.index("mr"), -2, -2),
        threshold=(4.5, 0.0, 0.0),
        left=(1, -1, -1),
        right=(2, -1, -1),
        value=(0.0, 1.0, 2.0),
    )
    leaf = Tree(feature=(-2,), threshold=(0.0,), left=(-1,), right=(-1,), value=(3.0,))
    return Ranker(features=FEATURES, trees=(tree, leaf))
