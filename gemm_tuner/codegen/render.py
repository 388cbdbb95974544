"""Render the C++ source of one candidate for one problem."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from gemm_tuner.codegen.environment import environment
from gemm_tuner.codegen.packing import packing_block, panels_packed_together
from gemm_tuner.domain.attention import cuts_keys, phases_of, products_of_attention
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape, Step
from gemm_tuner.domain.in_place import has_short_rows, reads_w_in_place
from gemm_tuner.domain.kept_panel import keeps_panel
from gemm_tuner.domain.micro_kernel import Additions, Can, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.next_block import next_lines
from gemm_tuner.domain.packed_format import needs_column_sums, packed_format
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.source import Source
from gemm_tuner.domain.step_table import FUNCTION_PARTS, SOFTMAX_FUNCTIONS

_QUANTISING = "parts/quantise"
_BLANK_LINES = re.compile(r"\n{3,}")
_FEWEST_ROWS_OF_GAPLESS_COPY = 6
_X_AND_TABLE = 2
# Rows of a tile: with so few, two tiles that share rows have no fewer of them than a rest.
_MOST_NOT_SHARED = 2
_MOST_SUMS = 192  # vectors, in the functions for all heights of a last tile
_SUMS_AT_ONCE = 8  # two multiply-adds begin in a cycle, and each takes four
_SPARE_REGISTERS = 2  # gcc 12 copies sums where a loop begins
_TINY_FLOP = 2 * 64**3
# What L1 keeps beside rows of x, on every CPU with AMX so far: space/cores.csv.
_L1_BYTES_OF_WEIGHTS = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenderedOperand:
    """An operand as the epilogue template sees it."""

    name: str
    shape: OperandShape
    cpp: str
    is_offset: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenderedStep:
    """A step as the epilogue template sees it."""

    cpp: str
    operand: _RenderedOperand | None
    parameters: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenderedKernel:
    """One of several kernels as their template sees it; `name` is that of its namespace.

    It was tuned for so many `parts`.
    """

    name: str
    rows: Rows
    phases: int
    parts: int
    text: str


def render(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> Source:
    """Return the C++ of `candidate`, whose micro-kernels are of `family`, for `problem`."""
    if candidate.below:
        text = _render_several(problem, candidate, family)
    else:
        text = _render_one(problem, candidate, family)
    return Source(
        text=_BLANK_LINES.sub("\n\n", text),
        keeps_roundings=problem.is_fixed,
        abi_version=problem.operation.abi_version,
    )


def _render_several(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> str:
    """Return the kernels of a candidate, each for its part of the range of m, and what calls them.

    Each is rendered as if it were alone, so that the same is compiled that was tuned.
    """
    kernels = [
        _RenderedKernel(
            name=f"up_to_{rows.high}",
            rows=rows,
            phases=phases_of(problem, kernel.blocking),
            parts=kernel.parts,
            text=_render_one(
                replace(problem, m=rows), kernel, family, is_one_of_several=True
            ).strip(),
        )
        for rows, kernel in candidate.kernels(problem.m)
    ]
    return (
        environment()
        .get_template("several.cpp.j2")
        .render(
            problem=problem,
            candidate=candidate,
            kernels=kernels,
            phases=max(kernel.phases for kernel in kernels),
            most_parts=max(kernel.parts for kernel in kernels),
            description=json.dumps(_describe(problem, candidate, family)),
        )
    )


def _render_one(
    problem: Problem,
    candidate: Candidate,
    family: MicroKernelFamily,
    *,
    is_one_of_several: bool = False,
) -> str:
    if problem.operation.has_values:
        return _render_attention(problem, candidate, family, is_one_of_several=is_one_of_several)
    facts = _facts(problem, candidate, family, is_one_of_several=is_one_of_several)
    return environment().get_template("gemm.cpp.j2").render(facts)


def _render_attention(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily, *, is_one_of_several: bool
) -> str:
    """Return a kernel of attention: its two products, each in a namespace, and what joins them."""
    outer = replace(candidate, blocking=replace(candidate.blocking, pack_w=False))
    products = {
        name: environment()
        .get_template("within.cpp.j2")
        .render(
            _facts(one.problem, one.candidate, one.family)
            | {"function_parts": []}
            | _facts_within(name, one.family)
        )
        .strip()
        for name, one in products_of_attention(problem, candidate, family).items()
    }
    facts = _facts(problem, outer, family, is_one_of_several=is_one_of_several)
    functions = [one for each in SOFTMAX_FUNCTIONS for one in each.closure()]
    parts = {function.part for function in functions}
    facts |= products | {
        "candidate": candidate,
        "packs_values": candidate.blocking.pack_w,
        "rounds_weights": problem.types.x is DType.BF16,
        "functions": {function.name for function in functions},
        "function_parts": [part for part in FUNCTION_PARTS if part in parts],
        "description": json.dumps(_describe(problem, candidate, family)),
    }
    return environment().get_template("attention.cpp.j2").render(facts)


def _facts_within(name: str, family: MicroKernelFamily) -> dict[str, bool]:
    """Return what differs in the product `name` of attention from one that stands alone.

    Tile registers move sums to y whole: it is float, of whole vectors, and no steps follow. The
    weights that are multiplied by values have zeros behind them.
    """
    of_tiles = {
        "sums_in_y": True,
        "sums_in_tiles": False,
        "sums_in_workspace": False,
        "finishes_later": False,
        "has_zeros_behind_x": name == "values",
    }
    return {"is_within": True} | (of_tiles if family.k_tile else {})


def _facts(
    problem: Problem,
    candidate: Candidate,
    family: MicroKernelFamily,
    *,
    is_one_of_several: bool = False,
) -> dict[str, Any]:
    """Return what a template reads of one product."""
    return {
        "problem": problem,
        "candidate": candidate,
        "family": family,
        "blocking": candidate.blocking,
        "micro_kernel": candidate.micro_kernel,
        "elements": _elements(problem),
        "is_one_of_several": is_one_of_several,
        "is_within": False,
        "description": json.dumps(_describe(problem, candidate, family)),
        **_epilogue_facts(problem),
        **_loop_facts(problem, candidate, family),
        **_packing_facts(problem, candidate, family),
        **_product_facts(problem, candidate, family),
    }


def _epilogue_facts(problem: Problem) -> dict[str, Any]:
    """Return the steps after a product, their operands, and the functions that they call."""
    operands = _rendered_operands(problem)
    kinds = [step.kind for step in problem.epilogue.steps]
    functions = frozenset(function for kind in kinds for function in kind.called)
    parts = {function.part for function in functions}
    return {
        "steps": _rendered_steps(problem, operands),
        "operands": operands,
        "offsets": [operand for operand in operands if operand.is_offset],
        "quantises": problem.types.y in {DType.S8, DType.U8} or _QUANTISING in parts,
        "functions": {function.name for function in functions},
        "function_parts": [
            part for part in FUNCTION_PARTS if part in parts and part != _QUANTISING
        ],
        "is_long": any(kind.is_long for kind in kinds),
    }


def _loop_facts(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily
) -> dict[str, Any]:
    """Return the order of the loops, the phases of a call, and the tiles at their ends."""
    blocking, mr = candidate.blocking, candidate.micro_kernel.mr
    k_blocks = ceil(problem.k / blocking.kc)
    return {
        "k_blocks": k_blocks,
        "sums_in_workspace": blocking.grid_k > 1
        or (k_blocks > 1 and (family.k_tile > 0 or not problem.types.y_holds_sums)),
        "sums_in_y": False,
        "sums_in_tiles": family.k_tile > 0 and k_blocks > 1 and blocking.grid_k == 1,
        "finishes_later": _finishes_later(problem, candidate, family),
        "shapes_tiles": family.k_tile > 0 and not problem.operation.has_values,
        "phases": phases_of(problem, blocking),
        "cuts_keys": cuts_keys(problem, blocking),
        "exact_rest": problem.m.exact % mr if problem.m.exact is not None else 0,
        "rest_heights": _rest_heights(problem, candidate, family),
        "shared_rows": _shared_rows(problem, candidate, family),
        "rest_steps": _rest_steps(problem, candidate, family),
        "is_jc_outer": blocking.loop_order.is_jc_outer,
        "fetches_next_rows": blocking.prefetch_next_panel and not problem.operation.packs_ahead,
        "fetches_next_block": blocking.prefetch_next_panel and blocking.pack_w,
        "fetches_panels": blocking.prefetch_next_panel
        and problem.operation.packs_ahead
        and not blocking.convert_once
        and Can.FETCH_NEXT_PANEL in family.can,
        "next_lines": next_lines(problem.m.high, mr, blocking)
        if blocking.prefetch_next_panel and Can.FETCH_NEXT_BLOCK in family.can
        else 0,
        "is_ir_outer": blocking.loop_order.is_ir_outer,
    }


def _finishes_later(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> bool:
    """Return whether a tile of AMX waits with its epilogue, until the next one is multiplied.

    Not where a tile is alone, nor where something that an epilogue reads is made anew between the
    two: sums of x for each block of rows, sums of the columns of a w that is packed in the call.
    """
    if problem.operation.has_values:
        return False
    blocking, tile = candidate.blocking, candidate.micro_kernel
    has_tiles = family.k_tile > 0 and family.layout is PackedLayout.PANELS and problem.k > 0
    is_alone = problem.n <= tile.nr and problem.m.high <= tile.mr
    sums_of_w = blocking.pack_w and needs_column_sums(problem, family)
    is_cut = blocking.grid_k > 1 and blocking.kc < problem.k
    return has_tiles and not (is_alone or problem.has_zero_points or sums_of_w or is_cut)


def _packing_facts(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily
) -> dict[str, Any]:
    """Return how w and x are packed, or read where they lie."""
    blocking, nr = candidate.blocking, candidate.micro_kernel.nr
    packing = packing_block(problem, family, candidate.packed_columns)
    return {
        "packing": packing,
        "panels_packed_together": panels_packed_together(problem, packing, nr),
        "has_single_columns": family.layout is PackedLayout.COLUMNS and 1 in {nr, problem.n % nr},
        "keeps_panel": keeps_panel(problem, candidate, family),
        "reads_w_in_place": reads_w_in_place(problem, blocking),
        "has_short_rows": has_short_rows(problem, blocking),
        "shuffles_x": blocking.shuffle_x and family.can_shuffle(problem.types.x),
        "tile_x": (blocking.pack_x and family.packed_x(problem.types.x)) or "X",
        "has_zeros_behind_x": blocking.pack_x and _ends_in_part_of_tile(problem, family),
        "reads_weights_once": _reads_weights_once(problem, candidate, family),
        "keeps_copy_of_x": _keeps_copy_of_x(problem, candidate, family),
        "has_gapless_copy": _has_gapless_copy(problem, candidate, family),
    }


def _product_facts(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily
) -> dict[str, Any]:
    """Return how elements become products and sums, by which instructions."""
    # What becomes floats once takes its scales there; integers in bf16 stay exact without.
    converts_to_floats = candidate.blocking.convert_once and family.k_step == 1
    return {
        "converts_to_floats": converts_to_floats,
        "micro_kernel_template": (converts_to_floats and family.template.of_floats)
        or family.template.name,
        "sums_x": problem.has_zero_points and not converts_to_floats,
        "needs_column_sums": needs_column_sums(problem, family),
        "digits": family.digits(problem.types.x),
        "packs_pairs": family.packs_pairs(problem.types),
        "stores_pairs": family.stores_pairs(problem.types.y),
        "quad_steps": _quad_steps(problem, family),
        "register": family.vectors.constraint,
        "fills_registers": _fills_registers(candidate, family),
        "is_tight": _is_tight(candidate, family),
        "adds_in_turn": problem.is_fixed and family.additions is Additions.IN_TURN,
        "rounds_by_instruction": IsaFeature.AVX512_BF16 in family.isa,
    }


def _quad_steps(problem: Problem, family: MicroKernelFamily) -> tuple[int, ...]:
    """Return which steps of eight a chunk of 4-bit weights has in the low and in the high halves.

    Empty where a chunk has four steps, one in each byte.
    """
    if problem.types.w.size_bits == 8:
        return ()
    if family.packs_pairs(problem.types):
        return (0, 4, 1, 5, 2, 6, 3, 7)
    return (0, 2, 4, 6, 1, 3, 5, 7)


def _is_tight(candidate: Candidate, family: MicroKernelFamily) -> bool:
    """Return whether sums, one row of a panel and one element of x leave no register free."""
    if family.layout is not PackedLayout.PANELS or family.k_tile:
        return False
    tile = candidate.micro_kernel
    vectors = tile.nr // family.lanes
    return (tile.mr + 1) * vectors + 1 == family.registers


def _fills_registers(candidate: Candidate, family: MicroKernelFamily) -> bool:
    """Return whether a tile leaves no registers for the constants that weights are converted with.

    Of 4 bits, those for x of f32 also keep what two steps of k have in common.
    """
    if Can.UNPACK_GROUPS not in family.can or candidate.blocking.convert_once:
        return False
    tile = candidate.micro_kernel
    vectors = tile.nr // family.lanes
    rows_of_registers = tile.mr + family.product.weight_registers
    others = _X_AND_TABLE + family.product.constants
    return rows_of_registers * vectors + others >= family.registers - _SPARE_REGISTERS


def _rest_steps(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> list[int]:
    """Return the heights whose sums are the numbers of rows that tiles may leave over."""
    if problem.m.exact is not None or _rest_heights(problem, candidate, family):
        return []
    return [step for step in (16, 8, 4, 2, 1) if step < candidate.micro_kernel.mr]


def _rest_heights(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> list[int]:
    """Return the heights of tiles for rows left over: of whole registers, if they take several.

    A tile of few rows waits for its sums, so that two of them take twice as long as one: unless
    that is much code, each number of rows that may be left over has a tile of its own. So do those
    of two tiles that share what would be a whole tile and few rows.
    """
    tile, step = candidate.micro_kernel, family.register_rows
    if step == 1:
        few = _most_shared(problem, candidate, family)
        heights = _rests(problem.m, tile.mr, few) if problem.m.exact is None else []
        return heights if sum(heights) * _sums_of_a_row(candidate, family) <= _MOST_SUMS else []
    if problem.m.exact is None:
        return list(range(step, tile.mr + 1, step))
    rest = problem.m.exact % tile.mr
    return [ceil(rest / step) * step] if rest else []


def _rests(rows: Rows, mr: int, few: int) -> list[int]:
    """Return the numbers of rows, but none, that whole tiles of `mr` may leave over, or share.

    Up to a `few` rows are shared.
    """
    numbers = range(rows.low, min(rows.high + 1, rows.low + mr))
    rests = {m % mr for m in numbers} - {0}
    shared = {mr + rest for rest in rests if rest <= few}
    return sorted(rests | {half for both in shared for half in (both // 2, both - both // 2)})


def _sums_of_a_row(candidate: Candidate, family: MicroKernelFamily) -> int:
    """Return in how many registers a row of a tile is summed."""
    nr = candidate.micro_kernel.nr
    return nr if family.layout is PackedLayout.COLUMNS else ceil(nr / family.lanes)


def _most_shared(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> int:
    """Return how many rows are so few that two tiles share them and those of a whole one.

    Such a tile waits for its sums. What is fetched from memory ahead arrives while a whole tile is
    computed, rather than a half: then rows are few only where multiply-adds wait for each other.
    """
    mr = candidate.micro_kernel.mr
    if not _MOST_NOT_SHARED < mr < problem.m.high:
        return 0
    waiting = (_SUMS_AT_ONCE - 1) // _sums_of_a_row(candidate, family)
    return min(mr // 2, waiting) if candidate.blocking.prefetch_w_bytes else mr // 2


def _shared_rows(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> int:
    """Return how many last rows two tiles share with a whole one's, at most."""
    has_heights = family.register_rows == 1 and bool(_rest_heights(problem, candidate, family))
    return _most_shared(problem, candidate, family) if has_heights else 0


def _has_gapless_copy(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> bool:
    """Return whether the loops stand there twice, once for rows of x without gaps.

    Where the distance of rows is a constant, all are addressed from one pointer. That counts where
    there are more rows than registers for pointers, and little is done with an element of x: a
    tile is one vector wide, or a product so small that preparing the pointers shows.
    """
    mr, nr = candidate.micro_kernel.mr, candidate.micro_kernel.nr
    if candidate.blocking.pack_x or problem.k == 0 or mr < _FEWEST_ROWS_OF_GAPLESS_COPY:
        return False
    is_narrow = nr == 1 if family.layout is PackedLayout.COLUMNS else nr <= family.lanes
    return is_narrow or problem.flop(problem.m.high) <= _TINY_FLOP


def _ends_in_part_of_tile(problem: Problem, family: MicroKernelFamily) -> bool:
    return family.k_tile > 0 and problem.k % family.k_tile > 0


def _keeps_copy_of_x(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> bool:
    """Return whether what a block of rows is copied to, or summed up to, meets all columns."""
    blocking = candidate.blocking
    sums_x = problem.has_zero_points and not (blocking.convert_once and family.k_step == 1)
    makes = blocking.pack_x or sums_x or family.digits(problem.types.x)
    return bool(makes) and not blocking.loop_order.is_jc_outer


def _reads_weights_once(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> bool:
    """Return whether tiles of weights pass rows of x that L1 keeps, and would evict them.

    One tile of rows meets all panels of a block then, and the panels do not fit L1 beside it.
    """
    tile, blocking = candidate.micro_kernel, candidate.blocking
    meets_all = blocking.loop_order.is_ir_outer or problem.m.high <= tile.mr
    columns, depth = min(blocking.nc, problem.n), min(blocking.kc, problem.k)
    block_bytes = problem.types.w.row_bytes(columns * depth)
    return Can.READ_WEIGHTS_ONCE in family.can and meets_all and block_bytes > _L1_BYTES_OF_WEIGHTS


def _elements(problem: Problem) -> list[str]:
    """Return the templates of the element types that are not float."""
    types = problem.types
    used = {types.x, types.accumulator, types.y}
    used |= {problem.operand_type(operand) for operand in problem.epilogue.operands}
    integers = any(dtype.is_integer for dtype in used)
    halves = [dtype.value for dtype in (DType.BF16, DType.F16) if dtype in used]
    return halves + ["integers"] * integers


def _rendered_operands(problem: Problem) -> list[_RenderedOperand]:
    return [
        _RenderedOperand(
            name=operand.name,
            shape=operand.shape,
            cpp=problem.operand_type(operand).cpp,
            is_offset=operand.kind.is_offset,
        )
        for operand in problem.epilogue.operands
    ]


def _rendered_steps(
    problem: Problem, rendered_operands: Sequence[_RenderedOperand]
) -> list[_RenderedStep]:
    """Return the steps in floating point."""
    operands = iter(rendered_operands)
    steps = []
    for step in problem.epilogue.steps:
        operand = next(operands) if step.kind.operand is not OperandShape.NONE else None
        if not (step.kind.is_offset or step.kind.hides):
            steps.append(
                _RenderedStep(
                    cpp=step.kind.cpp, operand=operand, parameters=_rendered_parameters(step)
                )
            )
    return steps


def _rendered_parameters(step: Step) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, f"{value:.9g}" + ("f" if "." in f"{value:.9g}" or "e" in f"{value:.9g}" else ".0f"))
        for (name, _default), value in zip(step.kind.parameters, step.parameters, strict=True)
    )


def _describe(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> str:
    facts: dict[str, object] = {
        "abi_version": problem.operation.abi_version,
        "candidate": candidate.text,
        "packed_format": packed_format(problem, candidate, family),
        "problem": problem.text,
        "required_isa": sorted(feature.value for feature in family.isa),
    }
    if problem.has_zero_points:
        facts["float_zero_points"] = True
    if candidate.below:
        facts["kernels"] = [
            {"m": rows.text, "candidate": kernel.text}
            for rows, kernel in candidate.kernels(problem.m)
        ]
    return canonical_json(facts)
