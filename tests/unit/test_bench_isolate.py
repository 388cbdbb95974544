import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Never

import pytest
from samples import PROBLEM

from gemm_tuner.bench import forked, isolate
from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.drivers import build_driver
from gemm_tuner.bench.forked import Death, run_in_child
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import PreparationStopped

FOLDER = "folder of its own"
# What a server has no use for and takes long to load, `importlib.metadata` with `email`.
HEAVY = {
    "alembic", "asyncio", "cryptography", "email", "filelock", "httpx", "importlib.metadata",
    "jinja2", "matplotlib", "ml_dtypes", "rich", "sqlalchemy", "typer",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["ONEDNN_MAX_CPU_ISA", "DNNL_VERBOSE", "OPENBLAS_CORETYPE", "MKL_CBWR", "KMP_AFFINITY"]
)
def test_settings_of_libraries_do_not_reach_trials(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")

    assert name not in isolate._environment(1, FOLDER)


@pytest.mark.parametrize("name", ["GEMM_TUNER_TOKEN", "GEMM_TUNER_DB", "PGPASSWORD", "AWS_SECRET"])
def test_secrets_do_not_reach_trials(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")

    assert name not in isolate._environment(1, FOLDER)


def test_a_library_is_told_how_many_threads_it_may_have() -> None:
    assert isolate._environment(2, FOLDER)["OMP_NUM_THREADS"] == "2"


def test_a_server_loads_nothing_that_takes_long_and_is_not_used() -> None:
    program = "import sys, gemm_tuner.bench.trial_server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True)

    assert not HEAVY & set(done.stdout.decode().split())


def test_what_a_child_waits_for_a_core_is_not_counted_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With niceness 19 beside other work, it may get a 68th of a core."""
    report = Report(build_driver("crash", find_toolchain()))
    asked, ready = Pipe(duplex=False)

    def task() -> str:
        while not asked.poll():
            time.sleep(0.001)
        return "right"

    def look(child: int) -> float:
        """Let the child end when it is looked at, since it would be ended itself."""
        ready.send(child)
        return 60.0

    monkeypatch.setattr(forked, "waited_for_core_s", look)
    ours, theirs = Pipe()
    with ours, theirs, asked, ready:
        found = run_in_child(task, report=report, stall_timeout_s=0.01, owner=ours)

    assert found == "right"


def test_no_more_drivers_are_compiled_once_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache on a busy machine, all of them take minutes."""
    compiled: list[str] = []

    def compile_hosted(_text: str, *, name: str, **_named: object) -> Path:
        compiled.append(name)
        return Path(name)

    monkeypatch.setattr("gemm_tuner.bench.drivers.compile_hosted", compile_hosted)

    with pytest.raises(PreparationStopped):
        isolate.TrialHost(
            PROBLEM,
            threads=1,
            toolchain=find_toolchain(),
            seed=0,
            scalar_build=lambda: pytest.fail("the server is not started"),
            is_stopped=lambda: len(compiled) == 2,
        )

    assert len(compiled) == 2


def test_a_child_that_says_it_goes_on_for_ever_is_ended() -> None:
    report = Report(build_driver("crash", find_toolchain()))

    def task() -> Never:
        while True:
            report.step()
            time.sleep(0.01)

    ours, theirs = Pipe()
    with ours, theirs:
        death = run_in_child(task, report=report, stall_timeout_s=20.0, owner=ours, longest_s=0.2)

    assert isinstance(death, Death)
    assert (death.outcome, death.detail) == (Outcome.HUNG, "came to no end in 0.2 s")
