"""Blocking: how the loops around a micro-kernel are cut, ordered and shared."""

from dataclasses import dataclass
from enum import StrEnum

from gemm_tuner.domain.words import Word, flag, grid, number, one_of, sizes
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
    def is_jc_outer(self) -> bool:
        """Return whether a block of columns meets all blocks of rows, instead of the reverse."""
        return self in {LoopOrder.JC_IC_JR_IR, LoopOrder.JC_IC_IR_JR}

    @property
    def is_ir_outer(self) -> bool:
        """Return whether a tile of rows meets all panels, instead of a panel all tiles of rows."""
        return self in {LoopOrder.JC_IC_IR_JR, LoopOrder.IC_JC_IR_JR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocking:
    """Cache blocks in elements, the order of the loops, and options such as packing and prefetch.

    Each field has a word in `WORDS`, and is decided by an axis in `space/axes/`, which says what
    it does and when.
    """

    mc: int
    nc: int
    kc: int
    loop_order: LoopOrder = LoopOrder.JC_IC_JR_IR
    pack_x: bool = False
    pack_w: bool = False
    dot_keys: bool = False
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
        ways = (self.grid_m, self.grid_n, self.grid_k)
        counts = (self.mc, self.nc, self.kc, self.w_streams, self.k_unroll, *ways)
        if min(counts) < 1 or self.prefetch_w_bytes < 0:
            raise InvalidCandidate(f"blocking {self} has an empty block.")
        if self.prefetch_w_bytes and self.prefetch_next_panel:
            raise InvalidCandidate(f"blocking {self} fetches weights in two ways; choose one.")

    @property
    def extras(self) -> list[str]:
        """Return the words of the options, besides blocks and order."""
        words = [word.text(self) for word in WORDS if word.unsaid is not None]
        return [word for word in words if word is not None]

    @property
    def text(self) -> str:
        """Return the text form: `mc128_nc768_kc256 jc_ic_jr_ir pack_x pf4096`."""
        return " ".join(text for word in WORDS if (text := word.text(self)) is not None)

    @property
    def parts(self) -> int:
        """Return into how many parts a call can be cut."""
        return self.grid_m * self.grid_n * self.grid_k

    @property
    def fetches_near(self) -> bool:
        """Return whether weights are fetched shortly before their use, and so into L2 alone."""
        return 0 < self.prefetch_w_bytes <= NEAR_BYTES


# In the order of the text. A word that says nothing special is left out of it.
WORDS: tuple[Word, ...] = (
    sizes("mc", "nc", "kc"),
    one_of("loop_order", LoopOrder),
    flag("pack_x"),
    flag("pack_w"),
    flag("dot_keys"),
    flag("convert_once"),
    number("prefetch_w_bytes", "pf", unsaid=0),
    flag("prefetch_next_panel", "pf_next"),
    number("w_streams", "ws", unsaid=1),
    flag("shuffle_x"),
    flag("stream_y"),
    number("k_unroll", "u", unsaid=1),
    grid("grid_m", "grid_n", "grid_k"),
)
