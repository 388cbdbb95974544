"""One packed copy of the weights for several m: swept, served, fetched and called."""

import json
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calm import let_nothing_disturb
from planted_times import plant_speeds
from served import Site

import gemm_tuner
from gemm_tuner import Client
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.main import run
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.errors import SignatureInvalid
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.layer import Layer
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.select.shared_weights import share
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.attestation import MeasuringKeys
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep
from gemm_tuner.tuning.sweep_shared import sweep_shared

ROWS, N, K = (1, 8), 64, 96
# Any loss is less than this.
MAX_LOSS = 0.99
NARROW = Candidate.parse(f"scalar_f32_2x4 mc8_nc{N}_kc{K} jc_ic_jr_ir")
WIDE = Candidate.parse(f"scalar_f32_1x8 mc8_nc{N}_kc{K} jc_ic_jr_ir")
SETTINGS = SweepSettings(budget_s=0.3, toolchain=find_toolchain(), baseline="scalar")
ARGUMENTS = [
    "sweep", "1,8", str(N), str(K), "--epilogue", "bias", "--budget", "1s", "--share-weights",
    "--max-loss", "99", "--json",
]  # fmt: skip


def _url(folder: Path) -> str:
    return f"sqlite:///{folder}/store.sqlite3"


def _trials(url: str) -> int:
    return len(Repository(open_database(url)).trials())


@pytest.fixture
def swept(swept_once: str, data_directory: Path) -> str:
    """Return the URL of the swept database, whose measurements are believed in this test."""
    measured_with = MeasuringKeys(data_directory / "gemm-tuner").own()
    assert measured_with is not None
    MeasuringKeys().accept(measured_with)
    return swept_once


@pytest.fixture(scope="module")
def swept_once(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a database in which a layer for two m was swept, to share weights."""
    url = _url(tmp_path_factory.mktemp("swept"))
    with pytest.MonkeyPatch.context() as patches:
        let_nothing_disturb(patches)
        plant_speeds(patches, repeat(2.0))
        assert run([*ARGUMENTS, "--db", url]) == 0
    return url


def _assert_computes(layer: Layer, rows: int) -> None:
    random = np.random.default_rng(rows)
    x, w = random.standard_normal((rows, K), np.float32), random.standard_normal((N, K), np.float32)
    bias = random.standard_normal(N, np.float32)

    y = layer(x, layer.pack(w), bias=bias)

    np.testing.assert_allclose(y, x.astype(np.float64) @ w.T + bias, rtol=1e-4, atol=1e-4)


def test_a_sweep_ends_in_one_format_for_all_and_is_not_repeated(
    swept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _trials(swept)

    code = run([*ARGUMENTS, "--db", swept])

    (layer,) = json.loads(capsys.readouterr().out)["shared"]
    assert code == 0
    assert _trials(swept) == before
    assert [kernel["m"] for kernel in layer["kernels"]] == ["1", "8"]
    assert len(layer["formats"]) == 1
    assert layer["packed_bytes"] <= layer["best_packed_bytes"]
    assert {kernel["chosen"]["packed_format"] for kernel in layer["kernels"]} == {*layer["formats"]}
    assert min(kernel["chosen"]["loss"] for kernel in layer["kernels"]) >= 0


def test_the_table_names_what_each_m_uses(swept: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([*[argument for argument in ARGUMENTS if argument != "--json"], "--db", swept])

    table = capsys.readouterr().out.partition("Shared weights: f32 64x96 nk bias, hot, 1 thread")[2]
    lines = table.strip().splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["m", "1", "8"]
    assert lines[3].startswith("packed weights: 24.0 KiB in 1 format; the best of each m alone")


def test_a_layer_is_fetched_and_reads_one_packed_copy(swept: str, tmp_path: Path) -> None:
    site = Site.at(swept, tmp_path / "key.pem", Repository(open_database(swept)))
    question: dict[str, Any] = {"m": ROWS, "epilogue": "bias", "max_loss": MAX_LOSS}
    cache = tmp_path / "cache"

    with site.serving() as address:
        client = Client(address, cache_dir=cache)
        layer = client.layer(N, K, **question)
        assert client.layer(N, K, **question) is layer
    kept = Client(address, cache_dir=cache).layer(N, K, **question)

    for one in (layer, kept):
        assert [type(kernel) for kernel in one.kernels] == [Kernel, Kernel]
        assert len(one.formats) == 1
        for rows in (1, 8, 21):
            _assert_computes(one, rows)


def test_without_service_and_cache_one_library_computes_the_layer(tmp_path: Path) -> None:
    client = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache")

    layer = client.layer(N, K, m=ROWS, epilogue="bias")

    (kernel,) = layer.kernels
    assert isinstance(kernel, FallbackKernel)
    assert "does not answer" in kernel.reason
    _assert_computes(layer, 5)


def test_verdicts_for_other_problems_are_refused(swept: str, tmp_path: Path) -> None:
    def turn_around(path: str, body: bytes) -> bytes:
        if path != "/v1/resolve:batch":
            return body
        document = json.loads(body)
        return json.dumps({"results": document["results"][::-1]}).encode()

    def cut_off(path: str, body: bytes) -> bytes:
        if path != "/v1/resolve:batch":
            return body
        return json.dumps({"results": json.loads(body)["results"][:1]}).encode()

    site = Site.at(swept, tmp_path / "key.pem", Repository(open_database(swept)))
    for edit, fault in ((turn_around, "not for what was asked"), (cut_off, "1 verdicts for 2")):
        with site.serving(edit) as address, pytest.raises(SignatureInvalid, match=fault):
            Client(address, cache_dir=tmp_path / "cache").layer(
                N, K, m=ROWS, epilogue="bias", max_loss=MAX_LOSS
            )


def test_a_layer_is_tuned_without_a_server(swept: str) -> None:
    before = _trials(swept)

    tuned = gemm_tuner.tune_layer(
        N, K, m=ROWS, epilogue="bias", max_loss=MAX_LOSS, budget_s=1, db_url=swept
    )

    assert _trials(swept) == before
    assert tuned.layer.formats == tuned.sharing.formats
    _assert_computes(tuned.layer, 9)


def _sweep_like(
    problem: Problem,
    like: Candidate | None,
    repository: Repository,
    *,
    on_progress: Callable[[Progress], None] = lambda _step: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> SweepResult:
    results = sweep(
        problem,
        contexts=[ExecutionContext()],
        cpu=detect_cpu(),
        repository=repository,
        settings=SETTINGS,
        on_progress=on_progress,
        is_stopped=is_stopped,
        like=like,
    )
    return results[0]


@pytest.mark.proof
def test_a_search_in_a_format_is_resumed_and_not_repeated(tmp_path: Path) -> None:
    problem = Problem.create(8, N, K)
    repository = Repository(open_database(_url(tmp_path)))
    _sweep_like(problem, None, repository)
    steps: list[Progress] = []
    _sweep_like(
        problem, NARROW, repository, on_progress=steps.append, is_stopped=lambda: bool(steps)
    )
    stopped = repository.trials(problem=problem)

    found = _sweep_like(problem, NARROW, repository)
    confirmed = repository.trials(problem=problem)
    again = _sweep_like(problem, NARROW, repository)

    assert not any(_is_confirmed_like(NARROW, trial) for trial in stopped)
    assert any(_is_confirmed_like(NARROW, trial) for trial in confirmed)
    assert found.verdict.candidate is not None
    assert found.verdict.candidate.micro_kernel.nr == NARROW.micro_kernel.nr
    assert repository.trials(problem=problem) == confirmed
    assert again.verdict == found.verdict


@pytest.mark.proof
def test_kernels_are_searched_in_the_formats_of_other_m(tmp_path: Path) -> None:
    problems = [Problem.create(m, N, K) for m in (4, 8)]
    repository = Repository(open_database(_url(tmp_path)))
    for problem, like in zip(problems, (NARROW, WIDE), strict=True):
        _sweep_like(problem, like, repository)

    facts: Any = {"cpu": detect_cpu(), "context": ExecutionContext(), "max_loss": MAX_LOSS}

    steps: list[Progress] = []

    before = share(repository, problems, **facts)
    after = sweep_shared(
        problems,
        **facts,
        repository=repository,
        settings=SETTINGS,
        on_progress=steps.append,
        is_stopped=lambda: False,
    )

    assert len(before.formats) == 2
    assert len(after.formats) == 1
    assert {step.stage.partition(", ")[0] for step in steps} <= {"m = 4", "m = 8"}
    assert steps[0].stage.endswith(", preparing")


def _is_confirmed_like(like: Candidate, trial: Trial) -> bool:
    is_like = trial.candidate.micro_kernel.nr == like.micro_kernel.nr
    return is_like and trial.stage is Stage.CONFIRM


@pytest.mark.parametrize("m", ["8", "8,8"])
def test_one_m_has_nothing_to_share(m: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["sweep", m, "64", "96", "--share-weights"])

    assert code == 2
    assert "nothing to share" in capsys.readouterr().err
