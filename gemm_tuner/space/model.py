"""Predict the time of a candidate, to try the promising ones first.

The model counts what the inner loop issues and what moves between the caches, at the rates of the
core (`space/cores.py`). It ranks; it never decides: only measured candidates win.
"""

from dataclasses import replace
from math import ceil, gcd

from gemm_tuner.domain.attention import products_of_attention
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.in_place import reads_w_in_place
from gemm_tuner.domain.kept_panel import keeps_panel
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout, Rate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.cores import Rates, core_of
from gemm_tuner.space.parts import largest_part

# Of a product of tiles, and of loading one from L1, from L2 past L1, and from L2 where the other
# operand evicts it: measured on a Xeon with an L3 of 480 MiB. Of converting one: an estimate.
_TILE_PRODUCT_CYCLES = 18
_L1_TILE_CYCLES = 10
_PASSING_TILE_CYCLES = 21
_EVICTED_TILE_CYCLES = 24
# Of storing a tile of sums, of waiting until sums have gone through memory, and of giving tile
# registers their shape and releasing them in each call: measured on the same CPU.
_STORED_TILE_CYCLES = 18
_SUMS_CYCLES = 150
_SHAPE_CYCLES = 380
_CONVERTED_TILE_CYCLES = 40
_L1_BYTES_OF_X = 48 << 10  # of every CPU with AMX so far: space/cores.csv
# Of a vector of weights in groups, or of halves that become floats: to convert it, as instructions
# and in multiply-adds that have to wait, and to convert and store it as floats or as pairs of bf16,
# whose panels leave L1. The cycles were measured on an EPYC 9004.
_CONVERSION_INSTRUCTIONS = 2
_CONVERSION_PRODUCTS = 0.1
_WIDENING_PRODUCTS = 0.5
_CYCLES_TO_FLOATS = 2.4
_CYCLES_TO_PAIRS = 8.0
# Of a vector of sums of a group, to add them to those of all groups: measured on an EPYC 9004.
_GROUP_CYCLES = 1.5
_SHUFFLES = 2
_SHUFFLES_PER_ADDITION = 2  # of two vectors, so that each takes half of the lanes of their sum
_NOT_OVERLAPPED = 0.3

# Until a product of pairs of bf16 can be added to, in cycles: measured on an EPYC 9005, where tiles
# of fewer than twelve sums wait for it.
_PAIRS_LATENCY = 6.0

# Cycles around one register tile besides its steps of k: the call, pointers, branches.
_TILE_CYCLES = 14.0
_ROW_CYCLES = 2.0  # of a tile: addresses, and stores that begin another line
_CALL_CYCLES = 40.0
_WAKING_CYCLES = 4000.0  # until another thread computes
_CYCLES_PER_EPILOGUE_STEP = 1.0
# Of a vector of sums that waits outside L2 for the next block of k: measured on an EPYC 9004.
_UNFINISHED_CYCLES = 30.0
# Of a vector of sums of a slice of k, to write it and to add it to the others: measured on an EPYC
# 9004.
_SUMMED_CYCLES = 7.0
# Of a vector of w, to pack it in the call: measured on an EPYC of Zen 3.
_PACKED_CYCLES = 4.5
# Of a vector of scores, to make it weights, and of a row of them: measured on an EPYC of Zen 3.
_WEIGHT_CYCLES = 12.0
_ROW_OF_WEIGHTS_CYCLES = 40.0
# Rows at multiples of so many bytes share sets of L1, and those longer than half of it are not
# foreseen by its prefetcher.
_L1_SET_STRIDE_BYTES = 4096
# Lines of y that a tile writes past the caches at once; of each more, until it leaves: measured on
# an EPYC 9004.
_LINE_BYTES = 64
_LINES_AT_ONCE = 16
_WAITING_LINE_CYCLES = 50.0
_FEW_ROWS = 64  # of x: weights that are not in L2 are read while few multiplications are done
NOMINAL_CLOCK_HZ = 4e9


def predict_cycles(
    problem: Problem,
    candidate: Candidate,
    family: MicroKernelFamily,
    cpu: Cpu,
    *,
    memory_bytes: float = 0.0,
) -> float:
    """Return the predicted time of one call on one core, in cycles, for the largest m.

    At least `memory_bytes` come from memory, whatever the caches have room for.
    """
    if problem.operation.has_values:
        return _attention_cycles(problem, candidate, family, cpu, memory_bytes=memory_bytes)
    rows, rates, parts = problem.m.high, core_of(cpu).rates, candidate.parts
    compute = compute_cycles(problem, candidate, family, rates)
    panels = _panel_cycles(problem, candidate, family, cpu, rates)
    compute = max(compute, panels) + rates.panels * min(compute, panels)
    compute += _conversion_cycles(problem, candidate, family)
    compute += _unfinished_cycles(problem, candidate, family, cpu)
    compute += _packing_cycles(problem, candidate, family)
    compute += _conflict_cycles(problem, candidate, family, cpu, rates)
    compute += summed_cycles(problem, candidate, family)
    memory = _memory_cycles(problem, candidate, cpu, rates)
    memory = max(memory, memory_bytes / rates.memory_bytes)
    row_tiles, fetches = 1, candidate.blocking.prefetch_next_panel
    if 0 < rows <= _FEW_ROWS and problem.w_bytes > cpu.caches.l2_bytes and not fetches:
        # A panel of w arrives while the first tile of rows meets it; the others find it in L2.
        row_tiles = ceil(min(rows, candidate.blocking.mc) / candidate.micro_kernel.mr)
    alone = compute * (row_tiles - 1) / row_tiles
    beside = compute - alone
    busy = alone + _overlapped(beside, memory)
    waking = _WAKING_CYCLES * (parts - 1)
    begin = _CALL_CYCLES + (_SHAPE_CYCLES if family.k_tile else 0)
    return begin + waking + busy * _unevenness(problem, candidate) / parts


def _attention_cycles(
    problem: Problem,
    candidate: Candidate,
    family: MicroKernelFamily,
    cpu: Cpu,
    *,
    memory_bytes: float,
) -> float:
    """Return the cycles of both products, for all keys, and of what makes scores weights."""
    cycles = 0.0
    for name, one in products_of_attention(problem, candidate, family).items():
        whole = replace(
            one.problem,
            n=problem.n if name == "scores" else one.problem.n,
            k=problem.n if name == "values" else one.problem.k,
        )
        cycles += predict_cycles(
            whole, one.candidate, one.family, cpu, memory_bytes=memory_bytes / 2
        )
    blocks = ceil(problem.n / candidate.blocking.nc)
    vectors = ceil(problem.n / family.lanes) * _WEIGHT_CYCLES
    # What a block adds for each row, and its sums when a maximum moves.
    vectors += blocks * (_ROW_OF_WEIGHTS_CYCLES + ceil(problem.k / family.lanes))
    cycles += problem.m.high * vectors
    waking = _WAKING_CYCLES * (candidate.parts - 1)
    return waking + cycles * _unevenness(problem, candidate) / candidate.parts


def loads_per_multiplication(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily
) -> float:
    """Return how many registers a whole tile loads for each of its multiplications."""
    tile = candidate.micro_kernel
    rows, columns = min(tile.mr, max(1, problem.m.high)), min(tile.nr, max(1, problem.n))
    height, vectors = _registers(family, rows, columns)
    return (height + vectors) / (height * vectors)


def _registers(family: MicroKernelFamily, rows: int, columns: int) -> tuple[int, int]:
    """Return how many registers of x and of w the multiplications of a tile read."""
    is_dot = family.layout is PackedLayout.COLUMNS
    vectors = columns if is_dot else ceil(columns / family.lanes)
    return ceil(rows / family.register_rows), vectors


def _unevenness(problem: Problem, candidate: Candidate) -> float:
    """Return the work of the part that has the most, over the mean."""
    tile, blocking = candidate.micro_kernel, candidate.blocking
    uneven = 1.0
    for count, step, ways in (
        (problem.m.high, tile.mr, blocking.grid_m),
        (problem.n, tile.nr, blocking.grid_n),
    ):
        if count:
            uneven *= largest_part(count, step, ways) * ways / count
    return uneven


def compute_cycles(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily, rates: Rates
) -> float:
    """Return the cycles of the products and of the epilogue, with all operands at hand."""
    tile = candidate.micro_kernel
    whole_tiles, rest_rows = divmod(problem.m.high, tile.mr)
    whole_panels, rest_columns = divmod(problem.n, tile.nr)
    return sum(
        tiles * panels * _tile_cycles(problem, candidate, family, rates, (height, width))
        for tiles, height in ((whole_tiles, tile.mr), (1, rest_rows))
        for panels, width in ((whole_panels, tile.nr), (1, rest_columns))
        if tiles and panels and height and width
    )


def _tile_cycles(
    problem: Problem,
    candidate: Candidate,
    family: MicroKernelFamily,
    rates: Rates,
    tile: tuple[int, int],
) -> float:
    rows, columns = tile
    blocks = max(1, ceil(problem.k / candidate.blocking.kc))
    height, vectors = _registers(family, rows, columns)
    steps = ceil(problem.k / family.k_multiple)
    height *= family.digits(problem.types.x) or 1
    fmas = height * vectors
    loads = height + vectors
    instructions = fmas + loads + 3 / candidate.blocking.k_unroll
    is_grouped = family.layout is PackedLayout.GROUPS and not family.k_tile
    converts = is_grouped or family.converts_weights(problem.types)
    conversions = vectors if converts and not candidate.blocking.convert_once else 0
    instructions += conversions * _CONVERSION_INSTRUCTIONS
    waiting = conversions * (_CONVERSION_PRODUCTS if is_grouped else _WIDENING_PRODUCTS)
    narrow = rates.narrow if 32 * family.lanes < rates.vector_bits else 1.0
    step = max(
        (fmas + waiting) / (narrow * _products_a_cycle(family, rates)),
        loads / (narrow * rates.loads),
        instructions / rates.instructions,
        rates.latency,
        _PAIRS_LATENCY if family.product.rate is Rate.PAIRS else 0.0,
    )
    if family.k_tile:
        x_cycles, w_cycles = _arrival_of_tiles(problem, candidate, family)
        step = max(fmas * _TILE_PRODUCT_CYCLES, height * x_cycles + vectors * w_cycles)
    products = steps * step
    if family.k_tile:
        products += blocks * (fmas * _STORED_TILE_CYCLES + _SUMS_CYCLES)
    if is_grouped and not _scales_weights(candidate, family):
        products += ceil(problem.k / (problem.w_group or 1)) * fmas * _GROUP_CYCLES
    if family.layout is not PackedLayout.COLUMNS:
        stored = rows * vectors
    elif columns == 1:
        stored = 1
        products = _overlapped(products, _reduction_cycles(rows, family.lanes))
    else:
        stored = rows
        products = _overlapped(products, rows * _reduction_cycles(columns, family.lanes))
    epilogue = stored * (1 + _CYCLES_PER_EPILOGUE_STEP * len(problem.epilogue.steps))
    if candidate.blocking.stream_y:
        lines = rows * problem.types.y.row_bytes(columns) // _LINE_BYTES
        epilogue += max(0, lines - _LINES_AT_ONCE) * _WAITING_LINE_CYCLES
    if keeps_panel(problem, candidate, family):
        products, epilogue = _overlapped(products, epilogue), 0.0
    return products + epilogue + rows * _ROW_CYCLES + blocks * (_TILE_CYCLES + stored)


def _arrival_of_tiles(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily
) -> tuple[int, int]:
    """Return the cycles to load a tile of x and one of w."""
    blocking, tile = candidate.blocking, candidate.micro_kernel
    if family.layout is PackedLayout.GROUPS:
        return _L1_TILE_CYCLES, _CONVERTED_TILE_CYCLES
    if blocking.loop_order.is_ir_outer or problem.m.high <= tile.mr:
        x_bytes = tile.mr * problem.types.x.row_bytes(min(blocking.kc, problem.k))
        is_kept = x_bytes <= _L1_BYTES_OF_X
        return _L1_TILE_CYCLES if is_kept else _EVICTED_TILE_CYCLES, _PASSING_TILE_CYCLES
    return _EVICTED_TILE_CYCLES, _EVICTED_TILE_CYCLES


def _panel_cycles(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily, cpu: Cpu, rates: Rates
) -> float:
    """Return the cycles in which panels that L1 cannot keep come from L2, for each tile of rows.

    Those of AMX are part of its products.
    """
    tile, blocking = candidate.micro_kernel, candidate.blocking
    tiles = ceil(problem.m.high / tile.mr)
    panel_bytes = problem.types.w.row_bytes(tile.nr * min(blocking.kc, problem.k))
    if family.k_tile or tiles <= 1 or panel_bytes <= cpu.caches.l1d_bytes // 2:
        return 0.0
    return tiles * problem.w_bytes / rates.l2_bytes


def _scales_weights(candidate: Candidate, family: MicroKernelFamily) -> bool:
    """Return whether weights take their scales where they are converted, and no group its own."""
    return candidate.blocking.convert_once and family.k_step == 1


def _conversion_cycles(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> float:
    """Return the cycles to convert weights once for each block of rows, where that is done."""
    if not candidate.blocking.convert_once:
        return 0.0
    vectors = ceil(problem.n / family.lanes) * ceil(problem.k / family.k_step)
    cycles = _CYCLES_TO_FLOATS if _scales_weights(candidate, family) else _CYCLES_TO_PAIRS
    return vectors * ceil(problem.m.high / candidate.blocking.mc) * cycles


def _packing_cycles(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> float:
    """Return the cycles to pack w where that is done in the call.

    Each part packs what it reads, again for each block of rows where these are the outer loop.
    """
    blocking = candidate.blocking
    if not blocking.pack_w:
        return 0.0
    is_dot = family.layout is PackedLayout.COLUMNS
    columns = problem.n if is_dot else ceil(problem.n / family.lanes)
    times = blocking.grid_m
    if not blocking.loop_order.is_jc_outer:
        times *= ceil(ceil(problem.m.high / blocking.grid_m) / blocking.mc)
    return times * columns * ceil(problem.k / family.k_step) * _PACKED_CYCLES


def _conflict_cycles(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily, cpu: Cpu, rates: Rates
) -> float:
    """Return the cycles to read w again for each tile of rows, where its own rows share L1 sets.

    Only of w read in place: a packed panel is dense.
    """
    is_panel = family.layout is PackedLayout.PANELS
    is_in_place = is_panel and reads_w_in_place(problem, candidate.blocking)
    row_bytes = problem.types.w.row_bytes(problem.n)
    if not is_in_place or row_bytes <= _L1_SET_STRIDE_BYTES // 2:
        return 0.0
    kept_rows = cpu.caches.l1d_bytes // gcd(row_bytes, _L1_SET_STRIDE_BYTES)
    if min(candidate.blocking.kc, problem.k) <= kept_rows:
        return 0.0
    tiles = ceil(problem.m.high / candidate.micro_kernel.mr)
    return (tiles - 1) * problem.w_bytes / rates.l2_bytes * rates.conflicts


def _unfinished_cycles(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily, cpu: Cpu
) -> float:
    """Return the cycles to read and write sums between blocks of k where L2 does not hold them."""
    vectors = problem.m.high * ceil(problem.n / family.lanes)
    if vectors * family.lanes * problem.types.accumulator.size_bytes <= cpu.caches.l2_bytes:
        return 0.0
    blocks = max(1, ceil(problem.k / candidate.blocking.kc))
    return vectors * (blocks - 1) * _UNFINISHED_CYCLES


def summed_cycles(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> float:
    """Return the cycles to bring the sums of slices of k together, if k is cut."""
    slices = candidate.blocking.grid_k
    vectors = problem.m.high * ceil(problem.n / family.lanes)
    return slices * vectors * _SUMMED_CYCLES if slices > 1 else 0.0


def _products_a_cycle(family: MicroKernelFamily, rates: Rates) -> float:
    """Return how many of the family's multiplications of vectors a core starts in a cycle."""
    own = {Rate.PAIRS: rates.pairs, Rate.QUADS: rates.quads}
    return own.get(family.product.rate) or rates.multiply_adds


def _reduction_cycles(vectors: int, lanes: int) -> float:
    """Return the cycles to add up the lanes of each of some vectors, two at a time."""
    levels = range(1, lanes.bit_length())
    additions = sum(ceil(vectors / (1 << level)) for level in levels)
    return additions * _SHUFFLES_PER_ADDITION / _SHUFFLES


def _overlapped(one: float, other: float) -> float:
    """Return how long two things take that the core does beside each other, but never fully."""
    return max(one, other) + _NOT_OVERLAPPED * min(one, other)


def _memory_cycles(problem: Problem, candidate: Candidate, cpu: Cpu, rates: Rates) -> float:
    rows = problem.m.high
    x_bytes = rows * problem.k * problem.types.x.size_bytes
    y_bytes = rows * problem.n * problem.types.y.size_bytes
    total = x_bytes + problem.w_bytes + y_bytes
    if total <= cpu.caches.l1d_bytes:
        return 0.0
    rate = (
        rates.l2_bytes
        if total <= cpu.caches.l2_bytes
        else rates.l3_bytes
        if total <= cpu.caches.l3_bytes
        else rates.memory_bytes
    )
    return moved_bytes(problem, candidate, cpu) / rate


def moved_bytes(problem: Problem, candidate: Candidate, cpu: Cpu) -> float:
    """Return what a call on one core reads and writes beyond what stays in its L2."""
    blocking, rows = candidate.blocking, problem.m.high
    x_bytes = rows * problem.k * problem.types.x.size_bytes
    y_bytes = rows * problem.n * problem.types.y.size_bytes
    x_passes = 1 if x_bytes <= cpu.caches.l2_bytes // 2 else ceil(problem.n / blocking.nc)
    w_passes = 1 if problem.w_bytes <= cpu.caches.l2_bytes // 2 else ceil(rows / blocking.mc)
    if blocking.loop_order.is_ir_outer and (
        problem.types.w.row_bytes(blocking.nc * blocking.kc) > cpu.caches.l2_bytes
    ):
        # A block of w that does not fit L2 is read again for each tile of rows.
        w_passes *= ceil(min(rows, blocking.mc) / candidate.micro_kernel.mr)
    y_passes = 2 * ceil(problem.k / blocking.kc) - 1 if problem.k else 1
    return x_bytes * x_passes + problem.w_bytes * w_passes + y_bytes * y_passes
