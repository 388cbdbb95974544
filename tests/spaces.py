"""CPUs whose spaces are searched, and parts of a space that are walked soon."""

from collections.abc import Collection, Iterator
from itertools import groupby, islice

import pytest

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Caches, Cpu, parse_isa
from gemm_tuner.domain.micro_kernel import MicroKernel
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.tile import Tile
from gemm_tuner.space.walk import every_choice

ISA = {
    "amx": (
        *("fma", "avx2", "avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_bf16"),
        *("avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    ),
    "avx512": ("fma", "avx2", "avx512f", "avx512vl", "avx512bw", "avx512dq"),
    "avx2": ("fma", "avx2", "f16c"),
    "x86_64": (),
}


def cpu(isa: str) -> Cpu:
    return Cpu(
        vendor="AuthenticAMD",
        brand="a test CPU",
        family=26,
        model=2,
        stepping=1,
        isa=parse_isa(ISA[isa]),
        caches=Caches(l1d_bytes=48 << 10, l2_bytes=1 << 20, l3_bytes=32 << 20),
        physical_cores=2,
    )


def few_tiles(patch: pytest.MonkeyPatch, one_of: int) -> None:
    """Leave in each space one of so many tiles of each family: each is walked by itself, alike."""
    all_tiles = Space.tiles

    def some(space: Space) -> Iterator[Tile]:
        for _family, tiles in groupby(all_tiles(space), key=lambda tile: tile.family.name):
            yield from islice(tiles, 0, None, one_of)

    patch.setattr(Space, "tiles", some)


def one_tile(patch: pytest.MonkeyPatch, micro_kernel: str) -> None:
    """Leave in each space the tile of one micro-kernel."""
    all_tiles = Space.tiles

    def some(space: Space) -> Iterator[Tile]:
        return (tile for tile in all_tiles(space) if tile.micro_kernel.text == micro_kernel)

    patch.setattr(Space, "tiles", some)


def of_tiles(space: Space, micro_kernels: Collection[MicroKernel]) -> Iterator[Candidate]:
    """Yield every candidate of some tiles."""
    for tile in space.tiles():
        if tile.micro_kernel in micro_kernels:
            yield from (tile.candidate(choice.blocking) for choice in every_choice(tile))
