"""Renders candidates broken: they crash, hang, write out of bounds, are wrong or do not compile."""

from collections.abc import Sequence

from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source

CALL = "        const Call call = read_args(*args, item);\n"
RETURN = "    return GEMM_TUNER_OK;\n}\n\n} // extern"
LAST = "    const Call call = read_args(*args, 0);\n"

# What is put in front of, or behind, the work of `gemm_tuner_run`.
PLANTED = {
    Outcome.CRASHED: (CALL, CALL + "    __builtin_trap();\n"),
    Outcome.HUNG: (CALL, CALL + '    for (;;)\n        asm volatile("");\n'),
    Outcome.OUT_OF_BOUNDS: (
        RETURN,
        LAST + "    call.y[(call.m - 1) * call.ldy + n] = 0.0f;\n" + RETURN,
    ),
    Outcome.WRONG: (RETURN, LAST + "    call.y[0] += 0.001f;\n" + RETURN),
    Outcome.COMPILE_FAILED: (RETURN, "    return missing_name;\n}\n\n} // extern"),
}


class Saboteur:
    """Renders the first candidates of a sweep broken, each in its own way, and the rest whole."""

    def __init__(self, victims: Sequence[Candidate]) -> None:
        self.plan = dict(zip(victims, PLANTED, strict=False))

    def __call__(self, problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> Source:
        source = render(problem, candidate, family)
        if candidate not in self.plan:
            return source
        whole, broken = PLANTED[self.plan[candidate]]
        assert whole in source.text
        return Source(text=source.text.replace(whole, broken))
