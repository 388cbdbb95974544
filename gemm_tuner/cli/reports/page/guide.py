"""The section of a page that says how to read it."""

from gemm_tuner.cli.reports.page.content import Block, Section
from gemm_tuner.domain.verdict import BASELINE_BELOW, TUNED_ABOVE

_ANSWERS = f"""
Tuned: the whole 95 % interval of the kernel's speed over its baseline lies above {TUNED_ABOVE}, and
the fastest samples agree; a call that is cut for several threads also leads by more than the
microsecond that these may wait for each other another time. Baseline: it lies below
{BASELINE_BELOW}. Tie: neither is shown. The band in the plots is from {BASELINE_BELOW} to
{TUNED_ABOVE}. A baseline is the fastest library
that the sweep had, or a scalar loop where it had none, and is named beside each ratio. Kernel and
baseline were timed in alternation, in the same rounds. Ratios over different baselines are never
averaged.
"""
_SHARES = """
The peak of arithmetic is that of multiply-adds, measured on one core beside each kernel, times the
number of threads. The roof of reading is not recorded. So a kernel on the left of such a plot,
where a call reads much for each FLOP, may be as fast as memory allows and far below the peak;
gemm-tuner bench measures both. Above 100 %, the CPU has a faster instruction than the loop, or the
loop was slowed.
"""
_SEARCHES = """
Curves of searches show the least time of a call so far, over that after the last timing, in the
order of the dates. Races, finals and confirmations all count as timings. Each time is of the rounds
in which it was taken, so these curves tell of searches, and ratios tell of kernels. A search that
knew a winner of an earlier one begins near its best.
"""


def guide_section(*, of_one_database: bool) -> Section:
    """Return how to read what follows."""
    texts = (_ANSWERS, _SHARES, _SEARCHES) if of_one_database else (_ANSWERS,)
    return Section(
        title="How to read this",
        blocks=(Block(words=tuple(" ".join(text.split()) for text in texts)),),
    )
