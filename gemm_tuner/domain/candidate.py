"""A candidate: one micro-kernel under one blocking, a kernel that could be generated."""

import re
from dataclasses import dataclass

from gemm_tuner.domain.blocking import Blocking, LoopOrder
from gemm_tuner.domain.micro_kernel import MicroKernel
from gemm_tuner.errors import InvalidCandidate

_ORDERS = "|".join(order.value for order in LoopOrder)
_TEXT = re.compile(
    r"(?P<micro_kernel>\w+) mc(?P<mc>\d+)_nc(?P<nc>\d+)_kc(?P<kc>\d+) "
    rf"(?P<loop_order>{_ORDERS})(?P<pack_x> pack_x)?(?P<convert_once> convert_once)?"
    r"(?: pf(?P<prefetch>\d+))?(?P<next_panel> pf_next)?(?: ws(?P<w_streams>\d+))?"
    r"(?P<shuffle_x> shuffle_x)?(?P<stream_y> stream_y)?(?: u(?P<k_unroll>\d+))?"
    r"(?: grid(?P<grid_m>\d+)x(?P<grid_n>\d+)(?:x(?P<grid_k>\d+))?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to compute a problem.

    The text form is `avx512_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir pack_x pf4096 u4 grid1x2`;
    words that say nothing special (no packing, no prefetch, no unrolling, one part) are left out.
    `convert_once` after `pack_x` converts weights in groups for all tiles of rows. `ws2` before
    `u4` is two streams of weights; `pf_next` in the place of `pf4096` fetches the next panel of
    them. `shuffle_x` and `stream_y` follow.
    A grid that cuts k has three numbers: `grid1x1x2` is two parts along k.
    """

    micro_kernel: MicroKernel
    blocking: Blocking

    @property
    def text(self) -> str:
        """Return the text form, which `parse` reads back."""
        blocking = self.blocking
        words = [
            self.micro_kernel.text,
            f"mc{blocking.mc}_nc{blocking.nc}_kc{blocking.kc}",
            blocking.loop_order.value,
        ]
        if blocking.pack_x:
            words.append("pack_x")
        if blocking.convert_once:
            words.append("convert_once")
        if blocking.prefetch_w_bytes:
            words.append(f"pf{blocking.prefetch_w_bytes}")
        if blocking.prefetch_next_panel:
            words.append("pf_next")
        if blocking.w_streams > 1:
            words.append(f"ws{blocking.w_streams}")
        if blocking.shuffle_x:
            words.append("shuffle_x")
        if blocking.stream_y:
            words.append("stream_y")
        if blocking.k_unroll > 1:
            words.append(f"u{blocking.k_unroll}")
        if self.parts > 1:
            k_ways = f"x{blocking.grid_k}" if blocking.grid_k > 1 else ""
            words.append(f"grid{blocking.grid_m}x{blocking.grid_n}{k_ways}")
        return " ".join(words)

    @property
    def parts(self) -> int:
        """Return into how many parts a call can be cut."""
        return self.blocking.grid_m * self.blocking.grid_n * self.blocking.grid_k

    @property
    def packed_columns(self) -> int:
        """Return the columns of a packed panel of weights."""
        return self.micro_kernel.nr // self.blocking.w_streams

    @property
    def complexity(self) -> int:
        """Return how many things the kernel does beside the arithmetic."""
        blocking = self.blocking
        return sum(
            (
                blocking.pack_x,
                blocking.convert_once,
                blocking.prefetch_w_bytes > 0 or blocking.prefetch_next_panel,
                blocking.w_streams > 1,
                blocking.shuffle_x,
                blocking.stream_y,
                blocking.k_unroll > 1,
                self.parts > 1,
            )
        )

    @classmethod
    def parse(cls, text: str) -> "Candidate":
        """Return the candidate written in the text form.

        Raises:
            InvalidCandidate: the text does not have this form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InvalidCandidate(
                f"candidate {text!r} is not understood; write it as "
                "'avx512_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir pf4096'."
            )
        return cls(
            micro_kernel=MicroKernel.parse(match["micro_kernel"]),
            blocking=Blocking(
                mc=int(match["mc"]),
                nc=int(match["nc"]),
                kc=int(match["kc"]),
                loop_order=LoopOrder(match["loop_order"]),
                pack_x=match["pack_x"] is not None,
                convert_once=match["convert_once"] is not None,
                prefetch_w_bytes=int(match["prefetch"] or 0),
                prefetch_next_panel=match["next_panel"] is not None,
                w_streams=int(match["w_streams"] or 1),
                shuffle_x=match["shuffle_x"] is not None,
                stream_y=match["stream_y"] is not None,
                k_unroll=int(match["k_unroll"] or 1),
                grid_m=int(match["grid_m"] or 1),
                grid_n=int(match["grid_n"] or 1),
                grid_k=int(match["grid_k"] or 1),
            ),
        )
