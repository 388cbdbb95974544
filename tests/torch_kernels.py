"""A source of kernels for models of PyTorch, built when they are asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.source import Source
from gemm_tuner.layers.wanted import CallTime, FoundLayer, WantedLayer
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.ranking import shortlist


def kernel_of(
    problem: Problem, threads: int, alter: Callable[[str], str] = lambda text: text
) -> Kernel:
    """Return a kernel of the first candidate; `alter` changes its source, so that it is wrong."""
    cpu = detect_cpu()
    [candidate] = shortlist(Space(problem=problem, cpu=cpu, threads=threads), 1)
    family = family_named(candidate.micro_kernel.family)
    source = Source(text=alter(render(problem, candidate, family).text))
    build = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
    return load_kernel(build.binary, artifact=build.artifact, cpu=cpu, threads=threads)


# What is put behind the work of `gemm_tuner_run`: the last column is that before it.
RETURN = "    return GEMM_TUNER_OK;\n}\n\n} // extern"
TAIL = """    const Call call = read_args(*args, 0);
    for (int64_t row = 0; row < call.m; row++)
        call.y[row * call.ldy + n - 1] = call.y[row * call.ldy + n - 2];
"""


def with_wrong_tail(text: str) -> str:
    """Return the source of a kernel that is wrong in the last column of its first product."""
    assert RETURN in text
    return text.replace(RETURN, TAIL + RETURN)


_known = cache(kernel_of)  # any number of models may call one kernel


@dataclass
class Kernels:
    """Has a kernel for every layer but those that `lack` one, or fails.

    `time` says what is known of the time of a call of a layer, in ns.
    """

    text: str | None = None
    rows: tuple[int | str, ...] | None = None
    error: Exception | None = None
    lack: Callable[[WantedLayer], bool] = lambda _wanted: False
    time: Callable[[WantedLayer], float | None] | None = None
    asked: list[WantedLayer] = field(default_factory=list)

    def find(self, wanted: WantedLayer) -> FoundLayer:
        """Return a kernel for each of the rows."""
        self.asked.append(wanted)
        if self.error:
            raise self.error
        problems = [
            Problem.create(
                rows,
                getattr(wanted, "columns", wanted.n),
                wanted.k,
                dtype=wanted.dtype,
                w_layout=wanted.w_layout,
                epilogue=wanted.epilogue,
                reduction=wanted.reduction,
                operation=getattr(wanted, "operation", "linear"),
            )
            for rows in self.rows or wanted.rows
        ]
        if self.lack(wanted):
            problems = []
        found = FoundLayer(
            kernels=tuple(_known(one, wanted.threads) for one in problems), reasons=()
        )
        if self.time is None:
            return found
        time = self.time(wanted)
        call = None if time is None else CallTime(least_ns=time, greatest_ns=time)
        return replace(found, regime=Regime.HOT, times=(call,) * len(wanted.rows))

    def choices(self, wanted: WantedLayer) -> list[FoundLayer]:
        """Return the one way there is."""
        return [self.find(wanted)]

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
        """Refuse."""
        raise NotImplementedError
