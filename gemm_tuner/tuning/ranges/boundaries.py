"""Which m of a range to measure, and where its kernels take turns. Nothing is measured here."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import floor, inf, isqrt, log2

from gemm_tuner.domain.candidate import MOST_KERNELS, Candidate, UpTo
from gemm_tuner.domain.layer_problems import MAX_LOSS
from gemm_tuner.domain.rows import Rows
from gemm_tuner.space.tile import round_up

_MOST_FIRST = 14
# Between two m that are nearer, a boundary need not be known better.
_NEAR = 1.3
# The speed, summed over all measured m, that one more kernel has to win.
_WORTH_A_KERNEL = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """A kernel for any m: a candidate, and whether a block holds all rows there are.

    Such a block grows with m, so two candidates for two m may be the same kernel.
    """

    candidate: Candidate
    holds_all_rows: bool

    @classmethod
    def of(cls, candidate: Candidate, rows: int) -> "Shape":
        """Return the shape of a candidate for this many rows."""
        if candidate.blocking.mc < rows:
            return cls(candidate, holds_all_rows=False)
        return cls(_with_block(candidate, 1), holds_all_rows=True)

    def at(self, rows: int) -> Candidate:
        """Return the candidate for up to this many rows."""
        return _with_block(self.candidate, rows) if self.holds_all_rows else self.candidate


@dataclass(frozen=True, slots=True)
class Piece:
    """A kernel, and the least and the greatest of the measured m that it is for."""

    low: int
    high: int
    shape: Shape


Speeds = Mapping[int, Mapping[Shape, float]]


def can_be_split(rows: Rows) -> bool:
    """Return whether there are several m that multiply something."""
    return rows.high > max(1, rows.low)


def first_rows(rows: Rows) -> tuple[int, ...]:
    """Return the m of a range to measure first: its ends, and some with a constant ratio.

    That is a little below two. With two, all m would be powers of two, and tiles of as many rows
    would look better than they are for others.
    """
    low, high = max(1, rows.low), rows.high
    steps = min(floor(log2(high / low)) + 1, _MOST_FIRST - 1)
    found = (round(low * (high / low) ** (step / steps)) for step in range(steps + 1))
    return tuple(dict.fromkeys(found))


def price_of_losses(losses: Collection[float]) -> float:
    """Return what losses at some m count together: their mean, and the worst once more.

    By the mean alone, one m would pay for what others win.
    """
    return sum(losses) / len(losses) + max(losses)


def rows_between(pieces: Sequence[Piece], speeds: Speeds) -> tuple[int, ...]:
    """Return the m to measure next: one between each two kernels that are not near yet.

    None is needed where one of them loses little at the nearest m of the other: it takes all m
    between.
    """
    return tuple(
        max(piece.high + 1, isqrt(piece.high * after.low))
        for piece, after in pairwise(pieces)
        if after.low > piece.high + 1
        and after.low > _NEAR * piece.high
        and min(_losses_beyond(piece, after, speeds)) > MAX_LOSS
    )


def shapes_near(m: int, best: Mapping[int, Shape], pieces: Sequence[Piece]) -> tuple[Shape, ...]:
    """Return the kernels that may be best at an m, once the range was split: few of all.

    They are those of the pieces that it lies in, at the end of, or between, which come first, and
    the best of this m and of those next to it.
    """
    below = [piece for piece in pieces if piece.low <= m]
    above = [piece for piece in pieces if piece.high >= m]
    beside = [*below[-1:], *above[:1]]
    beside += [piece for piece in below[-2:-1] if m == below[-1].low]
    beside += [piece for piece in above[1:2] if m == above[0].high]
    rows = sorted({m, *best})
    place = rows.index(m)
    around = [best[one] for one in rows[max(0, place - 1) : place + 2] if one in best]
    return tuple(dict.fromkeys([*(piece.shape for piece in beside), *around]))


def _losses_beyond(piece: Piece, after: Piece, speeds: Speeds) -> tuple[float, float]:
    """Return what the later of two kernels loses at the last m of the earlier, and vice versa."""
    return _loss(after.shape, speeds[piece.high]), _loss(piece.shape, speeds[after.low])


def _loss(shape: Shape, speeds: Mapping[Shape, float]) -> float:
    """Return the share of the greatest speed at an m that a kernel loses, all if it is unknown."""
    return 1.0 - speeds.get(shape, 0.0) / max(speeds.values())


def split(speeds: Speeds) -> tuple[Piece, ...]:
    """Return the kernels with the least loss over all measured m, few of them where few will do.

    Args:
        speeds: for each measured m, the speed of each kernel that was timed there.
    """
    rows = sorted(speeds)
    # For so many of the first m, the least cost with each number of pieces, and the pieces: what is
    # best for the first m with all the pieces there may be would leave none to the others.
    found: list[dict[int, tuple[float, tuple[Piece, ...]]]] = [{0: (0.0, ())}]
    for end in range(1, len(rows) + 1):
        least: dict[int, tuple[float, tuple[Piece, ...]]] = {}
        for begin in range(end):
            loss, shape = _least_loss(speeds, rows[begin:end])
            piece = Piece(rows[begin], rows[end - 1], shape)
            for count, (cost, pieces) in found[begin].items():
                option = (cost + _WORTH_A_KERNEL + loss, (*pieces, piece))
                if count < MOST_KERNELS and (
                    count + 1 not in least or option[0] < least[count + 1][0]
                ):
                    least[count + 1] = option
        found.append(least)
    return min(found[-1].values(), key=lambda option: option[0])[1]


def _least_loss(speeds: Speeds, rows: Sequence[int]) -> tuple[float, Shape]:
    """Return the shape that loses least in all at some m, and what it loses there."""
    shapes = dict.fromkeys(shape for m in rows for shape in speeds[m])

    def loss(shape: Shape) -> float:
        return sum(_loss(shape, speeds[m]) if shape in speeds[m] else inf for m in rows)

    least = min(shapes, key=lambda shape: (loss(shape), shape.candidate.text))
    return loss(least), least


def candidate_of(pieces: Sequence[Piece], rows: Rows, speeds: Speeds) -> Candidate:
    """Return the candidate for a range of m, of pieces that were chosen by some speeds.

    Where one kernel is the best for all, it has a boundary too: so a candidate for a range that was
    measured all over is never one that was tuned for the greatest m alone.
    """
    last = pieces[-1].shape.at(rows.high)
    boundaries = [
        (_boundary(piece, after, speeds), piece.shape) for piece, after in pairwise(pieces)
    ]
    below = [UpTo(rows=boundary, kernel=shape.at(boundary)) for boundary, shape in boundaries]
    return replace(last, below=tuple(below) or (UpTo(rows=max(1, rows.low), kernel=last),))


def _boundary(piece: Piece, after: Piece, speeds: Speeds) -> int:
    """Return the last m of a piece: in the middle between two that were measured.

    A kernel that loses little at the nearest m of the other takes all m between.
    """
    of_later, of_earlier = _losses_beyond(piece, after, speeds)
    if min(of_later, of_earlier) <= MAX_LOSS:
        return piece.high if of_later <= of_earlier else after.low - 1
    return max(piece.high, isqrt(piece.high * after.low))


def _with_block(candidate: Candidate, rows: int) -> Candidate:
    block = round_up(max(1, rows), candidate.micro_kernel.mr)
    return replace(candidate, blocking=replace(candidate.blocking, mc=block))
