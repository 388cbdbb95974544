"""How oneDNN is asked is settled for a number of threads, not for all."""

import pytest

from gemm_tuner.bench.baselines.onednn import OneDnn
from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.workload import make_workload
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.problem import Problem
from gemm_tuner.libraries.onednn import find_onednn, open_onednn
from gemm_tuner.machine.detect import detect_cpu


@pytest.mark.baseline("onednn")
def test_what_was_settled_for_several_threads_does_not_bind_one() -> None:
    problem = Problem.parse("f32 6x7x9 nk row_scale+bias+relu")
    drivers = build_drivers(find_toolchain(), detect_cpu())
    library = open_onednn(find_onednn())
    workload = make_workload(problem, make_inputs(problem, InputKind.NORMAL, 5), threads=1)
    baseline = OneDnn(find_onednn(), (drivers.onednn, drivers.finish))
    with library.in_threads(2):
        chosen = baseline.prepare(workload).product.spelling
        settled = baseline._products(library, workload)

    with library.in_threads(1):
        open_to_one = baseline._products(library, workload)

    assert [one.spelling for one in settled] == [chosen]
    assert len(open_to_one) > 1
