"""How many steps of k one turn of the inner loop takes.

One, two or four. Only one keeps a panel of a short k in registers; more walk along k.

Tried first: one where registers hold a panel of up to eight steps, but not for pairs of bf16. Two
where they hold a longer panel. Four for few sums, which would wait for each other (fewer than
eight, or eight where weights are cold), and for rows of a `kn` that are read in place. Else one,
also with shuffles and for weights in groups, whose chunk is several steps.
"""

from math import ceil

from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.in_place import reads_w_in_place
from gemm_tuner.domain.kept_panel import panel_fits_registers
from gemm_tuner.domain.micro_kernel import PackedLayout
from gemm_tuner.space.axis import Axis
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile

# Of so many sums, none waits for the one before: unrolling k brings little.
_SUMS_AT_ONCE = 8
# In so few steps of k, products take about as long as the epilogue, which should run beside them.
_FEW_STEPS = 8


def _choices(_tile: Tile, _choice: Choice) -> tuple[int, ...]:
    return (1, 2, 4)


def _first(tile: Tile, choice: Choice) -> Choice:
    is_unrolled = tile.family.layout is PackedLayout.GROUPS or choice.shuffle_x
    if not is_unrolled and _reads_rows_in_place(tile, choice):
        return choice.having(k_unroll=4)
    return choice.having(k_unroll=1 if is_unrolled else _unroll_first(tile))


def _reads_rows_in_place(tile: Tile, choice: Choice) -> bool:
    """Return whether rows of a w that comes with the call are multiplied where they lie."""
    problem = tile.problem
    is_of_rows = tile.family.layout is PackedLayout.PANELS and not problem.operation.has_values
    return is_of_rows and reads_w_in_place(problem, choice.blocking)


def _unroll_first(tile: Tile) -> int:
    """Return how far to unroll k; 1 keeps a panel in registers where it can."""
    problem, family = tile.problem, tile.family
    sums = tile.mr * tile.nr // (1 if family.layout is PackedLayout.COLUMNS else family.lanes)
    fits = panel_fits_registers(problem, family, tile.nr)
    # Products of pairs take twice as long on some cores.
    gains = fits and family.k_step != 2
    if gains and ceil(problem.k / family.k_step) <= _FEW_STEPS:
        return 1
    if sums < _SUMS_AT_ONCE + (tile.regime is Regime.COLD_WEIGHTS):
        return 4
    return 2 if fits and not (gains and tile.nr == family.lanes) else 1


AXIS = Axis(
    fields=("k_unroll",),
    reads=("shuffle_x", "pack_w"),
    choices=_choices,
    first=_first,
    of_attention=True,
)
