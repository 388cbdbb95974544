"""A register tile for a problem on a CPU: what the values on every axis depend on."""

from dataclasses import dataclass, field, replace
from math import ceil

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.catalog import family_named

_UNKNOWN_L2_BYTES = 512 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A tile of `mr` rows and `nr` columns of a family, for a problem on some threads of a CPU.

    With `like`, a candidate for the same layer with any m, only what leaves its packed weights
    counts.
    """

    problem: Problem
    cpu: Cpu
    threads: int
    regime: Regime
    like: Candidate | None
    family: MicroKernelFamily
    mr: int
    nr: int
    micro_kernel: MicroKernel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the micro-kernel, which each step of a search asks for."""
        micro_kernel = MicroKernel(family=self.family.name, mr=self.mr, nr=self.nr)
        object.__setattr__(self, "micro_kernel", micro_kernel)

    def beside(self, mr: int, nr: int) -> "Tile":
        """Return another tile of the family in the same place."""
        return replace(self, mr=mr, nr=nr)

    def candidate(self, blocking: Blocking) -> Candidate:
        """Return the tile under a blocking."""
        return Candidate(micro_kernel=self.micro_kernel, blocking=blocking)

    @property
    def given_panel(self) -> int | None:
        """Return the columns of a packed panel, where `like` says them."""
        if self.like is None:
            return None
        family = family_named(self.like.micro_kernel.family)
        if family.layout is PackedLayout.GROUPS:
            return self.like.packed_columns
        return family.panel_width(self.like.packed_columns)

    @property
    def l2_bytes(self) -> int:
        """Return the size of L2, or a small one where it is not known."""
        return self.cpu.caches.l2_bytes or _UNKNOWN_L2_BYTES

    @property
    def weights_leave_l2(self) -> bool:
        """Return whether the weights do not fit L2."""
        return self.problem.w_bytes > self.cpu.caches.l2_bytes

    @property
    def passes_x_once(self) -> bool:
        """Return whether half of L2 keeps all weights for tiles of AMX, and a quarter not x.

        Then whole rows of x are read once, from first to last, as the hardware fetches them best.
        """
        problem = self.problem
        x_bytes = problem.m.high * problem.types.x.row_bytes(problem.k)
        reads_once = Can.READ_WEIGHTS_ONCE in self.family.can and problem.m.high > self.mr
        return reads_once and problem.w_bytes <= self.l2_bytes // 2 and x_bytes > self.l2_bytes // 4

    @property
    def fetches_blocks(self) -> bool:
        """Return whether tiles of AMX wait for weights packed ahead, and can fetch blocks."""
        waits = self.weights_leave_l2 or self.regime is Regime.COLD_WEIGHTS
        can_fetch = Can.FETCH_NEXT_BLOCK in self.family.can
        return waits and can_fetch and self.problem.operation.packs_ahead

    @property
    def weights_fill_l3(self) -> bool:
        """Return whether the weights take half of L3 or more."""
        return self.problem.w_bytes >= self.cpu.caches.l3_bytes // 2


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below a value."""
    return ceil(value / multiple) * multiple
