"""`gemm-tuner simulate` and the plan of `gemm-tuner cpu`."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gemm_tuner.cli.main import INTERRUPTED, SOMETHING_IS_MISSING, WRONG_USAGE, run
from gemm_tuner.machine.cpus import usable_cpus

TARGET = ["simulate", "16", "4096", "4096", "--target", "zen5"]


def test_a_call_is_predicted_for_threads_that_are_not_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run([*TARGET, "--threads", "1..128", "--sockets", "2", "--json"])

    facts = json.loads(capsys.readouterr().out)
    assert code == 0
    assert facts["basis"] == "predicted"
    assert facts["server"].startswith("zen5: 2 sockets, 2 NUMA nodes, 32 L3 groups, 256 cores")
    assert [one["regime"] for one in facts["regimes"]] == ["hot", "cold_weights"]
    for regime in facts["regimes"]:
        calls = regime["calls"]
        assert [one["threads"] for one in calls] == [1, 2, 4, 8, 16, 32, 64, 128]
        for one in calls:
            summands = ("work_ns", "uneven_ns", "waiting_ns", "barrier_ns")
            assert sum(one[name] for name in summands) == pytest.approx(one["time_ns"])
    assert facts["regimes"][1]["calls"][-1]["bound"] == "memory"


def test_no_range_of_keys_is_offered_where_there_is_no_attention(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["simulate", "--help"]) == 0
    assert "keys" not in capsys.readouterr().out
    assert run(["simulate", "16", "1..8", "64"]) == WRONG_USAGE
    assert "value for 'N'" in capsys.readouterr().err


def test_the_table_names_what_bounds_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TARGET, "--threads", "64", "--regime", "cold_weights"]) == 0

    out = capsys.readouterr().out
    assert "its parts are predicted by the model" in out
    assert out.splitlines()[5].split()[-1] == "memory"


def test_kernels_are_ranked_for_many_threads(capsys: pytest.CaptureFixture[str]) -> None:
    layer = ["simulate", "4", "256", "64", "--target", "zen5"]
    command = [*layer, "--threads", "64", "--rank", "3", "--regime", "hot"]

    assert run([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert run(command) == 0
    printed = capsys.readouterr().out

    ranking = facts["regimes"][0]["ranking"]
    times = [one["time_ns"] for one in ranking]
    assert len(times) == 3
    assert times == sorted(times)
    assert all(one["candidate"] in printed for one in ranking)


@pytest.mark.isa("avx2", "fma")
def test_the_parts_of_a_kernel_are_timed_here(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "1..24", "64", "32", "--m-of-call", "17", "--threads", "1,3,64"]
    kernel = "avx2_f32_4x16 mc24_nc64_kc32 jc_ic_jr_ir"

    code = run([*command, "--candidate", kernel, "--json"])

    facts = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (facts["basis"], facts["m"], facts["candidate"]) == ("timed", 17, kernel)
    for regime in facts["regimes"]:
        assert [one["threads"] for one in regime["calls"]] == [1, 3, 64]
        assert all(one["work_ns"] > 0 for one in regime["calls"])


@pytest.mark.parametrize("name", ["plot.svg", "plot.png"])
def test_a_picture_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / name

    assert run([*TARGET, "--threads", "1..8", "--plot", str(path)]) == 0

    if name.endswith(".png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    texts = "".join(ET.parse(path).getroot().itertext())  # noqa: S314 - our own
    assert "f32 16x4096x4096 nk none" in texts
    assert "bound by compute" in texts


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--threads", "8..2"], "ends before it begins"),
        (["--threads", "two"], "threads 'two' is not understood; write 1,2,48 or 1..128."),
        (["--threads", "0"], "threads = 0 is out of range"),
        (["--threads", "200", "--sockets", "1"], "too few for 200 threads; give --sockets 2."),
        (["--sockets", "99"], "--sockets 99 is out of range; use 1 to 8."),
        (["--target", "cascade_lake", "--threads", "1024"], "use at most --threads 224."),
        (["--rank", "1", "--candidate", "none"], "leave out --candidate"),
        (["--m-of-call", "17"], "--m-of-call 17 is none of the rows 16"),
        (["--plot", "plot.pdf"], "end its name in .svg or .png"),
        (["--plot", "none/plot.svg"], "file none/plot.svg cannot be written"),
        (["--rank", "0"], "--rank 0 is out of range"),
        (["--candidate", "amx_bf16_16x16 mc16_nc4096_kc64 jc_ic_jr_ir"], "does not compute f32"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)

    code = run([*TARGET, *arguments])

    assert code == WRONG_USAGE
    assert told in capsys.readouterr().err


def test_a_ranking_names_the_rows_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "1..4", "64", "64", "--m-of-call", "2", "--target", "zen5"]
    command += ["--threads", "2", "--rank", "1", "--regime", "hot"]

    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["m"] == 2
    assert run(command) == 0
    assert "f32 1..4x64x64 nk none with m = 2: kernels predicted" in capsys.readouterr().out


def test_an_interrupt_of_the_proof_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_arguments: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gemm_tuner.cli.simulate.prove", interrupted)

    code = run(["simulate", "1", "8", "8", "--threads", "1"])

    assert code == INTERRUPTED
    assert "Aborted" in capsys.readouterr().err


def test_a_target_of_one_socket_has_no_link(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["simulate", "8", "64", "64", "--target", "alder_lake", "--threads", "16"])

    assert code == WRONG_USAGE
    assert "alder_lake is made for one socket; use at most --threads 8" in capsys.readouterr().err


def test_the_cpu_has_a_plan_for_its_threads(capsys: pytest.CaptureFixture[str]) -> None:
    threads = usable_cpus()
    command = ["cpu", "--threads", str(threads), "--problem", "f32 16x512x64 nk bias"]

    assert run([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert run(command) == 0
    printed = capsys.readouterr().out

    assert facts["plan"]["threads"] == threads
    assert sum(len(group["cpus"]) for group in facts["plan"]["groups"]) == threads
    assert facts["cut"]["largest_over_mean"] >= 1
    assert facts["cut"]["candidate"] in printed
    assert "GB/s from L3" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--threads", "1024"], SOMETHING_IS_MISSING, "1024 threads have no CPU each"),
        (["--threads", "0"], WRONG_USAGE, "threads = 0 is out of range"),
        (["--problem", "f32 1x2x3"], WRONG_USAGE, "give --threads too"),
        (["--threads", "1", "--problem", "f32 1x2"], WRONG_USAGE, "is not understood"),
        (["--threads", "1", "--problem", ""], WRONG_USAGE, "--problem is empty"),
        (["--threads", "1", "--problem", "f32 0x2x3"], WRONG_USAGE, "multiplies nothing"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(
    arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cpu", *arguments]) == code
    assert told in capsys.readouterr().err
