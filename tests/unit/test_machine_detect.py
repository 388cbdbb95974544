import os
from pathlib import Path

import pytest

from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine import detect
from gemm_tuner.machine.amx import ask_for_amx
from gemm_tuner.machine.detect import (
    ISA_VARIABLE,
    detect_cpu,
    parse_size_bytes,
    read_cpu_fields,
    why_not_usable,
)

_CPUINFO = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model name\t: A CPU: with a colon
flags\t\t: fpu fma avx2

processor\t: 1
vendor_id\t: Other
"""


def test_this_machine_has_a_vendor_caches_and_cores() -> None:
    cpu = detect_cpu()

    assert cpu.vendor
    assert cpu.brand
    assert cpu.caches.l1d_bytes >= 8 << 10
    assert 1 <= cpu.physical_cores <= len(os.sched_getaffinity(0))


def test_fields_are_those_of_the_first_processor() -> None:
    fields = read_cpu_fields(_CPUINFO)

    assert fields["vendor_id"] == "GenuineIntel"
    assert fields["model name"] == "A CPU: with a colon"
    assert fields["flags"].split() == ["fpu", "fma", "avx2"]


def test_cpu_without_a_stepping_has_stepping_0(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = _CPUINFO.replace("flags", "model : 1\nstepping\t: unknown\nflags", 1)
    monkeypatch.setattr(detect, "_cpu_fields", lambda: detect.read_cpu_fields(unknown))

    cpu = detect._detect_cpu.__wrapped__(None)  # the kept result is of this machine

    assert cpu.stepping == 0


def test_variable_takes_features_away(monkeypatch: pytest.MonkeyPatch) -> None:
    before = detect_cpu().isa

    monkeypatch.setenv(ISA_VARIABLE, "fma,amx_tile")

    assert detect_cpu().isa == before & {IsaFeature.FMA, IsaFeature.AMX_TILE}


def test_empty_variable_takes_all_features_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "")

    assert detect_cpu().isa == frozenset()


def test_unknown_feature_in_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx2,avx3")

    with pytest.raises(InvalidSetting, match="avx3"):
        detect_cpu()


_WITH_AMX = _CPUINFO.replace("flags", "model : 143\nstepping : 8\nflags", 1).replace(
    "avx2", "avx2 amx_tile amx_bf16", 1
)


@pytest.mark.parametrize("refusal", [None, "a filter of system calls forbids to ask"])
def test_amx_is_usable_if_the_system_permits_it(
    refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "_cpu_fields", lambda: read_cpu_fields(_WITH_AMX))
    monkeypatch.setattr(detect, "ask_for_amx", lambda: refusal)
    amx = {IsaFeature.AMX_TILE, IsaFeature.AMX_BF16}

    isa = detect._detect_cpu.__wrapped__(None).isa  # the kept result is of this machine

    assert isa & amx == (amx if refusal is None else set())
    assert {IsaFeature.FMA, IsaFeature.AVX2} <= isa


def test_why_amx_is_not_usable_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_cpu_fields", lambda: read_cpu_fields(_WITH_AMX))
    monkeypatch.setattr(detect, "ask_for_amx", lambda: "the kernel is older than Linux 5.16")
    amx_fp16 = frozenset({IsaFeature.AMX_TILE, IsaFeature.AMX_FP16})

    assert why_not_usable(amx_fp16) == "refused by the system: the kernel is older than Linux 5.16"
    assert "the CPU lacks it" in why_not_usable(amx_fp16 - {IsaFeature.AMX_TILE})


def test_the_system_is_asked_once_for_amx_and_may_refuse() -> None:
    first = ask_for_amx()

    if "amx_tile" not in Path("/proc/cpuinfo").read_text().split():
        assert first == "the kernel or the CPU does not have them"
    assert ask_for_amx() is first
    assert ask_for_amx.cache_info().misses == 1


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("48K", 48 << 10), ("32M", 32 << 20), ("512", 512), ("", 0), ("?", 0)]
)
def test_cache_sizes_are_read_as_sysfs_writes_them(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes
