"""The search in one context, from the first race to the confirmed winner."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from gemm_tuner.bench.requests import Baselines
from gemm_tuner.derive import is_believed, standing_trials
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.doubt import why_disturbed
from gemm_tuner.domain.record import Outcome, Stage, SweepEnd, Trial
from gemm_tuner.select.sturdiest import sturdiest_of_fastest
from gemm_tuner.space.candidates import Space
from gemm_tuner.strategies.local_search import FAVOURITES
from gemm_tuner.strategies.strategy import Strategy
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.earlier import best_beside_others, relevant_trials
from gemm_tuner.tuning.figures import Figures
from gemm_tuner.tuning.finished import is_settled
from gemm_tuner.tuning.patience import Patience
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.result import SweepResult, last_final, make_result
from gemm_tuner.tuning.sampling import (
    CONFIRMED,
    RACE,
    Sampling,
    are_confirmed_at_once,
    confirming_s,
    how_to_confirm,
    how_to_end,
    is_slower_than_before,
    most_finalists,
)
from gemm_tuner.tuning.trial_source import TrialSource

_SHARE_TO_CONFIRM = 0.6  # of the budget in a context
# A confirmation has other processes than the final: so much of its speed there may be missing.
_HOLDS = 1.03


@dataclass(slots=True, kw_only=True)
class ContextSweep:
    """The search in one context, within its `budget`, which is a part of the whole.

    It goes on from `earlier` trials of the problem that still stand. `on_end` is told of its end,
    if nobody stopped it.
    The winner of one thread, `alone`, is a finalist if several threads are asked for. With `again`,
    no earlier timing counts: all is timed anew. Where candidates are few, the first race of several
    `is_final`. A sweep that was cut off and began `since` a time goes on from the final that it
    timed, and from what it confirmed after that.

    Where calls are slow, candidates are proved and raced on a part of the problem, by `slices`,
    whose `earlier_slices` are what is known of it. Only finalists are then proved and timed whole.
    """

    attempts: TrialSource
    earlier: Sequence[Trial]
    patience: Patience
    on_end: Callable[[SweepEnd], None]
    space: Space
    context: ExecutionContext
    whole_budget: Budget
    budget: Budget
    on_progress: Callable[[Progress], None]
    is_stopped: Callable[[], bool]
    alone: Candidate | None = None
    again: bool = False
    is_final: bool = False
    since: datetime | None = None
    slices: TrialSource | None = None
    earlier_slices: Sequence[Trial] = ()
    _whole: Figures = field(default_factory=Figures)
    _raced: Figures = field(init=False)  # of slices if there are any, else of whole calls too
    _of_slices: list[Trial] = field(default_factory=list)
    _trials: list[Trial] = field(default_factory=list)
    _to_renew: list[Candidate] = field(default_factory=list)  # whose confirmations are not settled
    _best_beside_others: list[Candidate] = field(default_factory=list)  # beside other baselines
    _recalled: int = 0  # trials that are of earlier sweeps
    _in_final: dict[Candidate, float] = field(default_factory=dict)  # over the baseline, together
    _are_confirmed: bool = False  # those in it
    _proof_s: float = 0.0

    def __post_init__(self) -> None:
        """Never mix what slices take with what whole calls take."""
        self._raced = Figures() if self.slices else self._whole

    def run(
        self, strategy: Strategy, *, certain: Sequence[Candidate], is_search: bool
    ) -> SweepResult:
        """Try until it is over, the budget is spent or the user stops it; then confirm.

        The `certain` candidates are tried first, whatever the budget. What is tried is the end of
        the sweep only if it `is_search`, and if what it rests on may be believed.
        """
        resumed = self._recall()
        final = self._final_before()
        is_exhausted = False
        if not final:
            self._race([*certain, *self._to_renew, *self._best_beside_others], is_certain=True)
            is_exhausted = self._search(strategy) and is_search
        if (self._raced.speeds or self._whole.speeds) and not self.is_stopped():
            self._confirm(final)
            self._renew()
        problem, cpu = self.space.problem, self.space.cpu
        result = make_result(
            problem,
            cpu,
            self.context,
            [*self._trials, *self.attempts.failures],
            of_slices=[*self._of_slices, *(self.slices.failures if self.slices else ())],
            complete=is_exhausted,
            resumed=resumed,
            note=self._baselines.note,
        )
        is_interrupted = self.is_stopped()
        is_final = is_search and result.verdict.doubt is None
        if is_final and not is_interrupted:
            self.on_end(
                SweepEnd(
                    baseline=self._baselines.text,
                    is_exhausted=is_exhausted,
                    budget_s=self.whole_budget.seconds,
                )
            )
        return replace(result, is_interrupted=is_interrupted)

    @property
    def _baselines(self) -> Baselines:
        return self.attempts.host.baselines(self.context.regime)

    def ranked(self) -> list[Candidate]:
        """Return the candidates that were timed, fastest first."""
        return list(dict.fromkeys([*self._whole.ranked(), *self._raced.ranked()]))

    def _recall(self) -> bool:
        """Take over what earlier, stopped sweeps have found; return whether there was anything."""
        baseline = self._baselines.text
        self._trials = relevant_trials(self.earlier, self.space, self.context, baseline)
        for trial in self._trials:
            if trial.measurement is not None:
                if not self.again and is_believed(trial):
                    self._whole.learn(trial.candidate, trial.measurement)
            elif trial.outcome is not Outcome.CORRECT:
                self._whole.forget(trial.candidate)
        self._recall_slices()
        self._recalled = len(self._trials)
        self._best_beside_others = best_beside_others(
            self.earlier, self.space, self.context, baseline
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

    def _recall_slices(self) -> None:
        """Take over what earlier races of slices have found beside the same baseline."""
        if self.slices is None or self.again:
            return
        baseline = self.slices.host.baselines(self.context.regime).text
        self._of_slices = relevant_trials(self.earlier_slices, self.space, self.context, baseline)
        failed = {trial.candidate for trial in self.attempts.failures}
        for trial in self._of_slices:
            if trial.measurement is not None and trial.candidate not in failed:
                self._raced.learn(trial.candidate, trial.measurement)

    def _timed_before(self) -> list[Trial]:
        """Return what this sweep timed before it was cut off, in this context."""
        if self.since is None or self.again:
            return []
        recalled = self._trials[: self._recalled]
        return [one for one in recalled if one.measurement and one.created_at >= self.since]

    def _final_before(self) -> dict[Candidate, float]:
        """Return the speeds in the final that this sweep timed before it was cut off, if it did.

        The search was over by then. What is disturbed, or cannot be built again, is no final.
        """
        final = last_final(self._timed_before())
        candidates = [one.candidate for one in final]
        if not all(map(is_believed, final)):
            return {}
        if self.attempts.prove(candidates, self.context) != candidates:
            return {}
        return {one.candidate: one.measurement.ratio.median for one in final if one.measurement}

    def _confirmed_before(self) -> dict[Candidate, float]:
        """Return what this sweep confirmed after its last final, before it was cut off."""
        confirmed: dict[Candidate, float] = {}
        for trial in self._timed_before():
            if trial.stage is Stage.FINAL:
                confirmed.clear()
            elif trial.stage is Stage.CONFIRM and trial.measurement and is_believed(trial):
                confirmed[trial.candidate] = trial.measurement.ratio.median
        return confirmed

    def _search(self, strategy: Strategy) -> bool:
        """Race batch after batch; return whether the search came to its end by itself.

        The first batch is raced whatever the budget.
        """
        is_first = not self._raced.speeds
        while (batch := strategy.propose(self._raced.speeds)).candidates:
            if self.is_stopped() or not (is_first or self._has_time_for(1)):
                return False
            is_first = False
            is_whole = self._race(batch.candidates, sample_factor=batch.sample_factor)
            self._report("searching", strategy.pending)
            if not is_whole:
                return False
        return True

    def _race(
        self, batch: Sequence[Candidate], *, is_certain: bool = False, sample_factor: int = 1
    ) -> bool:
        """Time the new ones of a batch, or all with a `sample_factor` above 1.

        Return whether there was time.
        """
        speeds, source = self._raced.speeds, self.slices or self.attempts
        new = [one for one in dict.fromkeys(batch) if sample_factor > 1 or one not in speeds]
        if self.slices:
            failed = {trial.candidate for trial in self.attempts.failures}
            new = [one for one in new if one not in failed]
        if not new:
            return True
        source.compile(new)
        proven: list[Candidate] = []
        at_once = source.host.provers
        is_first = not speeds
        for start in range(0, len(new), at_once):
            group = new[start : start + at_once]
            if self.is_stopped():
                return False
            # A batch of slices takes about as long as the few whole ones that are always tried.
            is_due = is_certain or (is_first and (self.slices is not None or not proven))
            if not (is_due or self._has_time_for(len(proven) + len(group), sample_factor)):
                self._time_race(proven, sample_factor)
                return False
            begin_s = self.budget.clock()
            proven += source.prove(group, self.context)
            self._proof_s = self.budget.clock() - begin_s
        self._time_race(proven, sample_factor)
        return True

    def _time_race(self, candidates: Sequence[Candidate], sample_factor: int) -> None:
        """Time the candidates of a race, as carefully as it deserves."""
        if self.slices:
            self._time_slices(candidates, RACE.with_samples(sample_factor), self.slices)
        elif self.is_final and len(candidates) > 1:
            self._are_confirmed = are_confirmed_at_once(
                len(candidates), call_s=self._call_s, threads=self.context.threads
            )
            confirming, ending = how_to_confirm(self._call_s, 1), how_to_end(self._call_s)
            self._in_final = self._time(candidates, confirming if self._are_confirmed else ending)
        else:
            self._time(candidates, RACE.with_samples(sample_factor))

    def _time_slices(
        self, candidates: Sequence[Candidate], sampling: Sampling, slices: TrialSource
    ) -> None:
        if candidates:
            trials = self._ask(slices, candidates, sampling, self._race_call_s)
            self._of_slices += trials
            self._learn(self._raced, candidates, trials)

    @property
    def _call_s(self) -> float:
        """Return the time of the slowest call that was timed, or else of one of the baseline."""
        return self._whole.slowest_call_s or self._baselines.call_s

    @property
    def _race_call_s(self) -> float:
        """Return the same of the calls of races."""
        source = self.slices or self.attempts
        beside = source.host.baselines(self.context.regime)
        return self._raced.slowest_call_s or beside.call_s

    def _has_time_for(self, candidates: int, sample_factor: int = 1) -> bool:
        """Return whether some may still be proved and raced, and the best be confirmed.

        Where calls are slow, what is over the share for confirming comes on top of the budget.
        """
        call_s, budget_s = self._call_s, self.whole_budget.seconds
        most = self._most_finalists() + (self.context.threads > 1)
        finalists = min(most, len(self._raced.speeds) + candidates)
        reserved_s = min(
            confirming_s(call_s, budget_s, threads=self.context.threads, finalists=finalists),
            _SHARE_TO_CONFIRM * self.budget.seconds,
        )
        race = RACE.with_samples(sample_factor)
        race_s = race.duration_s(candidates, call_s=self._race_call_s, budget_s=budget_s)
        return self.budget.remaining_s > self._proof_s + race_s + reserved_s

    def _confirm(self, final: dict[Candidate, float]) -> None:
        """Time the best few carefully, then the best of them once more, for its own sake.

        The next is confirmed too where the speed of one that was confirmed does not hold beside
        those of the others. What a `final` before said, and what was confirmed after it, holds.
        The few of a final that was chosen beforehand are confirmed together.
        """
        self._report("confirming", 0)
        before = self._confirmed_before()
        if not final:
            final = self._time_final()
            before = before if len(final) == 1 else {}
        if self._are_confirmed and final.keys() <= self._in_final.keys():
            return
        waiting = self._without_useless_threads(final)
        confirmed = 0.0
        for _attempt in range(CONFIRMED):
            is_held = confirmed * _HOLDS >= max(waiting.values(), default=0.0)
            if is_held or self.is_stopped():
                return
            candidate = sturdiest_of_fastest(waiting, self.space.problem)
            del waiting[candidate]
            speeds = before
            if candidate not in before:
                speeds = self._time([candidate], self._how_to_confirm(candidate))
            confirmed = max(confirmed, speeds.get(candidate, 0.0))

    def _time_final(self) -> dict[Candidate, float]:
        """Return the speeds of the finalists in the same rounds; a single one needs no final."""
        proven = self._proven_finalists()
        if self.is_stopped():
            return {}
        if self._in_final.keys() >= set(proven):
            return {one: self._in_final[one] for one in proven}
        final = how_to_end(self._call_s)
        return self._time(proven, final) if len(proven) > 1 else dict.fromkeys(proven, 1.0)

    def _renew(self) -> None:
        """Confirm once more what was confirmed before and not now: the newer confirmation counts.

        What an earlier, disturbed one said of a kernel would otherwise stand beside the new ones.
        """
        confirmed = {
            trial.candidate
            for trial in self._trials[self._recalled :]
            if trial.stage is Stage.CONFIRM
        } | self._confirmed_before().keys()
        old = [one for one in dict.fromkeys(self._to_renew) if one not in confirmed]
        for candidate in self.attempts.prove(old, self.context):
            if self.is_stopped():
                return
            self._time([candidate], self._how_to_confirm(candidate))

    def _how_to_confirm(self, candidate: Candidate) -> Sampling:
        least_ns = self._raced.call_ns.get(candidate, 0.0)  # a slice takes no longer
        call_ns = self._whole.call_ns.get(candidate, least_ns)
        return how_to_confirm(call_ns / 1e9, self.context.threads)

    def _most_finalists(self) -> int:
        return most_finalists(call_s=self._call_s, budget_s=self.whole_budget.seconds)

    def _proven_finalists(self) -> list[Candidate]:
        """Return the finalists that are right; where one is not, the next takes its place."""
        while True:
            finalists = self._finalists()
            proven = self.attempts.prove(finalists, self.context)
            wrong = [one for one in finalists if one not in proven]
            if not wrong or self.is_stopped():
                return proven
            for candidate in wrong:
                self._whole.forget(candidate)
                self._raced.forget(candidate)

    def _finalists(self) -> list[Candidate]:
        """Return the best few, and of several threads the best that needs one.

        The best of whole calls that were timed before is among them, however its slice did.
        """
        best = [*self._raced.ranked()[: self._most_finalists()], *self._whole.ranked()[:1]]
        if self.context.threads > 1:
            speeds = self._raced.speeds
            alone = (
                self.alone
                if self.alone in speeds
                else self._fastest_alone(speeds, self._raced.call_ns)
            )
            best += [alone] if alone else []
        return list(dict.fromkeys(best))

    def _without_useless_threads(self, speeds: dict[Candidate, float]) -> dict[Candidate, float]:
        """Leave out what takes longer with several threads than the fastest takes with one.

        Speeds over a baseline may not show it: where its threads get into each other's way, its
        own time differs from one run to the next.
        """
        call_ns = self._whole.call_ns
        if len(speeds) == 1:  # which there was no need to time
            return speeds
        alone = self._fastest_alone(speeds, call_ns)
        if alone is None:
            return speeds
        return {
            one: speed
            for one, speed in speeds.items()
            if one.parts == 1 or call_ns[one] < call_ns[alone]
        }

    def _fastest_alone(
        self, candidates: Iterable[Candidate], call_ns: dict[Candidate, float]
    ) -> Candidate | None:
        return min(
            (one for one in candidates if one.parts == 1),
            key=lambda one: (call_ns[one], one.text),
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
        if sampling.stage is not Stage.RACE:
            if is_slower_than_before(trials, earlier):
                trials = self._time_once([trial.candidate for trial in trials], sampling)
            while self._is_disturbed(trials) and self._wait():
                trials = self._time_once([trial.candidate for trial in trials], sampling)
        self._learn(self._whole, candidates, trials)  # until now, what is told is the earlier
        return {one: self._whole.ratios[one] for one in candidates if one in self._whole.speeds}

    def _learn(
        self, figures: Figures, candidates: Sequence[Candidate], trials: Sequence[Trial]
    ) -> None:
        """Put what was timed now in the place of what was known of some candidates."""
        for candidate in candidates:
            figures.forget(candidate)
        for trial in trials:
            if trial.measurement is not None:
                figures.learn(trial.candidate, trial.measurement)

    def _time_once(self, candidates: Sequence[Candidate], sampling: Sampling) -> list[Trial]:
        trials = self._ask(self.attempts, candidates, sampling, self._call_s)
        self._trials += trials
        return trials

    def _ask(
        self,
        source: TrialSource,
        candidates: Sequence[Candidate],
        sampling: Sampling,
        call_s: float,
    ) -> list[Trial]:
        stage = "final" if sampling.stage is Stage.FINAL else "confirming"
        return source.time(
            candidates,
            self.context,
            stage=sampling.stage,
            pairs=sampling.affordable_pairs(
                len(candidates), call_s=call_s, budget_s=self.whole_budget.seconds
            ),
            sample_ns=sampling.sample_ns,
            processes=sampling.processes,
            on_process=lambda process: self._report(f"{stage}, process {process + 1}", 0),
        )

    def _is_disturbed(self, trials: Sequence[Trial]) -> bool:
        return any(one.measurement and why_disturbed(one.measurement) for one in trials)

    def _wait(self) -> bool:
        """Wait until nothing disturbs; return whether it is worth measuring again."""
        return self.patience.wait(
            is_stopped=self.is_stopped,
            on_wait=lambda: self._report("disturbed, waiting for idle cores", 0),
        )

    def _report(self, stage: str, pending: int) -> None:
        tried = len(self.ranked()) + len(self.attempts.failures)
        best = self._whole.ranked()[:1]
        self.on_progress(
            Progress(
                stage=f"{self.context.regime.value}, {stage}",
                done=tried,
                total=max(tried + pending, FAVOURITES),
                best_ratio=self._whole.ratios[best[0]] if best else None,
                remaining_s=self.whole_budget.remaining_s + self.patience.remaining_s,
                failed=len(self.attempts.failures),
                best_ns=self._whole.call_ns[best[0]] if best else None,
            )
        )
