"""The table of cores, cores.csv: what a core of a known CPU model can do in a cycle.

The model of `space/model.py` counts with these rates, and each row is also a CPU to generate for
without having one (`gemm-tuner sweep --target NAME`). Sizes and clocks are those of the part that
`source` names; instructions are from the vendor's guide and from measurements that it names. What
is read from L2, L3 and memory is rounded from published measurements of one core: it ranks, and
claims no more.

What cores share (`Shared`) is in the unit of its sources. A socket reads 8 of 10 parts of what its
channels of memory could carry, as STREAM does on such servers. Where nothing else is said, L3 gives
a group as many times what it gives one core: it has a slice for each. `shared_source` names the
part.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from gemm_tuner.domain.cpu import Caches, Cpu, IsaFeature
from gemm_tuner.errors import InvalidSetting

# What the words `avx2` and `avx512` in the table stand for, beside the features themselves.
_AVX2 = frozenset({IsaFeature.AVX2, IsaFeature.FMA, IsaFeature.F16C})
_VECTORS = {
    "avx2": _AVX2,
    "avx512": _AVX2
    | {IsaFeature.AVX512F, IsaFeature.AVX512VL, IsaFeature.AVX512BW, IsaFeature.AVX512DQ},
}


FEW_STREAMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one core starts or moves in a cycle.

    Arithmetic and loads are of vectors of `vector_bits`, the widest that the core has; of narrower
    ones it can start `narrow` times as many. `multiply_adds` are of f32, `pairs` of bf16
    (`vdpbf16ps`), `quads` of bytes (`vpdpbusd`), 0 where there is no such instruction. `latency` of
    a multiply-add is in cycles. Bytes are what one core reads from a level while the others rest.
    `conflicts` is the share of the time to read weights from L2 that each tile of rows waits longer
    where they lie in lines that share sets of L1: measured on an EPYC of Zen 3, and taken for all
    of AMD. Of Intel it is the least of what a Xeon with AMX gave (decision 85), and an estimate.
    `panels` is the share of the time in which panels come from L2 that a core waits for them though
    it multiplies meanwhile: on the same Xeon (decision 88), and taken for all of Intel.
    `streams` is how many streams of weights come from memory fastest beside few rows: measured on
    an Emerald Rapids and taken for its kind of core (decision 101), and on AMD, taken for the rest.
    """

    vector_bits: float
    multiply_adds: float
    pairs: float
    quads: float
    loads: float
    narrow: float
    instructions: float
    latency: float
    l2_bytes: float
    l3_bytes: float
    memory_bytes: float
    conflicts: float
    panels: float
    streams: float

    @property
    def reads_many_streams(self) -> bool:
        """Return whether more than two streams are faster, which most cores read more slowly."""
        return self.streams > FEW_STREAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the cores of a server share, in GB/s (1e9 bytes) and ns.

    `group_cores` have one L3, and read `l3_gb_s` from it and `group_gb_s` from memory together;
    a socket reads `socket_gb_s` from its memory, and `link_gb_s` from another socket, 0 where there
    is none. A line of the cache takes `group_ns` from one core to another of its group, `socket_ns`
    to another of its socket and `link_ns` to another socket.
    """

    group_cores: int
    l3_gb_s: float
    group_gb_s: float
    socket_gb_s: float
    link_gb_s: float
    group_ns: float
    socket_ns: float
    link_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """One row: a CPU as large as a common part, its clock under vector load, and its rates.

    `models` are the CPU models that have this core; `source` and `shared_source` say where the
    figures are from.
    """

    cpu: Cpu
    models: frozenset[int]
    clock_hz: float
    rates: Rates
    source: str
    shared: Shared
    shared_source: str

    def is_of(self, cpu: Cpu) -> bool:
        """Return whether `cpu` has this core."""
        mine = self.cpu.vendor, self.cpu.family
        return mine == (cpu.vendor, cpu.family) and cpu.model in self.models


_SHARED_RATES = [field.name for field in fields(Shared) if field.name != "group_cores"]


def _core(row: Mapping[str, str]) -> Core:
    models = [int(word) for word in row["models"].split()]
    words = row["isa"].split()
    features = [_VECTORS[word] if word in _VECTORS else {IsaFeature(word)} for word in words]
    return Core(
        cpu=Cpu(
            vendor=row["vendor"],
            brand=row["name"],
            family=int(row["family"]),
            model=models[0],
            stepping=int(row["stepping"]),
            isa=frozenset().union(*features),
            caches=Caches(
                l1d_bytes=int(row["l1d_kib"]) << 10,
                l2_bytes=int(row["l2_kib"]) << 10,
                l3_bytes=int(row["l3_mib"]) << 20,
            ),
            physical_cores=int(row["cores"]),
        ),
        models=frozenset(models),
        clock_hz=float(row["clock_ghz"]) * 1e9,
        rates=Rates(**{field.name: float(row[field.name]) for field in fields(Rates)}),
        source=row["source"],
        shared=Shared(
            group_cores=int(row["group_cores"]),
            **{name: float(row[name]) for name in _SHARED_RATES},
        ),
        shared_source=row["shared_source"],
    )


def _read() -> dict[str, Core]:
    with Path(__file__).with_name("cores.csv").open(newline="", encoding="utf-8") as table:
        return {row["name"]: _core(row) for row in csv.DictReader(table)}


CORES = _read()


def core_named(name: str) -> Core:
    """Return the row called `name`.

    Raises:
        InvalidSetting: there is none.
    """
    core = CORES.get(name)
    if core is None:
        raise InvalidSetting(f"target {name!r} is not known; use one of: {', '.join(CORES)}.")
    return core


def core_of(cpu: Cpu) -> Core:
    """Return the core of `cpu`, or one with vectors of the same width if it is not in the table."""
    for core in CORES.values():
        if core.is_of(cpu):
            return core
    is_intel = cpu.vendor == "GenuineIntel"
    if IsaFeature.AVX512F in cpu.isa:
        return CORES["sapphire_rapids" if is_intel else "zen5"]
    return CORES["alder_lake" if is_intel else "zen3"]
