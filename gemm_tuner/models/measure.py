"""Run a model in all ways, one process each, in alternation."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from platform import release
from time import monotonic, sleep

from gemm_tuner.bench.conditions import huge_pages
from gemm_tuner.bench.measure import turn_order
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.model_run import (
    LayerCalls,
    ModelCase,
    ModelConditions,
    ModelLimit,
    ModelRun,
    WayRun,
)
from gemm_tuner.errors import GemmTunerError, NotEnoughMemory, TrialFailed
from gemm_tuner.machine.available_memory import check_memory
from gemm_tuner.machine.processors import ProcessorUse, read_processor_times, use_since
from gemm_tuner.models.calm import taken_calmly
from gemm_tuner.models.limit import Roof
from gemm_tuner.models.messages import Looked, Order, Question, Ready, Sampled
from gemm_tuner.models.process import CHILD, WayInterrupted, WayProcess
from gemm_tuner.models.row import Way
from gemm_tuner.models.table import PRECISIONS
from gemm_tuner.tuning.generator import generator_version

_SAMPLE_S = 0.05
_LEAST_CALLS = 3
# Threads of the way before come to rest: OpenMP's spin for up to some ms.
_PAUSE_S = 0.01
# A way that keeps the weights, and packs them, while it still has what it packed.
_MOST_OVER_FIRST = 2.5
# What steps take of a model of 1e8 weights, on an AMD EPYC (Zen 3, 2 cores), November 2026.
TUNING_S, PREPARING_S, ROUND_S = 60.0, 30.0, 10.0
_NO_LIMIT = "no other way of PyTorch shows so little outside of layers that it would be one"

# Told of each step, and of the seconds that it may take.
OnStep = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How cases are measured.

    `budget_s` is for each layer, 0 tunes none. A step may take `deadline_s`.
    """

    ways: tuple[Way, ...]
    rounds: int
    budget_s: float
    deadline_s: float
    db: str
    cpu: Cpu
    command: Sequence[str] = CHILD

    @property
    def tuned(self) -> tuple[Way, ...]:
        """Return the ways whose layers are tuned first."""
        return tuple(one for one in self.ways if one.is_ours and self.budget_s)

    @property
    def case_s(self) -> float:
        """Return how long a case may take, in seconds, before anything is known of it."""
        parts = (len(self.tuned) * TUNING_S, len(self.ways) * PREPARING_S, self.rounds * ROUND_S)
        return sum(parts)


def package_of(way: Way) -> str | None:
    """Return the package of a way with its version, None where something of it is not installed."""
    try:
        for wheel in way.also_needs:
            version(wheel)
        return generator_version() if way.is_ours else f"{way.wheel} {version(way.wheel)}"
    except PackageNotFoundError:
        return None


def built_with(dtype: str) -> str:
    """Return the packages that make all models in a type of numbers, with their versions."""
    found = []
    for wheel in filter(None, ("torch", "transformers", PRECISIONS[dtype].needs)):
        with suppress(PackageNotFoundError):
            found.append(f"{wheel} {version(wheel)}")
    return ", ".join(found)


def measure_case(
    case: ModelCase,
    plan: Plan,
    on_step: OnStep = lambda _stage, _expected_s: None,
) -> ModelRun:
    """Return what all ways do with a model; one that fails is a row with its reason."""
    with ExitStack() as stack:
        return _Measuring(case, plan, on_step, stack).run()


class _Measuring:
    """The measurement of one case; its processes end with `stack`."""

    def __init__(
        self,
        case: ModelCase,
        plan: Plan,
        on_step: OnStep,
        stack: ExitStack,
    ) -> None:
        self._case, self._plan = case, plan
        self._on_step, self._stack = on_step, stack
        self._runs = {
            way.name: WayRun(
                way=way.name,
                package=package_of(way) or "",
                is_ours=way.is_ours,
                settings=dict(way.settings),
                reason=self._why_not(way),
            )
            for way in plan.ways
        }
        self._processes: dict[str, WayProcess] = {}
        self._layers: tuple[LayerCalls, ...] | None = None
        self._first_bytes = 0
        self._used_s = 0.0

    def run(self) -> ModelRun:
        for way in self._plan.tuned:
            self._on_step(f"tuning for {way.name}", TUNING_S)
            self._tune(way)
        ready = {}
        for way in self._plan.ways:
            self._on_step(f"preparing {way.name}", PREPARING_S)
            one = self._prepare(way)
            if one is not None:
                ready[way.name] = one
        roof, why_no_roof = self._look(ready)
        begin = read_processor_times()
        used_s = self._time(ready, roof)
        use = use_since(replace(begin, own_s=begin.own_s - used_s))
        limit = self._limit(roof)
        return ModelRun(
            case=self._case,
            rounds=self._plan.rounds,
            ways=tuple(self._runs.values()),
            conditions=_conditions(self._plan.cpu, self._case.dtype, use),
            limit=limit,
            why_no_limit="" if limit else why_no_roof or _NO_LIMIT,
        )

    def _why_not(self, way: Way) -> str:
        if package_of(way) is None:
            wheels = " or ".join((way.wheel, *way.also_needs))
            return f"{wheels} is not installed: {way.install}"
        return way.unable.get(self._case.dtype, "")

    def _order(self, way: Way, budget_s: float) -> Order:
        case = self._case
        return Order(
            way=way.name,
            db=self._plan.db,
            budget_s=budget_s,
            **{name: getattr(case, name) for name in ("model", "dtype", "threads", "batch")},
            is_small=case.is_small,
        )

    def _start(self, way: Way, budget_s: float = 0.0) -> WayProcess:
        return WayProcess(
            self._order(way, budget_s),
            deadline_s=self._plan.deadline_s,
            command=self._plan.command,
        )

    def _note(self, way: str, note: str) -> None:
        run = self._runs[way]
        self._runs[way] = replace(run, notes=(*run.notes, note))

    def _fail(self, way: str, failure: GemmTunerError) -> None:
        """Let a way be no result, and end its process."""
        self._runs[way] = replace(
            self._runs[way],
            reason=str(failure),
            may_pass=isinstance(failure, WayInterrupted | NotEnoughMemory),
            samples_ns=(),
            disturbed=(),
        )
        if way in self._processes:
            self._processes.pop(way).end()

    def _tune(self, way: Way) -> None:
        """Tune what is missing, in a process that ends: what is timed has loaded no compiler."""
        if not self._runs[way.name].is_result:
            return
        try:
            with self._start(way, self._plan.budget_s) as process:
                process.answer(Ready)
        except TrialFailed as failure:
            self._note(way.name, f"its layers were not all tuned: {failure}")

    def _prepare(self, way: Way) -> Ready | None:
        if not self._runs[way.name].is_result:
            return None
        begin_s = monotonic()
        try:
            check_memory(int(_MOST_OVER_FIRST * self._first_bytes), "its process")
            process = self._stack.enter_context(self._start(way))
            self._processes[way.name] = process
            ready = process.answer(Ready)
        except (TrialFailed, NotEnoughMemory) as failure:
            self._fail(way.name, failure)
            return None
        self._first_bytes = self._first_bytes or ready.resident_bytes
        self._runs[way.name] = replace(
            self._runs[way.name],
            error=ready.error,
            agreement=ready.agreement,
            ready_s=monotonic() - begin_s,
            taken=ready.taken,
            left=ready.left,
            why_left=ready.why_left,
        )
        if ready.wrong:
            self._fail(way.name, TrialFailed(ready.wrong))
            return None
        return ready

    def _look(self, ready: Mapping[str, Ready]) -> tuple[Roof | None, str]:
        """Learn where the time goes in each way; return the roof of the layers, or why not."""
        for way in ready:
            try:
                looked = self._processes[way].ask(Question(), Looked)
            except TrialFailed as failure:
                self._fail(way, failure)
                continue
            self._runs[way] = replace(self._runs[way], shares=looked.shares)
            self._layers = self._layers or looked.layers
        if self._layers is None:
            return None, "no way of PyTorch tells the layers of the model"
        try:
            precision = PRECISIONS[self._case.dtype]
            return Roof(self._plan.cpu, precision, self._layers), ""
        except GemmTunerError as error:
            return None, str(error)

    def _time(self, ready: Mapping[str, Ready], roof: Roof | None) -> float:
        """Time all ways in turn, and return the seconds of processors that they used."""
        fastest_s = min((ready[way].call_s for way in self._processes), default=1.0)
        question = Question(calls=max(_LEAST_CALLS, min(1000, ceil(_SAMPLE_S / fastest_s))))
        samples: dict[str, list[Sampled]] = {way: [] for way in self._processes}
        for number in range(self._plan.rounds if samples else 0):
            self._on_step(f"round {number + 1} of {self._plan.rounds}", ROUND_S)
            ways = list(samples)
            # The roof is last in each round.
            for turn in turn_order(number, len(ways) + 1)[:-1]:
                if ways[turn] in self._processes:
                    sleep(_PAUSE_S)
                    first_ns = ready[ways[turn]].call_s * 1e9
                    self._sample(ways[turn], question, samples[ways[turn]], first_ns)
            if roof is not None:
                sleep(_PAUSE_S)
                roof.sample()
        for way in self._processes:
            self._runs[way] = replace(
                self._runs[way],
                samples_ns=tuple(one.call_ns for one in samples[way]),
                disturbed=tuple(one.is_disturbed for one in samples[way]),
            )
        return self._used_s

    def _sample(
        self, way: str, question: Question, samples: list[Sampled], first_ns: float
    ) -> None:
        """Add the sample of a way in a round; earlier ones, or its first call, say how fast."""
        process = self._processes[way]
        fastest_ns = min((one.call_ns for one in samples), default=first_ns)
        try:
            samples.append(
                taken_calmly(
                    lambda: self._asked(process, question), lambda one: one.call_ns, fastest_ns
                )
            )
        except TrialFailed as failure:
            self._fail(way, failure)

    def _asked(self, process: WayProcess, question: Question) -> Sampled:
        sampled = process.ask(question, Sampled)
        self._used_s += sampled.used_s
        return sampled

    def _limit(self, roof: Roof | None) -> ModelLimit | None:
        """Return the limit: the least that another way takes outside of layers, and these.

        Ours do not count: what they take of convolutions is no layer at the roof. What is more than
        another way takes is no limit: the profiler does not see all layers, such as those of
        Inductor's template, and eager mode makes floats of the bytes of a quantised model.
        """
        others = [run for run in self._runs.values() if run.is_result and not run.is_ours]
        outside_s = {
            run.way: max(0.0, 1 - run.shares.taken - run.shares.left) * run.timing.median_ns / 1e9
            for run in others
            if run.shares is not None
        }
        if roof is None or not outside_s:
            return None
        way = min(outside_s, key=lambda name: outside_s[name])
        limit = ModelLimit(
            way=way,
            outside_s=outside_s[way],
            layers_s=roof.layers_s(self._case.threads),
            peak_flop_per_s=roof.flop_per_s,
            read_bytes_per_s=roof.bytes_per_s,
        )
        fastest_s = min(run.timing.median_ns for run in others) / 1e9
        return limit if limit.seconds <= fastest_s else None


def _conditions(cpu: Cpu, dtype: str, use: ProcessorUse | None) -> ModelConditions:
    return ModelConditions(
        cpu=cpu.brand,
        cpu_key=cpu.exact_key,
        kernel_release=release(),
        huge_pages=huge_pages(),
        generator=generator_version(),
        built_with=built_with(dtype),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        stolen=use.stolen if use else 0.0,
        others=use.others if use else 0.0,
    )
