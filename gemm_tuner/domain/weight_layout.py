"""How the caller stores w, and the groups of quantised weights that share a scale."""

import re
from enum import StrEnum

from gemm_tuner.errors import InvalidProblem

GROUP_SIZES = (32, 64, 128)
WHOLE_COLUMN = "k"

_GROUP = re.compile(r"[0-9]{1,99}")


class WeightLayout(StrEnum):
    """How the caller stores w."""

    NK = "nk"  # (n, k), row-major, as PyTorch's Linear does
    KN = "kn"  # (k, n), row-major


def parse_layout(text: str, k: int) -> tuple[WeightLayout, int | None]:
    """Return the layout and the group written as `nk` or `nk:g128`; no group is longer than k.

    Raises:
        InvalidProblem: the layout is not known, or the group is written in another way.
    """
    name, colon, group = text.partition(":")
    size = group.removeprefix("g")
    is_whole = size == WHOLE_COLUMN
    is_size = is_whole or _GROUP.fullmatch(size)
    try:
        layout = WeightLayout(name)
    except ValueError:
        layout = None
    if layout is None or (colon and not (group.startswith("g") and is_size)):
        raise InvalidProblem(
            f"weight layout {text!r} is not known; "
            "use 'nk' for (n, k) as PyTorch's Linear, or 'kn' for (k, n), "
            "with the groups of quantised weights, "
            f"{', '.join(map(str, GROUP_SIZES))} or {WHOLE_COLUMN}, as in 'nk:g128' or 'nk:gk'."
        )
    if not colon:
        return layout, None
    column = max(1, k)
    if is_whole:
        return layout, column
    return layout, min(int(size), column) if int(size) in GROUP_SIZES else int(size)
