"""Which records of a CPU model are worth trying, in which order, and what is left out."""

from dataclasses import replace
from pathlib import Path

import pytest
from samples import CONTEXT, CPU, PROBLEM, make_artifact, make_disturbed_trial, make_trial

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.select.recorded import (
    IMPORTED,
    IN_STORE,
    MOST_WINNERS,
    SHIPPED,
    Recorded,
    RecordedWinners,
    Records,
    parse_records,
    problems_of,
    recorded_winners,
    records_at_hand,
    shipped_records_of,
)
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.wire.record import dump_record

AVX512 = family_named("avx512_f32").isa
AMX = family_named("amx_bf16").isa
HERE = replace(CPU, isa=AVX512)
SPACE = Space(problem=PROBLEM, cpu=HERE)
ONES = [one for one in SPACE.defaults() if one.micro_kernel.family == "avx512_f32"][:6]
BINARY = b"\x7fELF sample"


def trial_of(number: int, **changes: object) -> Trial:
    """Return a confirming trial of one of `ONES`, with a binary of its own."""
    artifact = make_artifact(BINARY + bytes([number]), required_isa=AVX512)
    return make_trial(**{"cpu": HERE, "candidate": ONES[number], "artifact": artifact, **changes})  # type: ignore[arg-type]  # by name


def choose_of(*trials: Trial, most: int = MOST_WINNERS) -> RecordedWinners:
    records = Records(found=tuple(Recorded(trial=one, source=IN_STORE) for one in trials))
    return recorded_winners(records, SPACE, CONTEXT, most=most)


def test_the_greatest_ratio_comes_first_and_three_are_enough() -> None:
    trials = [trial_of(number, call_ns=900 - 100 * number) for number in range(4)]

    found = choose_of(*trials)

    assert found.candidates == (ONES[3], ONES[2], ONES[1])
    assert not found.left_out


def test_a_library_for_a_range_that_was_timed_at_this_m_is_none_of_its_kernels() -> None:
    several = Candidate.parse(f"..9 {ONES[0].text} | {ONES[0].text}")

    found = choose_of(trial_of(0), trial_of(1, candidate=several, stage=Stage.FINAL, call_ns=100))

    assert found.candidates == (ONES[0],)
    assert not found.left_out


@pytest.mark.parametrize(
    ("few", "reason"),
    [
        ("..1 avx512_f32_8x16 mc8_nc48_kc64 jc_ic_jr_ir", None),
        ("..1 avx512_f32_8x16 mc16_nc48_kc64 jc_ic_jr_ir", "makes no such kernel"),
        ("..1 avx512_f32_14x16 mc14_nc48_kc64 jc_ic_jr_ir", "makes no such kernel"),
    ],
)
def test_of_several_kernels_each_is_one_that_is_made_for_its_part(
    few: str, reason: str | None
) -> None:
    problem = Problem.parse("f32 1..9x48x64")
    several = Candidate.parse(f"{few} | avx512_f32_9x16 mc9_nc48_kc64 jc_ic_jr_ir")
    trial = trial_of(0, problem=problem, candidate=several)

    found = recorded_winners(
        Records(found=(Recorded(trial=trial, source=IMPORTED),)),
        replace(SPACE, problem=problem),
        CONTEXT,
    )

    assert found.candidates == (() if reason else (several,))
    assert [reason in told for told in found.left_out if reason] == [True] * bool(reason)


def test_this_cpu_comes_before_its_class_and_that_before_the_model() -> None:
    slow_here = trial_of(0, call_ns=990)
    of_class = trial_of(1, call_ns=500, cpu=replace(HERE, stepping=2))
    of_model = trial_of(2, call_ns=100, cpu=replace(HERE, isa=AVX512 | AMX))

    found = choose_of(of_model, of_class, slow_here)

    assert found.candidates == (ONES[0], ONES[1], ONES[2])


def test_the_newest_generator_comes_first_whatever_the_ratio() -> None:
    former = trial_of(0, call_ns=100, generator="before", minute=0)
    newest = trial_of(1, call_ns=900, generator="now", minute=5)

    assert choose_of(former, newest).candidates == (ONES[1], ONES[0])


def test_what_was_confirmed_comes_before_what_was_in_a_final() -> None:
    final = trial_of(0, call_ns=100, stage=Stage.FINAL)
    confirmed = trial_of(1, call_ns=900)

    assert choose_of(final, confirmed).candidates == (ONES[1], ONES[0])


def test_no_source_takes_all_places_by_what_it_says_of_itself() -> None:
    hostile = [trial_of(n, call_ns=100, generator="zzz", minute=59) for n in (0, 1, 2)]
    own, shipped = trial_of(3, call_ns=900), trial_of(4, call_ns=950)
    found = [Recorded(trial=one, source=IMPORTED) for one in hostile]
    found += [Recorded(trial=own, source=IN_STORE), Recorded(trial=shipped, source=SHIPPED)]

    chosen = recorded_winners(Records(found=tuple(found)), SPACE, CONTEXT).candidates

    assert len(chosen) == MOST_WINNERS
    assert {ONES[3], ONES[4]} < set(chosen)


def test_a_failure_that_others_tell_of_vetoes_nothing() -> None:
    won = trial_of(0)
    fails = replace(won, outcome=Outcome.CRASHED, measurement=None)
    found = (Recorded(trial=won, source=SHIPPED), Recorded(trial=fails, source=IMPORTED))

    def chosen(*records: Recorded) -> tuple[Candidate, ...]:
        return recorded_winners(Records(found=records), SPACE, CONTEXT).candidates

    assert chosen(*found) == (ONES[0],)
    assert chosen(*found, Recorded(trial=fails, source=IN_STORE)) == ()


def test_what_the_model_expects_to_be_far_slower_is_left_out() -> None:
    slow = next(one for one in SPACE.defaults() if one.micro_kernel.family == "scalar_f32")

    found = choose_of(trial_of(0), trial_of(1, candidate=slow, call_ns=1))

    assert found.candidates == (ONES[0],)
    assert "times the time of another" in found.left_out[0]


def test_of_one_kernel_its_last_confirmation_counts() -> None:
    was_fast = trial_of(0, call_ns=100, minute=0)
    is_slow = trial_of(0, call_ns=990, minute=5)
    other = trial_of(1, call_ns=500)

    assert choose_of(was_fast, is_slow, other).candidates == (ONES[1], ONES[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu": replace(HERE, model=99)},
        {"cpu": replace(HERE, vendor="GenuineIntel")},
        {"problem": Problem.parse("f32 128x3072x768 nk bias")},
        {"context": ExecutionContext(regime=Regime.COLD_WEIGHTS)},
        {"context": ExecutionContext(threads=2)},
        {"stage": Stage.RACE},
        {"outcome": Outcome.WRONG, "measurement": None},
    ],
    ids=["model", "vendor", "problem", "regime", "threads", "stage", "outcome"],
)
def test_what_says_nothing_of_this_question_is_not_taken(changes: dict[str, object]) -> None:
    found = choose_of(trial_of(0, **changes))

    assert found == RecordedWinners()


def test_what_was_disturbed_is_not_taken() -> None:
    disturbed = replace(make_disturbed_trial(), cpu=HERE, candidate=ONES[0])

    assert not choose_of(disturbed).winners


def test_a_kernel_that_failed_on_such_a_cpu_is_left_out_with_a_word() -> None:
    was_fast = trial_of(0)
    failed = trial_of(0, outcome=Outcome.WRONG, measurement=None, cpu=replace(HERE, stepping=2))

    found = choose_of(was_fast, failed, trial_of(1))

    assert found.candidates == (ONES[1],)
    assert found.left_out == (f"{ONES[0].text} was left out: it failed on such a CPU",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gone_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir", "has no family gone_f32"),
        ("avx512_f32_99x48 mc128_nc768_kc256 jc_ic_jr_ir", "has no register tile 99x48"),
        ("avx512_f32_8x48 mc8_nc48_kc13 jc_ic_jr_ir", "makes no such kernel"),
        ("amx_bf16_16x16 mc128_nc768_kc256 jc_ic_jr_ir", "which this CPU lacks"),
    ],
)
def test_what_this_version_cannot_make_is_left_out_with_a_word(text: str, reason: str) -> None:
    found = choose_of(replace(trial_of(0), candidate=Candidate.parse(text)))

    assert not found.winners
    (told,) = found.left_out
    assert text in told
    assert reason in told


def test_records_come_from_the_store_what_was_imported_and_the_package(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.exchange.tuning_db_dir", lambda: tmp_path)
    repository.add_trial(trial_of(0))
    repository.add_imported([trial_of(1)])
    (tmp_path / f"{HERE.exact_key}.jsonl").write_text(dump_record(trial_of(2)) + "\n")

    found = records_at_hand(repository, PROBLEM, HERE).found

    assert [(one.trial.candidate, one.source) for one in found] == [
        (ONES[0], IN_STORE),
        (ONES[1], IMPORTED),
        (ONES[2], SHIPPED),
    ]


def test_of_a_shipped_file_only_the_lines_of_a_problem_are_read_and_damage_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.exchange.tuning_db_dir", lambda: tmp_path)
    whole = dump_record(trial_of(0))
    of_other_problem = whole.replace("128x3072x768", "1x1x1")[:-9]
    damaged = whole.replace('"threads":1', '"threads":"one"')
    text = f"{of_other_problem}\n{damaged}\n{whole}"
    (tmp_path / f"{HERE.exact_key}.jsonl").write_text(text)
    (tmp_path / f"{replace(HERE, model=9).exact_key}.jsonl").write_text("\n".join([damaged] * 3))

    records = shipped_records_of(PROBLEM, HERE)

    assert [one.trial for one in records.found] == [trial_of(0)]
    (fault,) = records.faults
    assert fault.startswith(f"line 2 of {HERE.exact_key}.jsonl is no record: threads")


def test_lines_that_are_no_records_are_told_with_their_place() -> None:
    records = parse_records([("line 1", "{}"), ("line 2", dump_record(trial_of(0)))], "a file")

    assert [one.source for one in records.found] == ["a file"]
    assert records.faults[0].startswith("line 1 is no record: ")


def test_the_problems_measured_here_are_named_once(repository: Repository) -> None:
    elsewhere = replace(HERE, stepping=9)
    other = Problem.parse("f32 1x64x64 nk none")
    for trial in (
        trial_of(0),
        trial_of(1),
        trial_of(0, problem=other, stage=Stage.FINAL),
        trial_of(2, cpu=elsewhere, problem=other),
    ):
        repository.add_trial(trial)
    repository.add_imported([trial_of(3, problem=other)])

    assert list(problems_of(repository, HERE)) == [(PROBLEM, CONTEXT)]
