"""What kernels need of this machine: a test is skipped, with the reason, where that is missing."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import pytest
from _pytest.mark.structures import ParameterSet
from other_encoding import needed_here

from gemm_tuner.bench.emulator import can_prove
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.cpu import WHOLE_SUMS_OF_BYTES, IsaFeature, isa_text
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import CompilationFailed, ToolchainMissing
from gemm_tuner.machine.detect import detect_cpu


class Named(Protocol):
    """A family, or a family with types."""

    @property
    def name(self) -> str: ...

    @property
    def isa(self) -> frozenset[IsaFeature]: ...


def need_cpu(isa: frozenset[IsaFeature]) -> None:
    """Skip the test where this CPU cannot run what needs `isa`."""
    if missing := isa - detect_cpu().isa:
        pytest.skip(_lacks(missing))


def need_whole_sums_of_bytes() -> None:
    """Skip the test where libraries add products of bytes in 16 bits, and saturate."""
    if not WHOLE_SUMS_OF_BYTES & detect_cpu().isa:
        pytest.skip("sums of bytes saturate in this library on a CPU without VNNI")


def need_proof(isa: frozenset[IsaFeature]) -> None:
    """Skip the test where what needs `isa` cannot be proved: executed, respelled or emulated."""
    needed, cpu = needed_here(isa), detect_cpu()
    if not can_prove(needed, cpu=cpu):
        pytest.skip(_lacks(needed - cpu.isa))


def need_compiler(name: str) -> Toolchain:
    """Return a compiler, or skip the test where it is missing."""
    try:
        return find_toolchain(name)
    except ToolchainMissing as missing:
        pytest.skip(str(missing))


def need_instruction(
    source: Source, isa: frozenset[IsaFeature], toolchain: Toolchain, feature: str
) -> None:
    """Skip the test where the compiler does not know the instruction of a source."""
    try:
        compile_kernel(source, isa=isa, toolchain=toolchain)
    except CompilationFailed:
        pytest.skip(f"{toolchain.text} does not know {feature}")


def each(values: Iterable[Named], *, quick: Iterable[str] | None = None) -> list[ParameterSet]:
    """Return a parameter for each family or row, skipped where it cannot be proved.

    All but those named in `quick` belong to the exhaustive proofs.
    """
    chosen = None if quick is None else set(quick)
    return [
        pytest.param(
            value,
            id=value.name,
            marks=_marks(value, is_quick=chosen is None or value.name in chosen),
        )
        for value in values
    ]


def each_with(values: Iterable[Named], others: Sequence[str]) -> list[ParameterSet]:
    """Return a parameter for each family with each of `others`.

    In the quick stage are all families, with one of the others each, in turn.
    """
    return [
        pytest.param(
            *(value, other),
            id=f"{value.name}-{other}",
            marks=_marks(value, is_quick=turn % len(others) == others.index(other)),
        )
        for turn, value in enumerate(values)
        for other in others
    ]


def each_executed(
    values: Iterable[Named], *, quick: Iterable[str] | None = None
) -> list[ParameterSet]:
    """Return what `each` does, without what would be emulated: each instruction costs a signal.

    test_cover.py, test_amx.py and test_fp16.py prove these families on every CPU.
    """
    cpu = detect_cpu()
    return each(
        (
            value
            for value in values
            if (needed := needed_here(value.isa)) <= cpu.isa or not can_prove(needed, cpu=cpu)
        ),
        quick=quick,
    )


def _marks(value: Named, *, is_quick: bool) -> list[pytest.MarkDecorator]:
    needed, cpu = needed_here(value.isa), detect_cpu()
    marks = [] if is_quick else [pytest.mark.proof]
    if not can_prove(needed, cpu=cpu):
        marks.append(pytest.mark.skip(reason=_lacks(needed - cpu.isa)))
    return marks


def _lacks(missing: frozenset[IsaFeature]) -> str:
    return f"this CPU lacks {isa_text(missing).replace(',', ', ')}"
