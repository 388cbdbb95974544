"""What a ranker is trained on."""

from dataclasses import replace
from pathlib import Path

import pytest
from recordings import PROBLEM, first_candidates, make_recording
from samples import CONTEXT, CPU, make_disturbed_trial, make_trial

from gemm_tuner.cli.main import run
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.record import Stage
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.replay.recording import write_recordings
from gemm_tuner.replay.training import examples_in, train
from gemm_tuner.store.repository import Repository


def test_a_store_teaches_the_timings_of_the_newest_generator(repository: Repository) -> None:
    old, first, second = first_candidates(3)
    for candidate, call_ns, generator in ((old, 100, "old"), (first, 400, "b"), (second, 800, "b")):
        repository.add_trial(
            replace(
                make_trial(call_ns=call_ns, stage=Stage.RACE),
                problem=PROBLEM,
                candidate=candidate,
                generator=generator,
            )
        )

    (found,) = examples_in(repository, CPU)

    assert found.space.problem == PROBLEM
    assert found.speeds.keys() == {first, second}
    assert found.speeds[first] / found.speeds[second] == pytest.approx(2.0)


def test_what_does_not_tell_the_speed_of_one_kernel_teaches_nothing(
    repository: Repository,
) -> None:
    range_library = Candidate.parse(
        "..4 avx2_f32_4x24 mc128_nc768_kc256 jc_ic_jr_ir | avx2_f32_6x16 mc128_nc768_kc256 "
        "jc_ic_jr_ir"
    )
    for trial in (
        make_disturbed_trial(),
        make_trial(context=replace(CONTEXT, threads=2), usable_cpus=1),
        make_trial(candidate=range_library),
    ):
        repository.add_trial(trial)

    assert examples_in(repository, CPU) == []


def test_too_little_to_learn_from_is_one_error() -> None:
    with pytest.raises(InvalidSetting, match="no problem with 8 timed candidates"):
        train([])


def test_an_empty_file_is_one_error_beside_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, empty = tmp_path / "full.jsonl.gz", tmp_path / "empty.jsonl.gz"
    write_recordings(full, [make_recording(dict.fromkeys(first_candidates(8), 500.0))])
    write_recordings(empty, [])

    assert run(["model", "train", str(full), str(empty)]) == 2

    assert "empty.jsonl.gz is empty" in capsys.readouterr().err


def test_training_without_scikit_learn_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.jsonl.gz"
    write_recordings(path, [make_recording(dict.fromkeys(first_candidates(8), 500.0))])
    monkeypatch.setattr("gemm_tuner.replay.training.has_trainer", lambda: False)

    assert run(["model", "train", str(path), "--out", str(tmp_path / "ranker.json")]) == 3

    assert "pip install gemm-tuner[model]" in capsys.readouterr().err
    assert not (tmp_path / "ranker.json").exists()
