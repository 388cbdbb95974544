"""The fastest samples that were ever seen here: a neighbour that never rests shows beside them."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from gemm_tuner.doctor.noise import Samples
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.files import read_bounded
from gemm_tuner.trust.files import write_privately

_MAX_BYTES = 2**16
_MOST_KEPT = 100


def default_path() -> Path:
    """Return the file of this machine: folders may be shared by several."""
    machine = re.sub(r"[^\w.-]", "_", os.uname().nodename)
    return user_cache_path("gemm-tuner") / f"fastest-{machine}.json"


def over_fastest(path: Path, cpu: Cpu, samples: Sequence[Samples]) -> dict[str, float]:
    """Return, by loop, its median sample over the fastest seen before; keep what is faster.

    Where the file cannot be written, nothing is kept.
    """
    known = _read(path)
    before = dict(known)
    slower = {}
    for one in samples:
        key = f"{cpu.exact_key} {one.identity}"
        if key in before:
            slower[one.loop] = one.median_ns / before[key]
        known[key] = min(one.fastest_ns, before.get(key, one.fastest_ns))
    if known != before:
        with suppress(OSError):
            kept = dict(list(known.items())[-_MOST_KEPT:])
            write_privately(path, json.dumps(kept, indent=1).encode())
    return slower


def _read(path: Path) -> dict[str, int]:
    """Return what is kept; nothing where there is no such file, or it holds something else."""
    try:
        kept = json.loads(read_bounded(path, _MAX_BYTES, is_private=True))
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {key: time for key, time in kept.items() if isinstance(time, int) and time > 0}
