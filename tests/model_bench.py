"""Ways to run a model that are small scripts, for the tests of `gemm-tuner bench-models`."""

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

from gemm_tuner.domain.model_run import ModelCase, ModelRun
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.models.measure import Plan, measure_case
from gemm_tuner.models.row import Prepared, Way, Work

CASE = ModelCase(model="dlrm", dtype="f32", threads=1, batch=1)

# How each way answers, by its name.
CHILD = """
    import json, os, sys, time
    way = json.loads(sys.stdin.readline())["way"]
    times = {"eager": 400, "compile": 200, "enable": 100, "slow_ours": 300, "uneven": 200}
    def tell(**answer):
        print(json.dumps(answer), flush=True)
    if way == "hangs":
        time.sleep(60)
    if way == "dies":
        print("the library is out of luck", file=sys.stderr)
        os.abort()
    if way == "killed":
        os.kill(os.getpid(), 9)
    if way == "refuses":
        tell(failed="OpConversionFailure: no such operator")
        sys.exit()
    if way == "babbles":
        print("not JSON", flush=True)
    if way == "mistakes":
        tell(looked={})
    if way == "floods":
        print("x" * (1 << 21), end="", flush=True)
        time.sleep(60)
    wrong = "its output is off by 5.0e-01 of the norm; 1e-04 is tolerated in f32"
    error = {"error": 0.5, "wrong": wrong} if way == "off" else {"error": 1e-6}
    error["agreement"] = 0.75
    resident = 2**40 if way == "huge" else 2**20
    layers = {"taken": 3, "left": 1, "why_left": ["1: a tie."]}
    call_s = 2e-7 if way == "uneven" else 0.01
    tell(ready={**error, "call_s": call_s, "resident_bytes": resident, **layers})
    turn = 0
    for line in sys.stdin:
        if not json.loads(line)["calls"]:
            layer = {"m": 8, "n": 64, "k": 64, "has_bias": True, "calls": 1}
            layers = {"layers": [layer]} if way == "listed" else {}
            tell(looked={"shares": {"taken": 0.5, "left": 0.2}, **layers})
        elif way == "stops":
            sys.exit(7)
        else:
            turn += 1
            call_ns = times.get(way, 500)
            if way == "uneven" and turn % 2 or way == "slowed" and turn > 1:
                call_ns *= 2
            tell(sampled={"call_ns": call_ns, "is_disturbed": False, "used_s": 0.0})
"""


def _never(_work: Work) -> Prepared:
    raise NotImplementedError


def a_way(name: str, *, is_ours: bool = False, wheel: str = "numpy") -> Way:
    """Return a way of a package that is there."""
    return Way(name=name, wheel=wheel, prepare=_never, is_ours=is_ours)


def plan_of(folder: Path, *ways: Way, rounds: int = 3, budget_s: float = 0.0) -> Plan:
    """Return a plan whose processes are scripts."""
    script = folder / "child.py"
    script.write_text(dedent(CHILD))
    return Plan(
        ways=ways,
        rounds=rounds,
        budget_s=budget_s,
        deadline_s=5.0,
        db="sqlite://",
        cpu=detect_cpu(),
        command=(sys.executable, "-S", str(script)),
    )


def measured_by(folder: Path) -> ModelRun:
    """Return what scripts of three ways answer."""
    ways = (a_way("eager"), a_way("compile"), a_way("enable", is_ours=True))
    return measure_case(CASE, plan_of(folder, *ways))


def with_times(measured: ModelRun, **times_ns: int) -> ModelRun:
    """Return a run whose ways take so long, by their names."""
    ways = tuple(
        replace(one, samples_ns=(times_ns.get(one.way, one.samples_ns[0]),) * 3)
        for one in measured.ways
    )
    return replace(measured, ways=ways)
