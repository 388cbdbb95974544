"""The model's favourites among the candidates of a space."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, zip_longest
from math import log

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.micro_kernel import PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.cores import FEW_STREAMS, core_of
from gemm_tuner.space.model import loads_per_multiplication, predict_cycles
from gemm_tuner.space.tile import round_up

_EQUALLY_FAST = 0.01
# What the model may err between two ways to read w.
_EITHER_MAY_BE_FASTER = 0.1
# Of a panel beside one row, for each step of k, or of weights in groups for each chunk: a wider one
# comes from memory more slowly.
_NARROW_BYTES = {PackedLayout.PANELS: 192, PackedLayout.GROUPS: 256}
_CHUNK_BYTES = 4  # of a column: some steps of k of weights in groups


def ranked(
    candidates: Iterable[Candidate],
    problem: Problem,
    cpu: Cpu,
    cost: Callable[[Candidate], float] | None = None,
) -> list[Candidate]:
    """Return the candidates in the order in which the model expects them to be fast.

    Of those within a percent, the sturdier first: a tile that loads fewer registers for each
    multiplication. `cost` is in the place of the predicted time of one core.
    """

    def predicted(candidate: Candidate) -> tuple[int, float, str]:
        family = family_named(candidate.micro_kernel.family)
        taken = cost(candidate) if cost else predict_cycles(problem, candidate, family, cpu)
        loads = loads_per_multiplication(problem, candidate, family)
        return round(log(taken) / _EQUALLY_FAST), loads, candidate.text

    return sorted(candidates, key=predicted)


def shortlist(space: Space, count: int | None = None) -> list[Candidate]:
    """Return the `count` tiles that the model ranks first, each with the blocking to try first.

    All of them, in that order, if there is no count. Of a w that comes with each call, those that
    pack it and those that read it in place are in turn, as long as either may be faster. Beside one
    row of x and cold weights, a narrow panel comes before all of them.

    Raises:
        NoKernelFamily: no family of the catalog covers the problem on this CPU.
    """
    cost = partial(_predicted, space=space)
    order = _narrow_first(ranked(space.defaults(), space.problem, space.cpu, cost), space)
    ways = [[one for one in order if one.blocking.pack_w is packs] for packs in (True, False)]
    if not all(ways):
        return order[:count]
    longest = _predicted(order[0], space) * (1 + _EITHER_MAY_BE_FASTER)
    near = [[one for one in way if _predicted(one, space) <= longest] for way in ways]
    near.sort(key=lambda way: way[:1] != order[:1])
    in_turn = (one for one in chain.from_iterable(zip_longest(*near)) if one)
    return list(dict.fromkeys([*in_turn, *order]))[:count]


def _narrow_first(order: list[Candidate], space: Space) -> list[Candidate]:
    """Return what is read a few cache lines at a time first, then the best of the other panels.

    On a core that reads many streams faster, the best of those with more than two is the first
    instead, also of hot weights: a search times the best of these beside cold ones.

    One row of x beside cold weights waits for them alone, which the model takes for equally fast
    in all tiles. What the last panel is padded with is read, too.
    """
    n, is_cold = space.problem.n, space.regime is Regime.COLD_WEIGHTS
    reads_many = core_of(space.cpu).rates.reads_many_streams
    if space.problem.m.high != 1 or not (is_cold or reads_many):
        return order

    def step_bytes(one: Candidate) -> int:
        family = family_named(one.micro_kernel.family)
        if family.layout is PackedLayout.GROUPS:
            return one.micro_kernel.nr * _CHUNK_BYTES
        return space.problem.types.w.row_bytes(one.micro_kernel.nr * family.k_step)

    def is_panel(one: Candidate) -> bool:
        family = family_named(one.micro_kernel.family)
        # Where headers lie between the weights, the hardware alone does not fetch enough ahead.
        is_fetched = family.layout is PackedLayout.PANELS or one.blocking.prefetch_w_bytes > 0
        is_split = one.blocking.w_streams > FEW_STREAMS
        return family.layout in _NARROW_BYTES and (is_fetched or is_split) and not family.k_tile

    def is_narrow(one: Candidate) -> bool:
        layout = family_named(one.micro_kernel.family).layout
        is_padded = round_up(n, one.micro_kernel.nr) > n * most
        return step_bytes(one) <= _NARROW_BYTES[layout] and not is_padded

    most = 1 + _EITHER_MAY_BE_FASTER
    longest = min(_predicted(one, space) for one in order) * most
    near = [one for one in order if is_panel(one) and _predicted(one, space) <= longest]
    first = [one for one in near if reads_many and one.blocking.w_streams > FEW_STREAMS][:1]
    if is_cold and not first:
        first = sorted(filter(is_narrow, near), key=step_bytes, reverse=True)[:1]
    return list(dict.fromkeys([*first, *near[: len(first)], *order]))


def _predicted(candidate: Candidate, space: Space) -> float:
    """Return the cycles of a call; cold weights come from memory, whatever L3 could hold."""
    family = family_named(candidate.micro_kernel.family)
    is_cold = space.regime is Regime.COLD_WEIGHTS
    memory_bytes = space.problem.w_bytes if is_cold else 0.0
    return predict_cycles(space.problem, candidate, family, space.cpu, memory_bytes=memory_bytes)
