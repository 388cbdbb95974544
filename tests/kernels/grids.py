"""The compiler of most tests: fast code is not worth its time where operands are tiny."""

from dataclasses import replace
from functools import cache

from other_encoding import needed_here

from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.machine.detect import detect_cpu

# Of several levels of optimisation the last counts. The flags of a kernel come behind the command.
_AT_LITTLE_COST = 'exec "$@" -Og'


@cache
def grid_toolchain(*, as_served: bool) -> Toolchain:
    """Return the compiler that was found, which optimises as for a user, or little.

    gcc takes half the time with -Og. Both have builds of their own in the cache, which goes by
    the version.
    """
    toolchain = find_toolchain()
    if as_served or toolchain.name != "gcc":
        return toolchain
    command = ("sh", "-c", _AT_LITTLE_COST, "sh", *toolchain.command)
    return replace(toolchain, version=f"{toolchain.version} -Og", command=command)


def toolchain_as_served(toolchain: Toolchain) -> Toolchain:
    """Return what builds drivers: of both kinds of gcc, the one that optimises as for a user."""
    is_little = toolchain == grid_toolchain(as_served=False)
    return find_toolchain() if is_little else toolchain


def toolchain_for_grid_of(family: MicroKernelFamily) -> Toolchain:
    """Return the compiler of a family none of whose grids is compiled as served.

    One that is emulated here is: the emulator knows the forms of instructions that are served.
    """
    return grid_toolchain(as_served=not needed_here(family.isa) <= detect_cpu().isa)
