"""What the bytes of a kernel say: which features its instructions need, and what its loops do."""

import struct
from collections.abc import Iterator, Sequence

import iced_x86
from iced_x86 import (
    CpuidFeature,
    Decoder,
    FlowControl,
    Instruction,
    OpKind,
    Register,
    RegisterExt,
)

from gemm_tuner.domain.cpu import IsaFeature

Loop = list[Instruction]

_SECTIONS_AT, _SECTION_COUNTS_AT = 0x28, 0x3A  # in the header of an ELF file of 64 bits
_SECTION = struct.Struct("<IIQQQQ")  # name, type, flags, address, offset, size
_IS_CODE = 4  # among the flags

_NAMES = {value: name for name, value in vars(CpuidFeature).items() if isinstance(value, int)}
_MNEMONICS = {
    value: name for name, value in vars(iced_x86.Mnemonic).items() if isinstance(value, int)
}
# What every x86-64 CPU has.
_BASELINE = frozenset(
    {
        *("INTEL8086", "INTEL186", "INTEL286", "INTEL386", "INTEL486", "X64", "CMOV"),
        *("MULTIBYTENOP", "SSE", "SSE2"),
    }
)
# By the name in the disassembler, what a kernel must have declared: any of these features.
_DECLARED_BY = {
    "AVX": {IsaFeature.AVX2, IsaFeature.AVX512F},
    "AVX2": {IsaFeature.AVX2, IsaFeature.AVX512F},
    "FMA": {IsaFeature.FMA},
    "F16C": {IsaFeature.F16C, IsaFeature.AVX512F},
    **{
        feature.value.upper(): {feature}
        for feature in IsaFeature
        if feature.value.startswith(("avx512", "avx_vnni", "amx"))
    },
}
_PRODUCTS = ("VFMADD", "VDPBF16PS", "VPDPBUSD", "VPMADDWD", "TDP")
_STACK = (Register.RSP, Register.ESP)


def disassemble(binary: bytes) -> list[Instruction]:
    """Return the instructions of a shared library in order."""
    (table,) = struct.unpack_from("<Q", binary, _SECTIONS_AT)
    entry_bytes, count = struct.unpack_from("<HH", binary, _SECTION_COUNTS_AT)
    found: list[Instruction] = []
    for number in range(count):
        at = table + number * entry_bytes
        _name, _kind, flags, address, offset, size = _SECTION.unpack_from(binary, at)
        if flags & _IS_CODE:
            found += Decoder(64, binary[offset : offset + size], ip=address)
    return found


def undeclared(code: Sequence[Instruction], declared: frozenset[IsaFeature]) -> set[str]:
    """Return the instructions that need what is not declared, each with the feature."""
    return {
        f"{instruction}: {', '.join(names)}"
        for instruction in code
        if (names := list(_undeclared_features(instruction, declared)))
    }


def _undeclared_features(
    instruction: Instruction, declared: frozenset[IsaFeature]
) -> Iterator[str]:
    for feature in instruction.cpuid_features():
        name = _NAMES[feature]
        if name not in _BASELINE and not _DECLARED_BY.get(name, set()) & declared:
            yield name


def innermost_loops(code: Sequence[Instruction]) -> list[Loop]:
    """Return the stretches that a jump at their end repeats, and that hold no other such."""
    places = {instruction.ip: place for place, instruction in enumerate(code)}
    loops: list[tuple[int, int]] = []
    for end, instruction in enumerate(code):
        if instruction.flow_control in {
            FlowControl.CONDITIONAL_BRANCH,
            FlowControl.UNCONDITIONAL_BRANCH,
        }:
            begin = places.get(instruction.near_branch_target, end + 1)
            if begin <= end:
                loops.append((begin, end))
    return [
        list(code[begin : end + 1])
        for begin, end in loops
        if not any(
            begin <= other[0] and other[1] <= end and other != (begin, end) for other in loops
        )
    ]


def main_loop(code: Sequence[Instruction]) -> Loop:
    """Return the innermost loop with the most multiplications of vectors or tiles, at least one."""
    loop = max(innermost_loops(code), key=_multiplications, default=[])
    assert _multiplications(loop), "there is no loop that multiplies"
    return loop


def _multiplications(loop: Loop) -> int:
    return sum(_MNEMONICS[instruction.mnemonic].startswith(_PRODUCTS) for instruction in loop)


def spills(loop: Loop) -> list[str]:
    """Return the instructions that move vectors to fixed places of the stack or from them."""
    return [
        str(instruction)
        for instruction in loop
        if instruction.memory_base in _STACK
        and instruction.memory_index == Register.NONE
        and any(
            RegisterExt.is_vector_register(instruction.op_register(operand))
            for operand in range(instruction.op_count)
            if instruction.op_kind(operand) == OpKind.REGISTER
        )
    ]
