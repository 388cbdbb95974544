"""The beginning of a page: what a database holds, in words, and under which conditions."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from gemm_tuner.cli.reports.page.answers import Answer, Contents, Standing
from gemm_tuner.cli.reports.page.content import Block, Section, Table, listed
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.doubt import DISTURBED, IMPLAUSIBLE
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.units import counted
from gemm_tuner.domain.verdict import Decision

NOT_BELIEVED = "not believed"


def mark_of(answer: Answer) -> str:
    """Return the word for an answer in plots and bars."""
    return NOT_BELIEVED if answer.verdict.doubt else answer.verdict.decision.value


def summarise(contents: Contents) -> Section:
    """Return what a database holds in words, with the conditions of what was measured."""
    return Section(
        title=f"What {contents.name} holds",
        blocks=(
            Block(words=tuple(_words(contents))),
            Block(
                table=Table(
                    title="Conditions",
                    columns=("what", "as recorded"),
                    rows=_conditions(contents.answers),
                    is_folded=False,
                )
            ),
        ),
    )


def _words(contents: Contents) -> list[str]:
    answers = contents.answers
    decisions = Counter(answer.verdict.decision for answer in answers)
    counts = ", ".join(f"{decisions[decision]} {decision.value}" for decision in Decision)
    problems = len({answer.problem for answer in answers})
    cpus = len({answer.verdict.cpu_key for answer in answers})
    found = f"{counted(problems, 'problem')} on {counted(cpus, 'kind of CPU', 'kinds of CPU')}"
    words = [
        f"{found}, with {counted(len(answers), 'answer')}: {counts}.",
        "There is an answer for each problem, kind of CPU, number of threads and regime.",
        *_doubts(answers),
        *_standings(answers),
        *_hosts(contents),
        *_ends(answers),
    ]
    if contents.unanswered:
        words.append(
            f"{counted(contents.unanswered, 'more search', 'more searches')} left no confirmed "
            "kernel: stopped early, failed, or proved without being timed."
        )
    failures = {one: n for one, n in contents.outcomes.items() if one is not Outcome.CORRECT}
    if failures:
        named = ", ".join(f"{n} {one.value.replace('_', ' ')}" for one, n in failures.items())
        words.append(
            f"Of {counted(contents.outcomes.total(), 'recorded trial')}, "
            f"{sum(failures.values())} failed and are kept as failures: {named}."
        )
    return words


def _doubts(answers: Sequence[Answer]) -> list[str]:
    reasons = [answer.verdict.doubt for answer in answers if answer.verdict.doubt]
    if not reasons:
        return ["No answer rests on a measurement that is disturbed or implausible."]
    kinds = ", ".join(
        f"{count} {kind}"
        for kind in (DISTURBED, IMPLAUSIBLE)
        if (count := sum(kind in reason for reason in reasons))
    )
    return [
        (
            f"{counted(len(reasons), 'answer')} decide{'s' if len(reasons) == 1 else ''} nothing, "
            f"because the measurement is not believed ({kinds}): counted as a tie, and left out of "
            "means."
        )
    ]


def _standings(answers: Sequence[Answer]) -> list[str]:
    standings = Counter(answer.standing for answer in answers)
    return [
        f"{counted(standings[one], 'answer')} of these: {one.value}. No kernel is served because "
        "of such records."
        for one in (Standing.UNATTESTED, Standing.IMPORTED)
        if standings[one]
    ]


def _hosts(contents: Contents) -> list[str]:
    """Return for how many answers the quorum asks for more hosts than measured."""
    if contents.quorum == 1:
        return []
    measured = [one for one in contents.answers if one.standing is Standing.BELIEVED]
    few = sum(one.hosts < contents.quorum for one in measured)
    fewer = f"{counted(few, 'answer')} of these {'was' if few == 1 else 'were'} confirmed by fewer"
    return [
        f"A kernel is served once {contents.quorum} hosts found it by themselves.",
        "Each answer here is what the newest confirmation says, whoever measured it.",
        f"{fewer} hosts.",
    ]


def _ends(answers: Sequence[Answer]) -> list[str]:
    own = [answer for answer in answers if answer.standing is not Standing.IMPORTED]
    complete = sum(answer.verdict.complete for answer in own)
    words = []
    if own:
        words.append(
            f"The search came to its end for {counted(complete, 'answer')}; for "
            f"{len(own) - complete} it ended by its budget, was stopped, tried only what was "
            "recorded elsewhere, or is not believed."
        )
    if len(own) < len(answers):
        words.append(
            "How the searches of imported records ended, and where their time went, is not known."
        )
    return words


def _conditions(answers: Sequence[Answer]) -> list[tuple[str, str]]:
    conditions = [answer.conditions for answer in answers if answer.conditions]
    dates = sorted(answer.verdict.tried_at for answer in answers if answer.verdict.tried_at)
    raced = [one for answer in answers for one in answer.measured.raced]
    rows = [
        ("measured", f"{dates[0]:%Y-%m-%d %H:%M} to {dates[-1]:%Y-%m-%d %H:%M} UTC")
        if dates
        else ("measured", "not known"),
        ("CPUs", listed(_cpu_text(answer.cpu) for answer in answers)),
        ("generators of the kernels", listed(answer.verdict.generator or "" for answer in answers)),
        ("compilers", listed(answer.toolchain for answer in answers)),
        ("baselines", listed(_with_counts(answer.measured.baseline for answer in answers))),
        ("libraries raced for the baseline", _raced_text(raced)),
        ("Linux kernel", listed(one.kernel_release for one in conditions)),
        ("microcode", listed(one.microcode for one in conditions)),
        ("transparent huge pages", listed(one.huge_pages for one in conditions)),
        ("noise", _noise_text([one.noise for one in conditions])),
    ]
    unusable = [
        f"{one.package or one.baseline}: {one.reason.removesuffix('.')}"
        for one in raced
        if one.reason
    ]
    return [*rows, ("libraries not raced", listed(unusable))] if unusable else rows


def _cpu_text(cpu: Cpu) -> str:
    return f"{cpu.brand} ({counted(cpu.physical_cores, 'core')} usable, {cpu.exact_key})"


def _raced_text(raced: Sequence[Raced]) -> str:
    texts = [one.package or one.baseline for one in raced if one.is_usable]
    return listed(_with_counts(texts)) if texts else "not recorded"


def _with_counts(texts: Iterable[str]) -> list[str]:
    counts = Counter(texts)
    return [f"{text} ({count})" for text, count in counts.most_common()]


def _noise_text(noise: Sequence[float]) -> str:
    if not noise:
        return "not recorded"
    return (
        f"the middle half of a baseline's samples spreads over {median(noise):.1%} of their "
        f"median in the median, and {max(noise):.1%} at most"
    )
