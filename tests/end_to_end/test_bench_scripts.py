"""The scripts of benchmarks, at the smallest size; test_publish.py has the others."""

import json
from pathlib import Path

import agreement
import call_cost
import compare_kernels
import packing
import pytest
import quantising
import weight_only
from publish_steps import GEMM_TUNER, PROOFS, ROOT, Plan, steps_for

from gemm_tuner.cli.main import run


@pytest.mark.proof
def test_every_way_to_call_a_kernel_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(call_cost, "SAMPLE_S", 1e-3)
    monkeypatch.setattr(call_cost, "SLEEPS", 3)
    monkeypatch.setattr(call_cost, "ROUNDS", 1)

    call_cost.main()

    lines = capsys.readouterr().out.splitlines()
    times = {line[:46].strip(): line[46:].split() for line in lines if line.endswith(" ns")}
    assert times.keys() >= call_cost.WAYS.keys()
    assert all(float(time) > 0 for time, _unit in times.values())
    header = next(place for place, line in enumerate(lines) if line.endswith(" beyond"))
    rows = [[float(time) for time in line[46:].split()] for line in lines[header + 1 :]]
    assert len(rows) >= len(call_cost.KINDS)
    for call, kernel, loop, beyond in rows:
        assert min(call, kernel, loop) > 0
        assert beyond == pytest.approx(call - kernel - loop, abs=0.2)  # each is rounded


@pytest.mark.proof
@pytest.mark.isa("avx2", "fma")
def test_packing_is_timed_beside_a_copy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packing, "SIZES", ((16, 16),))

    packing.main(["avx2_f32_2x16"])

    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [["avx2_f32_2x16", "f32", way] for way in ("nk", "kn")]
    assert all(float(rate) > 0 for row in rows for rate in row[4:7])


REPORT = """## f32, cold weights

| Layer | m x n x k | Epilogue | Kernel | Time | onednn 3.2.0 |
|---|---|---|---|---|---|
| small | 8 x 32 x 16 | bias | `{kernel}` | 1 µs | 1.1 |
| {name} | 8 x 32 x 16 | none | `{kernel}` | 1 µs | 1.1 |

## f32, hot, beside Inductor

| Layer | m x n x k | Epilogue | Kernel | Time | onednn 3.2.0 |
|---|---|---|---|---|---|
| small | 8 x 32 x 16 | bias | `{kernel}` | 1 µs | 1.1 |
"""


@pytest.mark.baseline("onednn")
def test_kernels_of_two_reports_are_timed_in_the_same_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_kernels, "PAIRS", 3)
    monkeypatch.setattr(compare_kernels, "SAMPLE_NS", 10_000)
    old, new, out = (tmp_path / name for name in ("old.md", "new.md", "out.jsonl"))
    slow = "scalar_f32_1x1 mc1_nc32_kc16 jc_ic_jr_ir"
    old.write_text(REPORT.format(kernel=slow, name="gone"))
    new.write_text(REPORT.format(kernel="scalar_f32_2x2 mc8_nc32_kc16 jc_ic_jr_ir", name="come"))

    compare_kernels.main(old, new, out, [])
    first = capsys.readouterr()
    compare_kernels.main(old, new, out, [])
    second = capsys.readouterr()

    assert [line.count("small") for line in first.err.splitlines()] == [1]
    assert first.out.splitlines()[-1].startswith("| f32, cold weights | 1 | 0 | ")
    assert (second.out, second.err) == (first.out, "")
    [line] = out.read_text().splitlines()
    assert slow in line


@pytest.mark.proof
def test_weights_of_few_bits_are_timed_beside_floats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weight_only, "TYPES", ("f32", "f32_s4"))
    monkeypatch.setattr(weight_only, "SAMPLE_NS", 10_000)

    weight_only.main(1, 32, 128, budget_s=0.1)

    printed = capsys.readouterr()
    rows, told = printed.out.splitlines(), printed.err.splitlines()
    assert [row.partition(" nk")[0] for row in rows] == [
        "f32 1x32x128",
        "f32_s4_f32_f32 1x32x128",
    ]
    assert " 1.00 x " in rows[0]
    assert [line.partition(",")[0] for line in told] == [
        "f32 1x32x128 nk none: tuning 1 of 2",
        "f32_s4_f32_f32 1x32x128 nk:gk none: tuning 2 of 2",
        "timing all together",
    ]
    assert all(line.endswith(" left") for line in told)


@pytest.mark.proof
def test_quantising_is_timed_beside_the_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantising, "ROUNDS", 3)
    monkeypatch.setattr(quantising, "ROUND_NS", 10_000)

    quantising.main(3, 16, 32, budget_s=0.1)

    lines = capsys.readouterr().out.splitlines()
    timed = [line for line in lines if "least" in line]
    assert {line[2:38].strip() for line in timed} >= {
        "NumPy and the kernel",
        "quantise_activations and the kernel",
    }
    errors = [float(line.split("off by ")[1].split("%")[0]) for line in lines if "off by" in line]
    assert len(errors) >= 3
    assert max(errors) < 2  # percent


def test_commands_that_measure_everything_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("typer.rich_utils.rich_format_help", lambda **_settings: None)
    steps = dict(enumerate(steps_for(2)))
    plan = Plan(results=tmp_path, steps=steps, records=tmp_path / "records", has_proofs=True)
    commands = [command for piece in plan.pieces().values() for command in piece]
    ours = [command.arguments for command in commands if command.program == GEMM_TUNER]

    # Options are read before the help would be printed.
    codes = [run([*arguments, "--help"]) for arguments in ours]

    assert codes == [0] * len(ours), capsys.readouterr().err
    assert {arguments[0] for arguments in ours} == {"cpu", "sweep", "bench", "model", "records"}
    assert all((ROOT / proof).is_file() for proof in PROOFS)


@pytest.mark.proof
@pytest.mark.baseline("onednn")
def test_two_sweeps_are_compared_in_the_same_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agreement, "PAIRS", 3)
    monkeypatch.setattr(agreement, "SAMPLE_NS", 10_000)
    slow, fast = (
        "scalar_f32_1x1 mc1_nc1_kc4 jc_ic_jr_ir",
        "scalar_f32_4x4 mc64_nc64_kc64 jc_ic_jr_ir",
    )
    said = {
        "name": "small",
        "problem": "f32 64x64x64 nk bias",
        "decision": "tuned",
        "instead": {"library": "onednn 3.2.0"},
    }
    for name, candidate in zip(agreement.NAMES, (fast, slow, fast), strict=True):
        none = {**said, "name": "none", "candidate": None, "took_s": None}
        layers = [{**said, "candidate": candidate, "took_s": 1.5}, none]
        (tmp_path / f"{name}.json").write_text(json.dumps({"layers": layers, "not_begun": []}))

    code = agreement.main([str(tmp_path)])
    first = capsys.readouterr()
    assert agreement.main([str(tmp_path)]) == code == 1
    second = capsys.readouterr()

    assert (second.out, second.err) == (first.out, "")
    lines = first.out.splitlines()
    assert [line.count("small") for line in first.err.splitlines()] == [1]
    assert lines[4].startswith("0 % of 1 layers have a second kernel within 2 % of the first (0 ")
    assert lines[6] == "Adopting a layer took 1.5 s in the median, 1.5 s at most."
    assert lines[7].startswith("Of 3 verdicts tuned, refuted: small, first: 0.")
