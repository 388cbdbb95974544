"""The search in one context, from the first race to the confirmed winner."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from gemm_tuner.derive import standing_trials
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.doubt import why_disturbed, why_doubted
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.record import Outcome, Stage, SweepEnd, Trial
from gemm_tuner.select.sturdiest import EQUALLY_FAST, sturdiest_of_fastest
from gemm_tuner.space.candidates import Space
from gemm_tuner.tuning.attempt import Attempts
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.earlier import best_beside_others, earlier_trials, relevant_trials
from gemm_tuner.tuning.finished import is_settled
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.patience import Patience
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.result import SweepResult, make_result
from gemm_tuner.tuning.sampling import (
    CONFIRMED,
    FINAL,
    RACE,
    Sampling,
    confirming_s,
    how_to_confirm,
    is_slower_than_before,
    most_finalists,
)
from gemm_tuner.tuning.search import FAVOURITES, Strategy

_SHARE_TO_CONFIRM = 0.6  # of the budget in a context


@dataclass(slots=True, kw_only=True)
class ContextSweep:
    """The search in one context, within its `budget`, which is a part of the whole.

    The winner of one thread, `alone`, is a finalist if several threads are asked for. With `again`,
    no earlier timing counts: all is timed anew. Where candidates are few, the first race of several
    `is_final`.
    """

    attempts: Attempts
    space: Space
    context: ExecutionContext
    whole_budget: Budget
    budget: Budget
    on_progress: Callable[[Progress], None]
    is_stopped: Callable[[], bool]
    alone: Candidate | None = None
    again: bool = False
    is_final: bool = False
    patience: Patience = field(init=False)
    _speeds: dict[Candidate, float] = field(default_factory=dict)  # compares rounds
    _ratios: dict[Candidate, float] = field(default_factory=dict)  # over the baseline, in a round
    _call_ns: dict[Candidate, float] = field(default_factory=dict)
    _trials: list[Trial] = field(default_factory=list)
    _to_renew: list[Candidate] = field(default_factory=list)  # whose confirmations are not settled
    _best_beside_others: list[Candidate] = field(default_factory=list)  # beside other baselines
    _recalled: int = 0  # trials that are of earlier sweeps
    _in_final: dict[Candidate, float] = field(default_factory=dict)  # over the baseline, together
    _slowest_call_s: float = 0.0
    _proof_s: float = 0.0

    def __post_init__(self) -> None:
        """Have patience for the sweep's budget."""
        self.patience = Patience(budget_s=self.whole_budget.seconds, threads=self.context.threads)

    def run(
        self, strategy: Strategy, *, certain: Sequence[Candidate], is_search: bool
    ) -> SweepResult:
        """Try until it is over, the budget is spent or the user stops it; then confirm.

        The `certain` candidates are tried first, whatever the budget. What is tried is the end of
        the sweep only if it `is_search`, and if what it rests on may be believed.
        """
        resumed = self._recall()
        self._race([*certain, *self._to_renew, *self._best_beside_others], is_certain=True)
        is_exhausted = self._search(strategy) and is_search
        if self._speeds and not self.is_stopped():
            self._confirm()
            self._renew()
        problem, cpu = self.space.problem, self.space.cpu
        result = make_result(
            problem,
            cpu,
            self.context,
            [*self._trials, *self.attempts.failures],
            complete=is_exhausted,
            resumed=resumed,
            note=self.attempts.host.baseline_note,
        )
        is_interrupted = self.is_stopped()
        is_final = is_search and result.verdict.doubt is None
        if is_final and not is_interrupted and self.space.like is None:
            self.attempts.repository.mark_ended(
                problem,
                cpu.exact_key,
                self.context,
                toolchain=self.attempts.toolchain.text,
                generator=generator_version(),
                end=SweepEnd(
                    baseline=self.attempts.host.baseline_text,
                    is_exhausted=is_exhausted,
                    budget_s=self.whole_budget.seconds,
                ),
            )
        return replace(result, is_interrupted=is_interrupted)

    def ranked(self) -> list[Candidate]:
        """Return the candidates that were timed, fastest first."""
        return sorted(self._speeds, key=lambda one: (-self._speeds[one], one.text))

    def _recall(self) -> bool:
        """Take over what earlier, stopped sweeps have found; return whether there was anything."""
        attempts = self.attempts
        earlier = earlier_trials(
            attempts.repository, self.space.problem, self.space.cpu, attempts.toolchain
        )
        self._trials = relevant_trials(
            earlier, self.space, self.context, attempts.host.baseline_text
        )
        for trial in self._trials:
            if trial.measurement is not None:
                if not self.again and why_doubted(trial.measurement) is None:
                    self._learn(trial.candidate, trial.measurement)
            elif trial.outcome is not Outcome.CORRECT:
                self._speeds.pop(trial.candidate, None)
        self._recalled = len(self._trials)
        self._best_beside_others = best_beside_others(
            earlier, self.space, self.context, attempts.host.baseline_text
        )
        before = make_result(
            self.space.problem,
            self.space.cpu,
            self.context,
            self._trials,
            complete=False,
            resumed=True,
        )
        if self.again or not is_settled(before.verdict):
            standing = standing_trials(self._trials)
            self._to_renew = [one.candidate for one in standing if one.context == self.context]
        return not self.again and any(trial.context == self.context for trial in self._trials)

    def _search(self, strategy: Strategy) -> bool:
        """Race batch after batch; return whether the search came to its end by itself."""
        while batch := strategy.next_batch(self._speeds):
            if self.is_stopped() or (self._speeds and not self._has_time_for(1)):
                return False
            is_whole = self._race(batch)
            self._report("searching", strategy.pending)
            if not is_whole:
                return False
        return True

    def _race(self, batch: Sequence[Candidate], *, is_certain: bool = False) -> bool:
        """Time the new ones of a batch; return whether there was time for all."""
        new = [one for one in dict.fromkeys(batch) if one not in self._speeds]
        if not new:
            return True
        self.attempts.compile(new)
        proven: list[Candidate] = []
        at_once = self.attempts.host.provers
        for start in range(0, len(new), at_once):
            group = new[start : start + at_once]
            if self.is_stopped():
                return False
            is_first = not (self._speeds or proven)
            if not (is_certain or is_first or self._has_time_for(len(proven) + len(group))):
                self._time_race(proven)
                return False
            begin_s = monotonic()
            proven += self.attempts.prove(group, self.context)
            self._proof_s = monotonic() - begin_s
        self._time_race(proven)
        return True

    def _time_race(self, candidates: Sequence[Candidate]) -> None:
        """Time the candidates of a race, as carefully as it deserves."""
        if self.is_final and len(candidates) > 1:
            self._in_final = self._time(candidates, FINAL)
        else:
            self._time(candidates, RACE)

    @property
    def _call_s(self) -> float:
        """Return the time of the slowest call that was timed, or else of one of the baseline."""
        return self._slowest_call_s or self.attempts.host.baseline_call_s

    def _has_time_for(self, candidates: int) -> bool:
        """Return whether some may still be proved and raced, and the best be confirmed.

        Where calls are slow, what is over the share for confirming comes on top of the budget.
        """
        call_s, budget_s = self._call_s, self.whole_budget.seconds
        most = self._most_finalists() + (self.context.threads > 1)
        finalists = min(most, len(self._speeds) + candidates)
        reserved_s = min(
            confirming_s(call_s, budget_s, threads=self.context.threads, finalists=finalists),
            _SHARE_TO_CONFIRM * self.budget.seconds,
        )
        race_s = RACE.duration_s(candidates, call_s=call_s, budget_s=budget_s)
        return self.budget.remaining_s > self._proof_s + race_s + reserved_s

    def _confirm(self) -> None:
        """Time the best few carefully, then the best of them once more, for its own sake.

        The next is confirmed too where the speed of one that was confirmed does not hold beside
        those of the others.
        """
        self._report("confirming", 0)
        proven = self.attempts.prove(self._finalists(), self.context)
        if self.is_stopped():
            return
        if self._in_final.keys() >= set(proven):
            speeds = {one: self._in_final[one] for one in proven}
        else:
            speeds = self._time(proven, FINAL) if len(proven) > 1 else dict.fromkeys(proven, 1.0)
        waiting = self._without_useless_threads(speeds)
        confirmed = 0.0
        for _attempt in range(CONFIRMED):
            is_held = confirmed * EQUALLY_FAST >= max(waiting.values(), default=0.0)
            if is_held or self.is_stopped():
                return
            candidate = sturdiest_of_fastest(waiting, self.space.problem)
            del waiting[candidate]
            speeds = self._time([candidate], self._how_to_confirm(candidate))
            confirmed = max(confirmed, speeds.get(candidate, 0.0))

    def _renew(self) -> None:
        """Confirm once more what was confirmed before and not now: the newer confirmation counts.

        What an earlier, disturbed one said of a kernel would otherwise stand beside the new ones.
        """
        confirmed = {
            trial.candidate
            for trial in self._trials[self._recalled :]
            if trial.stage is Stage.CONFIRM
        }
        old = [one for one in dict.fromkeys(self._to_renew) if one not in confirmed]
        for candidate in self.attempts.prove(old, self.context):
            if self.is_stopped():
                return
            self._time([candidate], self._how_to_confirm(candidate))

    def _how_to_confirm(self, candidate: Candidate) -> Sampling:
        return how_to_confirm(self._call_ns.get(candidate, 0.0) / 1e9, self.context.threads)

    def _most_finalists(self) -> int:
        return most_finalists(call_s=self._call_s, budget_s=self.whole_budget.seconds)

    def _finalists(self) -> list[Candidate]:
        """Return the best few, and of several threads the best that needs one."""
        best = self.ranked()[: self._most_finalists()]
        if self.context.threads == 1:
            return best
        alone = self.alone if self.alone in self._speeds else self._fastest_alone(self._speeds)
        return list(dict.fromkeys([*best, alone] if alone else best))

    def _without_useless_threads(self, speeds: dict[Candidate, float]) -> dict[Candidate, float]:
        """Leave out what takes longer with several threads than the fastest takes with one.

        Speeds over a baseline may not show it: where its threads get into each other's way, its
        own time differs from one run to the next.
        """
        alone = self._fastest_alone(speeds)
        if alone is None:
            return speeds
        return {
            one: speed
            for one, speed in speeds.items()
            if one.parts == 1 or self._call_ns[one] < self._call_ns[alone]
        }

    def _fastest_alone(self, candidates: Iterable[Candidate]) -> Candidate | None:
        return min(
            (one for one in candidates if one.parts == 1),
            key=lambda one: (self._call_ns[one], one.text),
            default=None,
        )

    def _time(self, candidates: Sequence[Candidate], sampling: Sampling) -> dict[Candidate, float]:
        """Return the speeds over the baseline's, in the same rounds, of those that did not fail.

        What decides is timed once more if it took longer than before, and then that counts; and
        again while other work disturbs it, as long as there is patience.
        """
        if not candidates:
            return {}
        earlier = tuple(self._trials)
        trials = self._time_once(candidates, sampling)
        if sampling is not RACE:
            if is_slower_than_before(trials, earlier):
                trials = self._time_once([trial.candidate for trial in trials], sampling)
            while self._is_disturbed(trials) and self._wait():
                trials = self._time_once([trial.candidate for trial in trials], sampling)
        for candidate in candidates:  # only now: until then, what is told of them is the earlier
            self._speeds.pop(candidate, None)
        for trial in trials:
            if trial.measurement is not None:
                self._learn(trial.candidate, trial.measurement)
        return {one: self._ratios[one] for one in candidates if one in self._speeds}

    def _time_once(self, candidates: Sequence[Candidate], sampling: Sampling) -> list[Trial]:
        trials = self.attempts.time(
            candidates,
            self.context,
            stage=sampling.stage,
            pairs=sampling.affordable_pairs(
                len(candidates), call_s=self._call_s, budget_s=self.whole_budget.seconds
            ),
            sample_ns=sampling.sample_ns,
            processes=sampling.processes,
            on_process=lambda process: self._report(f"confirming, process {process + 1}", 0),
        )
        self._trials += trials
        return trials

    def _is_disturbed(self, trials: Sequence[Trial]) -> bool:
        return any(one.measurement and why_disturbed(one.measurement) for one in trials)

    def _wait(self) -> bool:
        """Wait until nothing disturbs; return whether it is worth measuring again."""
        return self.patience.wait(
            is_stopped=self.is_stopped,
            on_wait=lambda: self._report("disturbed, waiting for idle cores", 0),
        )

    def _learn(self, candidate: Candidate, measurement: Measurement) -> None:
        self._speeds[candidate] = measurement.comparable_speed
        self._ratios[candidate] = measurement.ratio.median
        call_ns = self._call_ns[candidate] = measurement.candidate.median_ns
        slowest_ns = max(call_ns, measurement.baseline_timing.median_ns)
        self._slowest_call_s = max(self._slowest_call_s, slowest_ns / 1e9)

    def _report(self, stage: str, pending: int) -> None:
        tried = len(self._speeds) + len(self.attempts.failures)
        best = self.ranked()[:1]
        self.on_progress(
            Progress(
                stage=f"{self.context.regime.value}, {stage}",
                done=tried,
                total=max(tried + pending, FAVOURITES),
                best_ratio=self._ratios[best[0]] if best else None,
                remaining_s=self.whole_budget.remaining_s,
                failed=len(self.attempts.failures),
                best_ns=self._call_ns[best[0]] if best else None,
            )
        )
