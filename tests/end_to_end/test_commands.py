"""The smaller commands, on a store that holds one kernel."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import CANDIDATE, PROBLEM, Site, keep_trial

from gemm_tuner.build.compile import Build, compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.arguments.layers import layers_of
from gemm_tuner.cli.main import run
from gemm_tuner.client.client import Client
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage
from gemm_tuner.domain.source import Source
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.prove import prove

SIZES = ["8", "32", "16", "--epilogue", "bias+relu"]
ANSWER_IS_NO = 1
AMX_FAMILY = family_named("amx_bf16")
AMX = frozenset({IsaFeature.AMX_TILE, IsaFeature.AMX_BF16})


def _json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:  # noqa: ANN401 - JSON
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_cpu_says_why_a_family_is_not_usable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMM_TUNER_ISA", "avx2")

    code = run(["cpu"])

    lines = capsys.readouterr().out.splitlines()
    (avx512,) = [line for line in lines if line.startswith("  avx512_f32 ")]
    assert code == 0
    assert "avx512f" in avx512
    (why,) = [line for line in lines if line.startswith("amx_") and "avx512f" in line]
    assert "not among the features that GEMM_TUNER_ISA leaves, avx2" in why
    assert any(line.split() == ["scalar_f32", "yes"] for line in lines)


def test_cpu_gives_the_same_facts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = _json(["cpu"], capsys)

    assert facts["physical_cores"] >= 1
    assert facts["usable_cpus"] >= facts["physical_cores"]
    assert {family["name"] for family in facts["families"]} >= {"avx512_f32", "scalar_f32"}


def test_resolve_names_the_kernel_of_the_store(
    site: Site, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = _json(["resolve", *SIZES, "--db", site.settings.database_url], capsys)

    assert facts["decision"] == "tuned"
    assert facts["candidate"] == CANDIDATE.text
    assert facts["artifact"]["sha256"] == build.artifact.sha256


def test_resolve_asks_a_service(
    site: Site, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    with site.serving() as address:
        facts = _json(["resolve", *SIZES, "--url", address], capsys)

    assert facts["problem"] == PROBLEM.text
    assert facts["artifact"]["sha256"] == build.artifact.sha256
    assert facts["explain"]


def test_resolve_tells_the_same_facts_from_both_places(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    here = _json(["resolve", *SIZES, "--db", site.settings.database_url], capsys)
    with site.serving() as address:
        there = _json(["resolve", *SIZES, "--url", address], capsys)

    assert here == there


def test_resolve_says_no_by_its_exit_code(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["resolve", "3", "5", "7", "--db", site.settings.database_url])

    assert code == ANSWER_IS_NO
    assert capsys.readouterr().out == "baseline: nothing was measured for this problem\n"


def test_resolve_says_no_to_a_kernel_that_may_be_slower(
    tmp_path: Path, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/slower.sqlite3"
    keep_trial(Repository(open_database(url)), build, cpu=detect_cpu(), speed=0.99)

    code = run(["resolve", *SIZES, "--db", url])

    assert code == ANSWER_IS_NO
    assert capsys.readouterr().out.startswith("tie: 0.99")


def test_explain_tells_each_step(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["explain", "3", "5", "7", "--db", site.settings.database_url])

    steps = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [step.split(":")[0] for step in steps] == [
        "- exact",
        "- sibling",
        "- bucket",
        "- same_model",
        "- predicted",
        "- baseline",
        "trials here",
    ]


def test_source_prints_what_was_compiled(
    site: Site, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["source", *SIZES, "--db", site.settings.database_url])

    assert code == 0
    assert capsys.readouterr().out == build.source.text


def test_a_kernel_says_who_made_it_with_what_and_when(
    site: Site, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    (trial,) = site.repository.trials(problem=PROBLEM, only_decisive=True)
    lines = [
        f"source: rendered by {generator_version()}.",
        f"binary: compiled by {build.artifact.toolchain} with {' '.join(build.artifact.flags)}.",
        f"trial: timed on {trial.created_at:%Y-%m-%d at %H:%M} UTC.",
    ]

    run(["explain", *SIZES, "--db", site.settings.database_url])
    explained = capsys.readouterr().out.splitlines()
    run(["source", *SIZES, "--db", site.settings.database_url])
    beside_source = capsys.readouterr().err.splitlines()
    facts = _json(["explain", *SIZES, "--db", site.settings.database_url], capsys)

    assert [line for line in explained if line in lines] == lines
    assert beside_source == lines
    assert facts["flags"] == list(build.artifact.flags)
    assert facts["tried_at"] == trial.created_at.isoformat()


def test_source_renders_any_candidate(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["source", *SIZES, "--candidate", CANDIDATE.text])

    assert code == 0
    assert capsys.readouterr().out == build.source.text


def test_verify_proves_a_candidate_and_keeps_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/proofs.sqlite3"

    code = run(["verify", *SIZES, "--candidate", CANDIDATE.text, "--db", url])

    (trial,) = Repository(open_database(url)).trials()
    assert code == 0
    assert capsys.readouterr().out == f"{PROBLEM.text}: correct: {CANDIDATE.text}\n"
    assert trial.outcome is Outcome.CORRECT
    assert trial.measurement is None
    assert not trial.emulated


@pytest.mark.isa(*(AMX_FAMILY.isa - AMX))
def test_verify_emulates_what_the_cpu_lacks_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if AMX & detect_cpu().isa:
        pytest.skip("this CPU has AMX")
    url = f"sqlite:///{tmp_path}/proofs.sqlite3"
    text = f"{AMX_FAMILY.name}_16x16 mc16_nc16_kc64 jc_ic_jr_ir"

    command = ["verify", "5", "35", "64", "--dtype", "bf16", "--candidate", text, "--db", url]
    code = run([*command, "--json"])

    (trial,) = Repository(open_database(url)).trials()
    assert code == 0
    assert json.loads(capsys.readouterr().out)["emulated"] == ["amx_bf16", "amx_tile"]
    assert trial.outcome is Outcome.CORRECT
    assert trial.emulated == AMX
    assert trial.measurement is None
    run(["explain", "5", "35", "64", "--dtype", "bf16", "--db", url])
    assert "trials here: 1 correct by emulation" in capsys.readouterr().out


def test_verify_of_a_wrong_kernel_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def render_wrong(*args: Any) -> Source:  # noqa: ANN401 - handed on
        return Source(text=render(*args).text.replace("sums += x * w", "sums -= x * w"))

    monkeypatch.setattr("gemm_tuner.cli.verify.prove", partial(prove, render=render_wrong))
    url = f"sqlite:///{tmp_path}/proofs.sqlite3"

    code = run(["verify", *SIZES, "--candidate", CANDIDATE.text, "--db", url])

    assert code == 1
    assert "wrong: " in capsys.readouterr().out


def test_source_writes_what_a_c_program_needs(
    site: Site, build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library, header = tmp_path / "kernel.so", tmp_path / "gemm_tuner.h"
    files = ["--binary", str(library), "--header", str(header)]

    code = run(["source", *SIZES, *files, "--db", site.settings.database_url])

    assert code == 0
    assert library.read_bytes() == build.binary
    assert "gemm_tuner_run" in header.read_text()
    assert capsys.readouterr().out == ""


def test_serve_says_where_it_listens(site: Site, tmp_path: Path) -> None:
    options = ["--port", "0", "--db", site.settings.database_url, "--key", str(tmp_path / "k.pem")]
    with subprocess.Popen(
        [sys.executable, "-m", "gemm_tuner", "serve", *options], stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stderr is not None
            address = child.stderr.readline().split()[2].rstrip(";")
            answer = httpx.get(f"{address}/healthz", timeout=30, trust_env=False)
        finally:
            child.terminate()

    assert answer.json() == {"status": "ok"}
    assert (tmp_path / "k.pem").exists()


def test_source_of_nothing_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/empty.sqlite3"
    open_database(url).dispose()

    code = run(["source", *SIZES, "--db", url])

    assert code == ANSWER_IS_NO
    assert 'run "gemm-tuner sweep" first' in capsys.readouterr().err


def test_never_tuned_and_not_served_are_told_apart_everywhere(
    site: Site, tmp_path: Path, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/slower.sqlite3"
    keep_trial(Repository(open_database(url)), build, cpu=detect_cpu(), speed=0.99)
    never = site.settings.database_url

    for command in ("resolve", "explain", "source"):
        run([command, *SIZES, "--db", url])
        refused = capsys.readouterr()
        run([command, "3", "5", "7", "--db", never])
        unknown = capsys.readouterr()

        assert "a kernel is served from 1.000 times on" in refused.out + refused.err
        assert "gemm-tuner sweep" not in refused.out + refused.err
        words = {"resolve": "nothing was measured", "explain": "nothing is known"}
        assert words.get(command, "none was tuned") in unknown.out + unknown.err


def test_a_layer_that_was_tuned_with_other_threads_says_which(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("resolve", "explain", "source"):
        run([command, *SIZES, "--threads", "2", "--db", site.settings.database_url])
        told = "".join(capsys.readouterr())
        assert "it was tuned otherwise here; ask with --threads 1 --regime hot" in told


def test_a_kernel_behind_a_library_that_cannot_run_here_is_told_so(
    tmp_path: Path, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/behind.sqlite3"
    mkl = Raced(package="mkl 2026.2.0", baseline="mkl 2026.2.0", call_ns=100.0)
    onednn = Raced(package="onednn-cpu-gomp 2023.2.0", baseline="onednn 3.2.0", call_ns=130.0)
    keep_trial(
        Repository(open_database(url)),
        build,
        cpu=detect_cpu(),
        speed=0.95,
        baseline=mkl.baseline,
        raced=(mkl, onednn),
    )

    for command in ("resolve", "explain"):
        assert run([command, *SIZES, "--db", url]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "mkl 2026.2.0 is 1.05 times as fast but does not run in your process" in told
        assert re.search(r"this kernel is 1\.2[34] times as fast as onednn 3\.2\.0, which", told)


def test_explain_tells_of_a_sweep_that_confirmed_nothing(
    tmp_path: Path, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/begun.sqlite3"
    repository = Repository(open_database(url))
    kept = Repository(open_database(f"sqlite:///{tmp_path}/other.sqlite3"))
    keep_trial(kept, build, cpu=detect_cpu(), speed=2)
    (trial,) = kept.trials()
    repository.add_trial(replace(trial, stage=Stage.RACE))

    run(["explain", *SIZES, "--db", url])

    out = capsys.readouterr().out
    assert "- exact: no kernel confirmed in this store on" in out
    assert "1 candidate was tried there, by a sweep that was stopped or for a larger" in out


@pytest.mark.baseline("openblas")
def test_bench_refutes_a_verdict_that_does_not_hold(
    site: Site, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    # The store says that this scalar kernel is ten times as fast as OpenBLAS. It is not.
    baseline = "openblas 0.3 + pass"
    keep_trial(site.repository, build, cpu=detect_cpu(), speed=10, baseline=baseline)

    code = run(["bench", *SIZES, "--db", site.settings.database_url, "--json"])

    (row,) = json.loads(capsys.readouterr().out)["layers"]
    assert code == ANSWER_IS_NO
    assert row["refuted"]
    assert 0 < row["share_of_roofline"] < 1


@pytest.mark.baseline("onednn")
@pytest.mark.baseline("openblas")
def test_bench_times_all_baselines_in_one_run(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "bench.svg"
    arguments = ["--baseline", "openblas", "--baseline", "onednn", "--plot", str(picture)]

    run(["bench", *SIZES, "--db", site.settings.database_url, "--json", *arguments])

    facts = json.loads(capsys.readouterr().out)
    (row,) = facts["layers"]
    assert [one["baseline"].split()[0] for one in row["baselines"]] == ["openblas", "onednn"]
    assert [one["computes"] for one in row["baselines"]] == ["layer", "layer"]
    assert row["left_out"] == {}
    assert row["best_baseline"] in [one["baseline"] for one in row["baselines"]]
    assert [mean["layers"] for mean in facts["means"]] == [1, 1, 1]
    assert "<svg" in picture.read_text()


def test_bench_of_nothing_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/empty.sqlite3"
    open_database(url).dispose()

    code = run(["bench", *SIZES, "--db", url])

    assert code == ANSWER_IS_NO
    assert 'run "gemm-tuner sweep"' in capsys.readouterr().err


FIXED = Problem.parse("int8 8x32x16 nk channel_scale fixed")
FIXED_SIZES = ["8", "32", "16", "--dtype", "int8", "--epilogue", "channel_scale"]


def test_commands_and_client_take_a_fixed_order(
    bare_site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel of half the speed of the library is served, since that promises no order."""
    candidate = Candidate.parse("scalar_int8_2x4 mc8_nc32_kc16 jc_ic_jr_ir")
    source = render(FIXED, candidate, family_named("scalar_int8"))
    fixed = compile_kernel(source, isa=frozenset(), toolchain=find_toolchain())
    keep_trial(
        bare_site.repository,
        fixed,
        cpu=detect_cpu(),
        speed=0.5,
        problem=FIXED,
        candidate=candidate,
    )
    where = ["--db", bare_site.settings.database_url]

    facts = _json(["resolve", *FIXED_SIZES, "--reduction", "fixed", *where], capsys)
    told = _json(["explain", *FIXED_SIZES, "--reduction", "fixed", *where], capsys)
    assert run(["resolve", *FIXED_SIZES, *where]) == ANSWER_IS_NO
    assert run(["source", *FIXED_SIZES, "--reduction", "fixed", *where]) == 0
    with bare_site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel, untuned = client.kernel(FIXED), client.kernel("f32 3x5x7 fixed")
        layer = client.layer(
            32, 16, m=[8], dtype="int8", epilogue="channel_scale", reduction="fixed"
        )

    assert facts["problem"] == FIXED.text
    assert facts["artifact"]["sha256"] == fixed.artifact.sha256
    assert "promises no order of additions" in " ".join(told["explain"])
    assert told["beside_any_order"] is None
    assert FIXED.text in capsys.readouterr().out
    assert isinstance(kernel, Kernel)
    assert kernel.artifact.sha256 == fixed.artifact.sha256
    assert layer.kernels[0].problem == FIXED
    assert isinstance(untuned, FallbackKernel)
    assert untuned.library == "the fixed order in plain C"
    assert "No library promises an order of additions" in untuned.reason


def test_a_column_of_a_file_says_which_layers_are_fixed(tmp_path: Path) -> None:
    shapes = tmp_path / "layers.csv"
    shapes.write_text("name,m,n,k,reduction\none,1,2,3,fixed\ntwo,1,2,3,\n")

    def found(reduction: str) -> list[str]:
        layers = layers_of(
            m=None,
            n=None,
            k=None,
            shapes=shapes,
            dtype="f32",
            epilogue="none",
            w_layout="nk",
            reduction=reduction,
        )
        return [layer.problem.reduction.value for layer in layers]

    assert found("any") == ["fixed", "any"]
    assert found("fixed") == ["fixed", "fixed"]
