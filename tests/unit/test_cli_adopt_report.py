"""What an adoption prints, on a wide terminal and on a narrow one."""

from io import StringIO

import pytest
from rich.console import Console
from samples import CONTEXT, CPU, PROBLEM, make_trial

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.reports import adopt_report
from gemm_tuner.cli.reports.adopt_report import print_plan
from gemm_tuner.derive import no_verdict
from gemm_tuner.select.recorded import Recorded, RecordedWinners
from gemm_tuner.tuning.adopt import NOT_TIMED, Planned
from gemm_tuner.tuning.settings import SweepSettings

LAYER = Layer(name="up", problem=PROBLEM)
SETTINGS = SweepSettings(
    toolchain=Toolchain(name="gcc", version="12.2.0", command=("g++",)), budget_s=4.0
)


def planned(*, is_recorded: bool = True, why: str = NOT_TIMED) -> Planned:
    record = Recorded(trial=make_trial(), source="shipped with gemm-tuner")
    return Planned(
        context=CONTEXT,
        before=no_verdict(PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT),
        why=why,
        winners=RecordedWinners(winners=(record,) if is_recorded else ()),
    )


def test_a_plan_says_what_why_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan([(LAYER, [planned()]), (LAYER, [planned(why="")])], CPU, SETTINGS)

    title, _head, to_do, current, total = capsys.readouterr().out.splitlines()
    assert title == "Plan; nothing was run"
    assert f"{PROBLEM.text}, hot, 1 thread" in to_do
    assert to_do.split()[-4:] == ["shipped", "with", "gemm-tuner,", "2026-11-20"]
    assert NOT_TIMED in to_do
    assert "up to date" in current
    assert total.startswith("in all: about ")


def test_what_is_not_recorded_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan([(LAYER, [planned(is_recorded=False)])], CPU, SETTINGS)

    *_table, told = capsys.readouterr().out.splitlines()
    assert "nothing that can run here is recorded" in told
    assert told.endswith("gemm-tuner sweep tunes it")


def test_a_narrow_terminal_gets_a_line_for_each_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = Console(file=StringIO(), width=40, force_terminal=True)
    monkeypatch.setattr(adopt_report, "results", lambda: narrow)

    print_plan([(LAYER, [planned()])], CPU, SETTINGS)

    lines = capsys.readouterr().out.splitlines()
    assert f"  problem: {PROBLEM.text}, hot, 1 thread" in lines
    assert "  kernels: 1" in lines
