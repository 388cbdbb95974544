"""Python runs this as it starts, where this folder is on its path: it calms workers.

They believe what they time beside other work, at once, and are as urgent as that. With
`CALMED_LEASE_S`, others take their jobs so soon.
"""

import os
import sys
import traceback
from math import inf
from types import ModuleType


def _put(module: ModuleType, name: str, value: object) -> None:
    getattr(module, name)  # there is one
    setattr(module, name, value)


def _calm() -> None:
    from gemm_tuner.domain import doubt  # noqa: PLC0415 - of workers alone
    from gemm_tuner.tuning import context_sweep, finished, worker  # noqa: PLC0415
    from gemm_tuner.tuning.ranges import holding  # noqa: PLC0415

    _put(os, "nice", lambda _more: 0)
    _put(worker, "idle_cores", lambda: None)
    _put(finished, "_WIDE", inf)
    _put(context_sweep, "is_slower_than_before", lambda _trials, _earlier: False)
    for module in (doubt, context_sweep):
        _put(module, "why_disturbed", lambda _measurement: None)
    if lease_s := os.environ.get("CALMED_LEASE_S"):
        for module in (holding, worker):
            _put(module, "LEASE_S", float(lease_s))


if "worker" in sys.orig_argv:
    try:
        _calm()
    except Exception:  # noqa: BLE001 - Python would go on without
        traceback.print_exc()
        os._exit(70)
