"""`gemm-tuner cpu`: the features of this machine, and why others cannot be used."""

from typing import Any

from gemm_tuner.cli import options
from gemm_tuner.cli.output import print_json, print_line, print_table
from gemm_tuner.domain.cpu import Cpu, IsaFeature, isa_text
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.machine.detect import detect_cpu, why_not_usable
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.space.catalog import CATALOG

_EXTENSIONS = {
    "AVX2": frozenset({IsaFeature.AVX2, IsaFeature.FMA}),
    "AVX-512": frozenset(
        {IsaFeature.AVX512F, IsaFeature.AVX512VL, IsaFeature.AVX512BW, IsaFeature.AVX512DQ}
    ),
    "AMX": frozenset({IsaFeature.AMX_TILE}),
}


def cpu(*, as_json: options.AsJson = False) -> None:
    """Print the detected CPU, and which kernel families can run on it."""
    detected = detect_cpu()
    if as_json:
        print_json(_facts(detected))
        return
    caches = detected.caches
    print_line(detected.brand)
    print_line(f"key: {detected.exact_key}")
    print_line(f"cores this process may use: {detected.physical_cores}")
    print_line(f"threads that can share a call: {usable_cpus()}")
    print_line(f"calls from Python go {'straight, in C' if NATIVE else 'through ctypes'}")
    print_line(
        f"caches: L1d {caches.l1d_bytes >> 10} KiB, L2 {caches.l2_bytes >> 10} KiB, "
        f"L3 {caches.l3_bytes >> 10} KiB"
    )
    print_line(f"usable features: {isa_text(detected.isa)}\n")
    print_table(
        "Vector extensions",
        ("extension", "usable", "why not"),
        [(name, *_usability(needed, detected)) for name, needed in _EXTENSIONS.items()],
    )
    print_line("")
    print_table(
        "Kernel families",
        ("family", "usable", "why not"),
        [(family.name, *_usability(family.isa, detected)) for family in CATALOG.values()],
    )


def _usability(needed: frozenset[IsaFeature], detected: Cpu) -> tuple[str, str]:
    missing = needed - detected.isa
    if not missing:
        return ("yes", "")
    return ("no", f"{isa_text(missing)}: {why_not_usable(missing)}")


def _facts(detected: Cpu) -> dict[str, Any]:
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
        "usable_cpus": usable_cpus(),
        "calls_in_c": NATIVE is not None,
        "families": [
            {"name": family.name, "missing": sorted(family.isa - detected.isa)}
            for family in CATALOG.values()
        ],
    }
