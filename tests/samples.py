"""Sample nouns for the tests of the store, the selection, the trust and the service."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from gemm_tuner.cli.reports.page.answers import Answer, Search, Standing
from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Caches, Cpu, IsaFeature
from gemm_tuner.domain.measurement import Interference, Measurement, Raced, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Conditions, Outcome, Stage, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.store.repository import Repository

PROBLEM = Problem.parse("f32 128x3072x768 nk bias+gelu_erf")
CONTEXT = ExecutionContext()
CPU = Cpu(
    vendor="AuthenticAMD",
    brand="AMD EPYC 9B45",
    family=26,
    model=2,
    stepping=1,
    isa=frozenset({IsaFeature.FMA, IsaFeature.AVX2, IsaFeature.AVX512F}),
    caches=Caches(l1d_bytes=48 << 10, l2_bytes=1 << 20, l3_bytes=32 << 20),
    physical_cores=2,
)
SIBLING_CPU = replace(CPU, stepping=2)
SOURCE_TEXT = "// a kernel\n"
BASELINE_NS = 1000
CONDITIONS = Conditions(
    peak_flop_per_s=2.5e11,
    noise=0.01,
    huge_pages="madvise",
    kernel_release="6.1.0",
    microcode="0xb002116",
)
# As fast as `PROBLEM` would have to be computed in the times of these samples.
FAST_CONDITIONS = replace(CONDITIONS, peak_flop_per_s=1e15)


def make_artifact(binary: bytes = b"\x7fELF sample", **changes: object) -> Artifact:
    """Return the artifact of `binary`."""
    artifact = Artifact(
        sha256=sha256(binary).hexdigest(),
        size_bytes=len(binary),
        abi_version=PROBLEM.operation.abi_version,
        required_isa=frozenset({IsaFeature.AVX512F}),
        toolchain="gcc 12.2.0 -O3",
        source_sha256=sha256(SOURCE_TEXT.encode()).hexdigest(),
    )
    return replace(artifact, **changes)  # type: ignore[arg-type]  # fields by name


def make_trial(*, call_ns: int = 800, nr: int = 48, minute: int = 0, **changes: object) -> Trial:
    """Return a confirming trial: calls take `call_ns`, those of the baseline 1000 ns."""
    baseline = Timing(calls_per_sample=10, samples_ns=(BASELINE_NS * 10,) * 12)
    trial = Trial(
        created_at=datetime(2026, 11, 20, 12, 0, tzinfo=UTC) + timedelta(minutes=minute),
        problem=PROBLEM,
        cpu=CPU,
        context=CONTEXT,
        candidate=Candidate.parse(f"avx512_f32_8x{nr} mc128_nc768_kc256 jc_ic_jr_ir pf4096"),
        toolchain="gcc 12.2.0 -O3",
        generator="0.1.0-aaaa",
        stage=Stage.CONFIRM,
        outcome=Outcome.CORRECT,
        artifact=make_artifact(),
        measurement=Measurement(
            candidate=Timing(calls_per_sample=10, samples_ns=(call_ns * 10,) * 12),
            baseline="onednn 3.2.0",
            baseline_timing=baseline,
        ),
        conditions=CONDITIONS,
    )
    return replace(trial, **changes)  # type: ignore[arg-type]  # fields by name


def make_trial_of(m: int, call_ns: int) -> Trial:
    """Return a confirming trial of the sample problem with other rows."""
    problem = replace(PROBLEM, m=Rows(low=m, high=m))
    return make_trial(problem=problem, conditions=FAST_CONDITIONS, call_ns=call_ns)


def make_trial_beside_mkl(*, call_ns: int = 1050) -> Trial:
    """Return a confirming trial beside MKL, which won a race with oneDNN: 1000 and 1365 ns."""
    trial = make_trial(call_ns=call_ns)
    assert trial.measurement is not None
    raced = (
        Raced(package="mkl 2026.0.0", baseline="mkl 2026.0", call_ns=1000.0),
        Raced(package="onednn-cpu-gomp 2023.2.0", baseline="onednn 3.2.0", call_ns=1365.0),
    )
    beside_mkl = replace(trial.measurement, baseline="mkl 2026.0", raced=raced)
    return replace(trial, measurement=beside_mkl)


def make_disturbed_trial(*, call_ns: int = 2, nr: int = 48, minute: int = 0) -> Trial:
    """Return a confirming trial whose threads waited for cores that others kept busy."""
    trial = make_trial(call_ns=call_ns, nr=nr, minute=minute)
    assert trial.measurement is not None
    interference = Interference(disturbed_rounds=0.9, stolen=0.0, others=1.5)
    return replace(trial, measurement=replace(trial.measurement, interference=interference))


def make_failed_trial(*, minute: int = 0) -> Trial:
    """Return a trial of a kernel that crashed."""
    return make_trial(minute=minute, outcome=Outcome.CRASHED, measurement=None, detail="SIGILL")


def make_emulated_trial() -> Trial:
    """Return a trial whose kernel was proved by emulation, and so was not timed."""
    return make_trial(
        measurement=None, conditions=None, emulated=frozenset({IsaFeature.AVX512_FP16})
    )


def add_build(repository: Repository, binary: bytes = b"\x7fELF sample") -> Artifact:
    """Keep `binary` in the store, and return its artifact."""
    artifact = make_artifact(binary)
    repository.add_build(artifact, binary=binary, source_text=SOURCE_TEXT)
    return artifact


def make_answer(
    problem: str = PROBLEM.text, *, cpu: Cpu = CPU, minute: int = 0, **changes: object
) -> Answer:
    """Return an answer of a page, from one confirming trial; `changes` are those of the trial."""
    changes = {"conditions": FAST_CONDITIONS, **changes}
    trial = make_trial(problem=Problem.parse(problem), cpu=cpu, minute=minute, **changes)  # type: ignore[arg-type]  # fields by name
    verdict = derive_verdict(
        [trial],
        problem=trial.problem,
        cpu_key=cpu.exact_key,
        context=trial.context,
        complete=True,
    )
    assert verdict.measurement is not None
    return Answer(
        cpu=cpu,
        verdict=verdict,
        measured=verdict.measurement,
        toolchain=trial.toolchain,
        standing=Standing.BELIEVED,
        conditions=trial.conditions,
        search=Search(tried=2, failed=0, best_ns=(900.0, verdict.measurement.candidate_median_ns)),
        hosts=1,
    )


def make_answers(count: int) -> list[Answer]:
    """Return answers of different problems, in eight groups of types, threads and regimes."""
    contexts = [
        ExecutionContext(threads=threads, regime=regime) for threads in (1, 2) for regime in Regime
    ]
    return [
        make_answer(
            f"{('f32', 'bf16')[number % 2]} {1 + number // 8}x3072x768 nk bias+gelu_erf",
            call_ns=700 + number % 500,
            context=contexts[number // 2 % 4],
        )
        for number in range(count)
    ]
