"""A call in many threads, predicted from its parts and from what they share."""

from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.topology import regular_topology
from gemm_tuner.errors import NotEnoughCpus
from gemm_tuner.scaling.ranking import ranked_for_threads, ranked_on_server
from gemm_tuner.scaling.server import Server, server_like
from gemm_tuner.scaling.shares import Share, shares_of
from gemm_tuner.scaling.simulate import Bound, predicted_part_ns, simulated, traffic_of
from gemm_tuner.scaling.traffic import Traffic
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.cores import CORES, Core, core_named
from gemm_tuner.space.ranking import ranked

ZEN5 = core_named("zen5")
# 64 MiB of weights in 64 panels; the k of the other is cut in 4 slices.
SKINNY = Problem.parse("f32 16x4096x4096")
PANELS = Candidate.parse("avx512_f32_8x64 mc16_nc4096_kc2048 jc_ic_jr_ir")
SLICED = Candidate.parse("avx512_f32_8x64 mc16_nc4096_kc1024 jc_ic_jr_ir grid1x16x4")
W_BYTES = 4096 * 4096 * 4


def call(
    threads: int,
    regime: Regime = Regime.HOT,
    *,
    sockets: int = 1,
    candidate: Candidate = PANELS,
    problem: Problem = SKINNY,
) -> Traffic:
    server = server_like(ZEN5, sockets=sockets)
    rows = problem.m.high
    return traffic_of(problem, candidate, server, threads=threads, m=rows, regime=regime)


def test_equal_parts_that_share_nothing_scarce_take_as_long_as_one_and_a_barrier() -> None:
    # 16 groups, 4 threads in each: a line to 3 others and to 15 other groups, and back.
    barrier_ns = 400 + 2 * (3 * 18 + 15 * 80)

    one = simulated(call(64), [[40_000.0] * 64])

    assert one.time_ns == pytest.approx(40_000 + barrier_ns)
    assert (one.uneven_ns, one.waiting_ns, one.barrier_ns) == (0, 0, barrier_ns)
    assert one.bound is Bound.COMPUTE
    assert one.memory_bytes == 0


def test_the_slowest_part_is_waited_for() -> None:
    one = simulated(call(64), [[10_000.0] * 63 + [20_000.0]])

    assert one.work_ns + one.uneven_ns == pytest.approx(20_000)
    assert one.bound is Bound.UNEVEN


def test_weights_from_memory_pass_the_memory_of_the_socket_once() -> None:
    one = simulated(call(64, Regime.COLD_WEIGHTS), [[10_000.0] * 64])

    assert one.memory_bytes == W_BYTES
    assert one.work_ns + one.waiting_ns == pytest.approx(W_BYTES / ZEN5.shared.socket_gb_s)
    assert one.bound is Bound.MEMORY


def test_cold_weights_take_as_long_to_read_where_l3_has_room_for_them() -> None:
    # Of one thread they do not fit L3, of four they do: they come from memory all the same.
    one, four = (
        simulated(traffic, predicted_part_ns(traffic))
        for traffic in (call(1, Regime.COLD_WEIGHTS), call(4, Regime.COLD_WEIGHTS))
    )

    assert one.time_ns <= 4 * four.time_ns * 1.01


def test_one_l3_group_has_its_own_way_to_memory() -> None:
    server = Server(core=ZEN5, cpu=ZEN5.cpu, topology=regular_topology(cores=8))
    traffic = traffic_of(SKINNY, PANELS, server, threads=8, m=16, regime=Regime.COLD_WEIGHTS)

    one = simulated(traffic, [[10_000.0] * 8])

    assert one.work_ns + one.waiting_ns == pytest.approx(W_BYTES / ZEN5.shared.group_gb_s)


def test_what_l3_cannot_hold_comes_from_memory_and_parts_push_out_each_other() -> None:
    few, many = call(2), call(64)

    assert not few.fits_l3  # 32 MiB of weights for each of two groups, and x and y
    assert few.turns == ((0,), (1,))
    assert many.fits_l3
    assert many.turns == tuple((part,) for part in range(64))
    assert call(8, Regime.COLD_WEIGHTS).turns == (tuple(range(8)),)


def test_rows_of_x_from_another_socket_pass_the_link() -> None:
    one = simulated(call(256, sockets=2), [[1_000.0] * 256])
    alone = simulated(call(128), [[1_000.0] * 128])

    assert one.link_bytes == 16 * 4096 * 4 / 2
    assert alone.link_bytes == 0


def test_a_column_of_weights_lies_in_one_socket() -> None:
    # Both sockets read all of w, because the grid has two rows of parts.
    square = Problem.parse("f32 4096x256x4096")
    tall = Candidate.parse("avx512_f32_8x64 mc128_nc256_kc1024 ic_jc_jr_ir grid64x4")
    traffic = call(256, Regime.COLD_WEIGHTS, sockets=2, problem=square, candidate=tall)

    assert traffic.shares.grid == (64, 4)
    assert traffic.link_bytes == 256 * 4096 * 4 + 2048 * 4096 * 4 / 2


def test_slices_of_k_read_each_weight_once_and_have_two_barriers() -> None:
    traffic = call(64, Regime.COLD_WEIGHTS, candidate=SLICED)

    one = simulated(traffic, predicted_part_ns(traffic))

    assert traffic.shares.slices == 4
    assert one.memory_bytes == W_BYTES
    assert one.barrier_ns == 2 * traffic.server.barrier_ns(traffic.plan)


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_predicted_calls_of_each_core_gain_by_threads(core: Core) -> None:
    problem = Problem.parse("f32 1024x1024x1024")
    candidate = Space(problem=problem, cpu=core.cpu).defaults()[0]
    server = server_like(core)

    times = []
    for threads in (1, 2, 4, 8):
        traffic = traffic_of(problem, candidate, server, threads=threads, m=1024, regime=Regime.HOT)
        times.append(simulated(traffic, predicted_part_ns(traffic)).time_ns)

    for fewer, more in pairwise(times):
        assert 1.6 < fewer / more < 2.6


def test_kernels_are_ranked_for_threads_that_are_not_here() -> None:
    problem = Problem.parse("f32 128x768x768")
    server = server_like(ZEN5)
    candidates = Space(problem=problem, cpu=ZEN5.cpu).defaults()[::5]

    ranked = ranked_for_threads(candidates, problem, server, threads=64, m=128, regime=Regime.HOT)

    times = [one.time_ns for _candidate, one in ranked]
    assert times == sorted(times)
    assert {candidate for candidate, _one in ranked} == set(candidates)
    # A tile that one core likes best may leave too few for 64.
    first = ranked[0][0]
    tiles = -(-128 // first.micro_kernel.mr) * -(-768 // first.micro_kernel.nr)
    assert tiles >= 64


def test_the_order_for_one_thread_is_that_of_the_model() -> None:
    problem = Problem.parse("f32 16x4096x4096")
    candidates = Space(problem=problem, cpu=ZEN5.cpu).defaults()

    assert ranked_on_server(candidates, problem, ZEN5.cpu, 1) == ranked(
        candidates, problem, ZEN5.cpu
    )


def test_a_kernel_with_too_few_tiles_for_the_threads_comes_later() -> None:
    problem = Problem.parse("f32 128x768x768")
    few = Candidate.parse("avx512_f32_8x128 mc128_nc768_kc768 jc_ic_jr_ir")  # 96 tiles
    many = Candidate.parse("avx512_f32_8x48 mc128_nc768_kc768 jc_ic_jr_ir")  # 256

    order = ranked_on_server([few, many], problem, ZEN5.cpu, 128)

    assert order == [many, few]


def test_a_server_has_no_more_threads_than_cores() -> None:
    with pytest.raises(NotEnoughCpus, match="129 threads"):
        call(129)


def work_of(share: Share, candidate: Candidate, lanes: int) -> int:
    """Return multiplications for each step of k, and four for each element of x or w moved."""
    blocking, work = candidate.blocking, 0
    for piece in share.pieces:
        width = ceil(piece.columns / lanes) * lanes
        x_moves = (2 if blocking.pack_x else 1) * piece.rows * ceil(width / blocking.nc)
        work += piece.rows * width + 4 * (x_moves + width * ceil(piece.rows / blocking.mc))
    return work


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        # A part of each panel would copy all rows of x.
        ("1024x1024x1024", "4x96 mc128_nc1056_kc1024 ic_jc_jr_ir pack_x"),
        ("512x4096x1024", "5x80 mc125_nc4160_kc1024 ic_jc_jr_ir pack_x"),
        ("2048x2048x2048", "6x64 mc60_nc2048_kc2048 ic_jc_jr_ir pack_x"),
        # Nor are 114x22 tiles even in a grid.
        ("1024x1024x1024", "9x48 mc126_nc1056_kc1024 ic_jc_jr_ir pack_x"),
        # The last vector has one column, and takes as long as a whole one.
        ("1023x1025x1023", "5x80 mc125_nc1040_kc1023 ic_jc_jr_ir"),
    ],
)
def test_no_part_has_much_more_than_its_share_of_the_work(sizes: str, text: str) -> None:
    problem = Problem.parse(f"f32 {sizes}")
    candidate = Candidate.parse(f"avx512_f32_{text}")
    m = problem.m.high

    def largest(parts: int) -> int:
        shares = shares_of(problem, candidate, m=m, parts=parts)
        return max(work_of(share, candidate, lanes=16) for share in shares.parts)

    whole = largest(1)
    speed_ups = {parts: whole / largest(parts) for parts in (8, 16, 64)}
    # In time it is more: part of what is read comes while the core multiplies.
    assert speed_ups[8] >= 0.94 * 8
    assert speed_ups[16] >= 0.94 * 16
    assert speed_ups[64] >= 0.82 * 64


def test_bands_of_rows_share_out_each_element_once() -> None:
    problem = Problem.parse("f32 260x345x16")
    candidate = Candidate.parse("avx2_f32_4x16 mc20_nc352_kc16 ic_jc_jr_ir pack_x")

    shares = shares_of(problem, candidate, m=260, parts=16)

    assert shares.text == "tile after tile in 16 bands"
    assert max(len(share.pieces) for share in shares.parts) > 3
    assert sum(share.products for share in shares.parts) == 260 * 345 * 16


def test_more_parts_than_tiles_are_idle() -> None:
    problem = replace(SKINNY, n=64)

    shares = shares_of(problem, PANELS, m=16, parts=8)

    assert [bool(part.pieces) for part in shares.parts].count(True) == 2
    assert shares.largest_over_mean == 4
