"""Which answers could be better if the problem was tuned."""

from gemm_tuner.domain.verdict import Basis

# A kernel for a range of m was measured at its greatest: whoever tuned a range wants no other.
NOT_MEASURED = frozenset({Basis.NONE, Basis.PREDICTED, Basis.SAME_MODEL})


def is_tunable(basis: Basis, doubt: str | None) -> bool:
    """Return whether a verdict rests on nothing that was measured for its question.

    `doubt` says why a measurement decides nothing: then it is as if there was none.
    """
    return basis in NOT_MEASURED or doubt is not None
