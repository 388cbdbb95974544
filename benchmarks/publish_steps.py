"""What publish.py runs: the steps, the commands of each, and how long they take."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench_rows import INDUCTOR, SEVERAL_M

ROOT = Path(__file__).parents[1]
SHAPES = Path("benchmarks")
ALL = "layers.csv"
LARGE = "layers_large.csv"
LARGEST = "layers_largest.csv"
FEW = "layers_few.csv"
WEIGHT_ONLY = "layers_weight_only.csv"
SHARED = "layers_shared.csv"
PROOFS = tuple(
    f"tests/kernels/test_{name}.py" for name in ("emulator", "amx", "fp16", "machine_code")
)

# The longest time to sweep a layer, both regimes together, and the part of it for several threads,
# whose sweep starts from the winner of one, and for steps of few layers.
BUDGET_S = 8.0
SHORT = 0.5
# Weights of few bits take seconds to make, and copies of them that are read from memory, too.
SHARES = {ALL: 1.0, SHARED: 1.0, WEIGHT_ONLY: 3.0}
# The same for layers above 1.5 GFLOP, where proofs and samples are slow, and for few rows beside
# 2^24 weights and more, whose making takes as long as the search; they are swept again.
LARGEST_BUDGET_S = 20.0
# What a sweep takes for a layer besides its budget, and a bench for a layer and regime, in seconds:
# with all libraries, or with few. On an AMD EPYC (Zen 4, 2 cores), November 2026.
BESIDES_BUDGET_S = 3.1
ALL_LIBRARIES_S = 9.0
FEW_LIBRARIES_S = 2.2
INDUCTOR_S = 40.0
PROOFS_S = 240.0
LAST_S = 10.0

GEMM_TUNER = "gemm_tuner"
PYTEST = "pytest"
_PARALLEL = ("-n", "auto", "--maxprocesses", "8")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A run of `gemm-tuner bench`; without baselines it is beside all that are installed."""

    name: str
    regime: str
    baselines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A sweep of some layers, and the runs of bench that time its winners.

    If it `shares_weights`, the layers are given for several m, and kernels that read one packed
    copy are searched too.
    """

    name: str
    shapes: str
    dtype: str
    benches: tuple[Bench, ...]
    threads: int = 1
    groups: str = ""
    shares_weights: bool = False

    @property
    def regime(self) -> str:
        """Return the regimes that the runs of bench need."""
        regimes = {bench.regime for bench in self.benches}
        return regimes.pop() if len(regimes) == 1 else "both"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A call of the module `program`, its output in the file `output`, and what it may take."""

    output: str
    program: str = GEMM_TUNER
    arguments: tuple[str, ...]
    expected_s: float

    @property
    def text(self) -> str:
        """Return the command as one would type it."""
        return f"{self.program.replace('_', '-')} {' '.join(self.arguments)} > {self.output}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of a measurement, the budget for each layer, and the places of files.

    `steps` are those to run, by their places among all. `results` keeps what was measured;
    `shapes`, from the root of the checkout, is a file of layers, or a folder that has those which
    the steps name; `records` is the file that they go to in the end.
    """

    results: Path
    steps: Mapping[int, Step]
    records: Path
    budget_s: float = BUDGET_S
    shapes: Path = SHAPES
    has_proofs: bool = False

    def pieces(self) -> dict[str, list[Command]]:
        """Return the commands of each piece of work, in order, by its name."""
        steps = {step.name: list(self._commands_of(place)) for place, step in self.steps.items()}
        return {"proofs": list(self._proofs()), **steps, "records": list(self._last())}

    def left_of(self, commands: list[Command]) -> list[Command]:
        """Return the commands that have not ended yet; with a sweep, what times its winners too."""
        left = [one for one in commands if not (self.results / one.output).exists()]
        if any(one.arguments[0] == "sweep" for one in left):
            return [one for one in commands if one in left or one.arguments[0] != "sweep"]
        return left

    def _proofs(self) -> Iterator[Command]:
        """Yield the facts of this CPU, and the proofs of kernels that need it or its emulation."""
        if self.has_proofs:
            yield Command(output="cpu.txt", arguments=("cpu",), expected_s=1.0)
            yield Command(
                output="proofs.txt",
                program=PYTEST,
                arguments=("-q", "-rs", *_PARALLEL, "-p", "no:cacheprovider", *PROOFS),
                expected_s=PROOFS_S,
            )

    def _commands_of(self, place: int) -> Iterator[Command]:
        """Yield the sweep of a step, then its runs of bench.

        One file of layers for all steps is not asked for layers of several m.
        """
        step = self.steps[place]
        shapes = self.shapes / step.shapes if (ROOT / self.shapes).is_dir() else self.shapes
        if step.shares_weights and shapes == self.shapes:
            return
        words = ["--dtype", step.dtype]
        words += ["--groups", step.groups] if step.groups else []
        words += ["--threads", str(step.threads)] if step.threads > 1 else []
        share = SHARES.get(step.shapes, SHORT)
        sharing = ("--share-weights", "--json") if step.shares_weights else ()

        def sweep(shapes: Path, budget_s: float, output: str) -> Command:
            words_of_layers = ("--shapes", str(shapes), *words)
            budget = ("--regime", step.regime, "--budget", f"{budget_s:g}s")
            return Command(
                output=f"{place}-{step.name}-{output}.{'json' if sharing else 'txt'}",
                arguments=("sweep", *words_of_layers, *budget, *sharing),
                expected_s=_count_layers(shapes) * (budget_s + BESIDES_BUDGET_S),
            )

        yield sweep(shapes, share * self.budget_s, "sweep")
        if step.shapes in {ALL, LARGE} and shapes != self.shapes:
            yield sweep(self.shapes / LARGEST, share * LARGEST_BUDGET_S, "sweep-largest")
        for bench in step.benches:
            baselines = [word for one in bench.baselines for word in ("--baseline", one)]
            regimes = 2 if bench.regime == "both" else 1
            layer_s = FEW_LIBRARIES_S if bench.baselines else ALL_LIBRARIES_S
            layer_s += INDUCTOR_S * (INDUCTOR in bench.baselines)
            yield Command(
                output=f"{place}-{step.name}-{bench.name}.json",
                arguments=(
                    *("bench", "--shapes", str(shapes), *words),
                    *("--regime", bench.regime, *baselines, "--json"),
                ),
                expected_s=_count_layers(shapes) * regimes * layer_s,
            )

    def _last(self) -> Iterator[Command]:
        """Yield the steps that need all records."""
        yield Command(output="model.txt", arguments=("model", "report"), expected_s=LAST_S)
        inside = self.records.is_relative_to(ROOT)
        records = self.records.relative_to(ROOT) if inside else self.records
        export = ("records", "export", "--finals", str(records))
        yield Command(output="records.txt", arguments=export, expected_s=LAST_S)


def steps_for(threads: int) -> tuple[Step, ...]:
    """Return all steps, on one thread and on `threads`, the most wanted first.

    Several threads come after one: their winners are compared with those of one.
    """
    alone = (
        Bench(name="hot", regime="hot"),
        Bench(name="cold", regime="cold_weights", baselines=("onednn",)),
    )
    w4 = Bench(name="both", regime="both", baselines=("onednn", "torch-weights"))
    w8 = Bench(name="both", regime="both", baselines=("onednn",))
    inductor = Bench(name="hot", regime="hot", baselines=("onednn", INDUCTOR))
    of_several = (
        _step_of_several(threads, dtype="f32", libraries=("onednn", "mkl")),
        _step_of_several(threads, dtype="int8", libraries=("onednn",)),
        _step_of_several(threads, dtype="bf16", libraries=("onednn",)),
    )
    # fmt: off
    return (
        Step(name="f32-1",  shapes=ALL, dtype="f32",  benches=alone),
        Step(name="int8-1", shapes=ALL, dtype="int8", benches=alone),
        Step(name="bf16-1", shapes=ALL, dtype="bf16", benches=alone),
        *(of_several if threads > 1 else ()),
        Step(name="f16", shapes=FEW, dtype="f16", benches=alone[:1]),
        Step(name="w4", shapes=WEIGHT_ONLY, dtype="bf16_s4", groups="128", benches=(w4,)),
        Step(name="w8", shapes=WEIGHT_ONLY, dtype="f32_s8",  groups="128", benches=(w8,)),
        Step(name="inductor", shapes=FEW, dtype="f32", benches=(inductor,)),
        *(_step_of_several_m(dtype) for dtype in ("f32", "bf16", "int8")),
        _step_of_several_m("f32_s8", groups="128"),
    )
    # fmt: on


def _count_layers(shapes: Path) -> int:
    with (ROOT / shapes).open(newline="") as file:
        return sum(1 for _layer in csv.DictReader(file))


def _step_of_several_m(dtype: str, *, groups: str = "") -> Step:
    return Step(
        name=f"{dtype}-{SEVERAL_M}",
        shapes=SHARED,
        dtype=dtype,
        groups=groups,
        benches=(Bench(name="hot", regime="hot", baselines=("onednn",)),),
        shares_weights=True,
    )


def _step_of_several(threads: int, *, dtype: str, libraries: tuple[str, ...]) -> Step:
    return Step(
        name=f"{dtype}-{threads}",
        shapes=LARGE,
        dtype=dtype,
        threads=threads,
        benches=(
            Bench(name="hot", regime="hot", baselines=(*libraries, "one-thread")),
            Bench(name="cold", regime="cold_weights", baselines=("onednn", "one-thread")),
        ),
    )
