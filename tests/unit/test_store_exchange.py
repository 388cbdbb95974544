import io
import json
from dataclasses import replace
from datetime import timedelta, timezone
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from samples import (
    CPU,
    make_disturbed_trial,
    make_emulated_trial,
    make_failed_trial,
    make_trial,
    make_trial_beside_mkl,
)

from gemm_tuner.domain.candidate import MOST_KERNELS, Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.measurement import of_several_processes
from gemm_tuner.domain.record import Trial
from gemm_tuner.errors import InvalidRecord
from gemm_tuner.resources import tuning_db_dir
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.exchange import (
    export_records,
    import_records,
    import_shipped,
    read_lines,
)
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import Origin
from gemm_tuner.store.wire.record import MAX_DETAIL, dump_record, parse_record, record_schema

SCHEMA_TEXT = json.dumps(record_schema(), indent=2) + "\n"


def edited(**changes: Any) -> str:  # noqa: ANN401 - JSON values
    """Return a record's JSON with some members changed."""
    return json.dumps(json.loads(dump_record(make_trial())) | changes)


def test_the_committed_schema_is_that_of_the_code() -> None:
    committed = (tuning_db_dir() / "record.schema.json").read_text()

    assert committed == SCHEMA_TEXT, (
        "write it anew: python -c 'import json; "
        "from gemm_tuner.store.wire.record import record_schema; "
        "print(json.dumps(record_schema(), indent=2))' > tuning_db/record.schema.json"
    )


def _raced_with_cold_weights() -> Trial:
    trial = make_trial_beside_mkl()
    assert trial.measurement is not None
    raced = [replace(one, regime=Regime.COLD_WEIGHTS) for one in trial.measurement.raced]
    return replace(trial, measurement=replace(trial.measurement, raced=tuple(raced)))


@pytest.mark.parametrize(
    "trial",
    [
        make_trial(),
        make_failed_trial(),
        make_emulated_trial(),
        make_trial(conditions=None),
        make_trial(usable_cpus=8),
        make_disturbed_trial(),
        _raced_with_cold_weights(),
    ],
)
def test_a_record_follows_the_schema_and_reads_back(trial: Trial) -> None:
    line = dump_record(trial)

    Draft202012Validator(record_schema()).validate(json.loads(line))
    assert "\n" not in line
    assert parse_record(line) == trial


def test_a_record_of_old_without_the_cpus_stays_what_it_is() -> None:
    line = dump_record(make_trial())

    assert "usable_cpus" not in line
    assert parse_record(line).usable_cpus is None


def test_the_same_instant_in_another_zone_is_the_same_record() -> None:
    trial = make_trial()
    zone = timezone(timedelta(hours=5, minutes=30))

    assert dump_record(replace(trial, created_at=trial.created_at.astimezone(zone))) == dump_record(
        trial
    )


def test_only_a_proof_by_emulation_speaks_of_it() -> None:
    assert "emulated" not in json.loads(dump_record(make_trial()))
    assert json.loads(dump_record(make_emulated_trial()))["emulated"] == ["avx512_fp16"]


def test_only_what_was_measured_beside_other_work_says_so() -> None:
    assert "interference" not in json.loads(dump_record(make_trial()))["measurement"]
    told = json.loads(dump_record(make_disturbed_trial()))["measurement"]["interference"]
    assert told == {"disturbed_rounds": 0.9, "stolen": 0.0, "others": 1.5}


def test_each_process_of_a_measurement_is_kept() -> None:
    one = make_trial().measurement
    slower = make_disturbed_trial(call_ns=1100).measurement
    assert one is not None
    assert slower is not None
    _place, (both,) = of_several_processes([[one], [slower]])
    trial = make_trial(measurement=both)

    line = dump_record(trial)

    assert "repeats" not in json.loads(dump_record(make_trial()))["measurement"]
    assert len(json.loads(line)["measurement"]["repeats"]) == 1
    assert parse_record(line) == trial


def test_a_very_long_detail_is_cut() -> None:
    trial = parse_record(dump_record(make_trial(detail="x" * (MAX_DETAIL + 1))))

    assert trial.detail == "x" * MAX_DETAIL


def test_as_many_kernels_as_a_range_may_have_are_read_back() -> None:
    kernel = (
        "avx512_bf16_pairs_dot_16x16 mc2147483648_nc2147483648_kc2147483648 ic_jc_jr_ir pack_x "
        "convert_once pf65536 ws8 shuffle_x stream_y u16 grid1024x1024x1024"
    )
    below = [f"..{boundary} {kernel}" for boundary in range(2**31 - MOST_KERNELS, 2**31 - 1)]
    trial = make_trial(candidate=Candidate.parse(" | ".join([*below, kernel])))

    assert parse_record(dump_record(trial)) == trial


def test_a_trial_outside_the_schema_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="toolchain"):
        dump_record(make_trial(toolchain="x" * 5000))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "Invalid JSON"),
        ("[]", "record"),
        ("{}", "created_at"),
        (edited(format=2), "format"),
        (edited(extra=1), "extra"),
        (edited(created_at="2026-11-20T12:00:00"), "created_at"),
        (edited(created_at="0001-01-01T00:00:00+05:00"), "created_at"),
        (edited(problem="f32 -1x2x3"), "m = -1"),
        (edited(problem="f32 1x2x3 nk biass"), "biass"),
        (edited(problem="x" * 2000), "problem"),
        (edited(generator="0.1.0\0"), "generator"),
        (edited(candidate="no candidate"), "candidate"),
        (edited(threads=0), "threads"),
        (edited(threads=True), "threads"),
        (edited(threads="1"), "threads"),
        (edited(regime="warm"), "regime"),
        (
            edited(problem="matmul f32 1x2x3", regime="cold_weights"),
            "problem 'matmul f32 1x2x3 nk none' has no weights that could be cold",
        ),
        (edited(outcome="fast"), "outcome"),
        (edited(outcome="wrong"), "measurement needs the outcome correct"),
        (edited(emulated=["avx512_fp16"]), "measurement cannot be of emulated"),
        (edited(cpu=None), "cpu"),
        (edited(artifact={"sha256": "0"}), "artifact"),
        (edited(conditions=json.loads("[NaN]")), "conditions"),
        (dump_record(make_trial()).replace('"noise":0.01', '"noise":NaN'), "noise"),
        (dump_record(make_trial()).replace("[8000,", "[-8000,"), "samples_ns"),
        (dump_record(make_trial()).replace("[8000,8000,", "[8000,"), "pair up"),
        (dump_record(make_trial()).replace('"fma"', '"mmx"'), "isa"),
    ],
)
def test_a_bad_line_is_refused_with_its_reason(line: str, reason: str) -> None:
    with pytest.raises(InvalidRecord, match=reason):
        parse_record(line)


def test_bad_lines_are_reported_and_the_others_imported(repository: Repository) -> None:
    lines = [dump_record(make_trial()), "junk", "", dump_record(make_trial(minute=1)), "{}"]

    report = import_records(repository, lines)

    assert (report.added, report.known) == (2, 0)
    assert [line.number for line in report.rejected] == [2, 5]
    assert all(line.reason for line in report.rejected)
    assert len(repository.trials(origin=Origin.IMPORTED)) == 2


def test_a_byte_that_is_not_utf8_refuses_one_line(repository: Repository) -> None:
    file = b"\n".join(
        [
            dump_record(make_trial()).encode(),
            b"\xff\xfe",
            dump_record(make_trial(minute=1)).encode(),
        ]
    )

    report = import_records(repository, read_lines(io.BytesIO(file)))

    assert report.added == 2
    assert [line.number for line in report.rejected] == [2]


def test_a_line_without_end_is_one_line_that_is_refused(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = dump_record(make_trial()).encode()
    monkeypatch.setattr("gemm_tuner.store.exchange.MAX_LINE_BYTES", len(record) + 1)

    report = import_records(repository, read_lines(io.BytesIO(b"x" * 10_000 + b"\n" + record)))

    assert report.added == 1
    assert [line.number for line in report.rejected] == [1]


def test_importing_again_changes_nothing(repository: Repository) -> None:
    lines = [dump_record(make_trial()), dump_record(make_failed_trial())]
    import_records(repository, lines)

    report = import_records(repository, lines)

    assert (report.added, report.known) == (0, 2)


def test_what_is_exported_can_be_imported(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.exchange.PAGE", 2)
    trials = tuple(make_trial(minute=minute) for minute in range(5))
    for trial in trials:
        repository.add_trial(trial)
    stream = io.StringIO()

    count = export_records(repository, stream)

    assert count == 5
    assert tuple(parse_record(line) for line in stream.getvalue().splitlines()) == trials


# Other tests import records into each kind of database; these are thousands.
@pytest.mark.proof
@pytest.mark.parametrize("databases", ["sqlite"], indirect=True, scope="session")
def test_shipped_records_can_be_read_and_imported(repository: Repository) -> None:
    shipped = {
        line for path in tuning_db_dir().glob("*.jsonl") for line in path.read_text().splitlines()
    }

    report = import_shipped(repository)

    assert report.added == len(shipped)


def test_each_shipped_file_is_named_for_its_cpu_and_names_known_families() -> None:
    for path in tuning_db_dir().glob("*.jsonl"):
        trials = [parse_record(line) for line in path.read_text().splitlines()]

        assert {trial.cpu.exact_key for trial in trials} == {path.stem}
        for family in {trial.candidate.micro_kernel.family for trial in trials}:
            assert family_named(family).name == family


def test_the_key_of_a_cpu_is_a_plain_file_name() -> None:
    assert "/" not in CPU.exact_key
    assert " " not in CPU.exact_key
