"""`gemm-tuner cpu`: the features of this machine, why others cannot be used, where threads run."""

from typing import Annotated, Any

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.reports.thread_plan import (
    cut_facts,
    first_cut,
    plan_facts,
    print_cut,
    print_plan,
)
from gemm_tuner.cli.terminal.output import print_json, print_line, print_table
from gemm_tuner.domain.context import check_threads
from gemm_tuner.domain.cpu import Cpu, IsaFeature, isa_text
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.topology import Level, Topology
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.detect import detect_cpu, why_not_usable
from gemm_tuner.machine.topology import detect_topology
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.sandbox.confine import look_at_sandbox
from gemm_tuner.space.catalog import CATALOG

_EXTENSIONS = {
    "AVX2": frozenset({IsaFeature.AVX2, IsaFeature.FMA}),
    "AVX-512": frozenset(
        {IsaFeature.AVX512F, IsaFeature.AVX512VL, IsaFeature.AVX512BW, IsaFeature.AVX512DQ}
    ),
    "AMX": frozenset({IsaFeature.AMX_TILE}),
}


def cpu(
    *,
    threads: Annotated[
        int | None,
        typer.Option(help="Print which CPUs this many threads take, and what they share"),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="With --threads: how a call is cut among them, such as 'f32 16x4096x4096 nk bias'",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the detected CPU, and which kernel families can run on it; or where threads run."""
    if threads is not None:
        _print_threads(check_threads(threads), problem, as_json=as_json)
        return
    if problem is not None:
        raise InvalidSetting("how a call is cut depends on its threads; give --threads too.")
    detected, topology = detect_cpu(), detect_topology()
    if as_json:
        print_json(_facts(detected, topology))
        return
    caches = detected.caches
    print_line(detected.brand)
    print_line(f"key: {detected.exact_key}")
    print_line(f"usable here: {topology.text}")
    print_line(f"threads that can share a call: {topology.usable_cpus}")
    print_line(f"calls from Python go {'straight, in C' if NATIVE else 'through ctypes'}")
    print_line(
        f"caches: L1d {caches.l1d_bytes >> 10} KiB, L2 {caches.l2_bytes >> 10} KiB, "
        f"L3 {caches.l3_bytes >> 10} KiB"
    )
    print_line(f"kernels are tried in a sandbox of level {look_at_sandbox().text}")
    print_line(f"usable features: {isa_text(detected.isa)}\n")
    print_table(
        "Vector extensions",
        ("extension", "usable", "why not"),
        [(name, *_usability(needed, detected)) for name, needed in _EXTENSIONS.items()],
    )
    print_line("")
    print_table(
        "Kernel families",
        ("family", "usable", "what is lacking"),
        [_family_row(family.name, family.isa - detected.isa) for family in CATALOG.values()],
    )
    for why, features in _reasons(detected).items():
        print_line(f"{isa_text(frozenset(features))}: {why}")


def _usability(needed: frozenset[IsaFeature], detected: Cpu) -> tuple[str, str]:
    missing = needed - detected.isa
    if not missing:
        return ("yes", "")
    return ("no", f"{isa_text(missing)}: {why_not_usable(missing)}")


def _family_row(name: str, missing: frozenset[IsaFeature]) -> tuple[str, str, str]:
    return (name, "no", isa_text(missing)) if missing else (name, "yes", "")


def _reasons(detected: Cpu) -> dict[str, list[IsaFeature]]:
    """Return why features that families need are not usable, each reason once."""
    needed = frozenset[IsaFeature]().union(*(family.isa for family in CATALOG.values()))
    reasons: dict[str, list[IsaFeature]] = {}
    for feature in needed - detected.isa:
        reasons.setdefault(why_not_usable(frozenset({feature})), []).append(feature)
    return reasons


def _print_threads(threads: int, text: str | None, *, as_json: bool) -> None:
    detected, topology = detect_cpu(), detect_topology()
    plan = topology.plan(threads)
    problem = None if text is None else Problem.parse(text)
    if problem:
        problem.check_work()
    cut = (problem, *first_cut(problem, detected, threads)) if problem else None
    if as_json:
        print_json(
            {"plan": plan_facts(plan, detected), **({"cut": cut_facts(*cut)} if cut else {})}
        )
        return
    print_line(f"{detected.brand}: {topology.text}\n")
    print_plan(plan, detected)
    if cut:
        print_line("")
        print_cut(*cut)


def _facts(detected: Cpu, topology: Topology) -> dict[str, Any]:
    sandbox = look_at_sandbox()
    return {
        "vendor": detected.vendor,
        "brand": detected.brand,
        "family": detected.family,
        "model": detected.model,
        "stepping": detected.stepping,
        "key": detected.exact_key,
        "isa": sorted(feature.value for feature in detected.isa),
        "l1d_bytes": detected.caches.l1d_bytes,
        "l2_bytes": detected.caches.l2_bytes,
        "l3_bytes": detected.caches.l3_bytes,
        "physical_cores": detected.physical_cores,
        "usable_cpus": topology.usable_cpus,
        "topology": {
            "sockets": topology.count(Level.SOCKET),
            "numa_nodes": topology.count(Level.NODE),
            "l3_groups": topology.count(Level.L3_GROUP),
            "cores": topology.count(Level.CORE),
            "cpus": len(topology.processors),
            "quota_cpus": topology.quota_cpus,
        },
        "calls_in_c": NATIVE is not None,
        "sandbox": {"level": sandbox.level.value, "why": sandbox.why or None},
        "families": [
            {"name": family.name, "missing": sorted(family.isa - detected.isa)}
            for family in CATALOG.values()
        ],
    }
