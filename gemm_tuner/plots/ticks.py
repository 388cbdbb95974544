"""The marks of a logarithmic axis of ratios: 1, and others that stand apart from each other."""

from math import log

_ABOVE = (
    *(1.02, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0),
    *(10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0),
)
_BELOW = (0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
_MOST = 11


def ratio_ticks(low: float, high: float) -> list[float]:
    """Return the ratios from `low` to `high` that an axis marks: 1, and round ones beside it."""
    least_apart = log(high / low) / _MOST
    within = [1.0]
    for ticks in (_ABOVE, _BELOW):
        last = 1.0
        for tick in ticks:
            if low <= tick <= high and abs(log(tick / last)) >= least_apart:
                within.append(tick)
                last = tick
    return within
