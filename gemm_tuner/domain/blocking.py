"""Blocking: how the loops around a micro-kernel are cut, ordered and shared."""

from dataclasses import dataclass
from enum import StrEnum

from gemm_tuner.errors import InvalidCandidate

# So far ahead at most, weights are fetched shortly before their use.
NEAR_BYTES = 1024


class LoopOrder(StrEnum):
    """The four loops around the micro-kernel, outermost first.

    jc walks blocks of nc columns, ic blocks of mc rows, jr panels of nr columns and ir tiles of mr
    rows. The loop over blocks of kc stands between the outer and the inner pair.
    """

    JC_IC_JR_IR = "jc_ic_jr_ir"  # a panel of w stays in L1, rows of x stream
    JC_IC_IR_JR = "jc_ic_ir_jr"  # a tile of x stays in L1, panels of w stream
    IC_JC_JR_IR = "ic_jc_jr_ir"
    IC_JC_IR_JR = "ic_jc_ir_jr"

    @property
    def is_ir_outer(self) -> bool:
        """Return whether a tile of rows meets all panels, instead of a panel all tiles of rows."""
        return self in {LoopOrder.JC_IC_IR_JR, LoopOrder.IC_JC_IR_JR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocking:
    """Cache blocks in elements, the order of the loops, and what is done beside the arithmetic.

    `pack_x` copies each block of x to contiguous rows. With `convert_once`, a block of a panel of
    weights that are not multiplied as they lie is converted to memory of the thread, for all tiles
    of rows that meet it.
    `prefetch_w_bytes` is how far ahead of their use packed weights are fetched; 0 leaves it to the
    hardware. With `prefetch_next_panel`, the next panel is fetched into L2 instead: while one is
    converted, or by the tiles that meet it, each a part. A tile reads `w_streams` packed panels
    side by side. `shuffle_x` loads four steps of every fourth row of x at once and picks each by a
    shuffle. `stream_y` writes cache lines of y past the caches. `k_unroll` steps of k stand in one
    turn of the inner loop. `grid_m` x `grid_n` x `grid_k` parts can run at the same time; those
    along k compute sums that a second phase adds up.
    """

    mc: int
    nc: int
    kc: int
    loop_order: LoopOrder = LoopOrder.JC_IC_JR_IR
    pack_x: bool = False
    convert_once: bool = False
    prefetch_w_bytes: int = 0
    prefetch_next_panel: bool = False
    w_streams: int = 1
    shuffle_x: bool = False
    stream_y: bool = False
    k_unroll: int = 1
    grid_m: int = 1
    grid_n: int = 1
    grid_k: int = 1

    def __post_init__(self) -> None:
        """Check that no count is zero."""
        grid = (self.grid_m, self.grid_n, self.grid_k)
        counts = (self.mc, self.nc, self.kc, self.w_streams, self.k_unroll, *grid)
        if min(counts) < 1 or self.prefetch_w_bytes < 0:
            raise InvalidCandidate(f"blocking {self} has an empty block.")
        if self.prefetch_w_bytes and self.prefetch_next_panel:
            raise InvalidCandidate(f"blocking {self} fetches weights in two ways; choose one.")

    @property
    def fetches_near(self) -> bool:
        """Return whether weights are fetched shortly before their use, and so into L2 alone."""
        return 0 < self.prefetch_w_bytes <= NEAR_BYTES
