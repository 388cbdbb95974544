"""Our kernels in PyTorch: under torch.compile, and in eager mode."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module

from gemm_tuner.models.row import Prepared, Way, Work, tensors_of
from gemm_tuner.models.ways.compiled import CPP_WRAPPER, FROZEN, prepare_compiled


def _enable(options: Mapping[str, object], work: Work) -> Prepared:
    ours = import_module("gemm_tuner.torch")
    enabled = ours.enable(work.db, **_tuning(work))
    prepared = prepare_compiled(options, work)
    return Prepared(
        call=prepared.call,
        outputs=prepared.outputs,
        plain=prepared.plain,
        report=lambda: enabled.report,
    )


def _replace(work: Work) -> Prepared:
    ours = import_module("gemm_tuner.torch")
    built = work.built
    report = ours.replace(built.module, dict(built.inputs), source=work.db, **_tuning(work))
    return Prepared(call=built.call, outputs=tensors_of, report=lambda: report)


def _tuning(work: Work) -> dict[str, object]:
    if not work.budget_s:
        return {"tune": "never"}
    return {"tune": "wait", "budget_s": work.budget_s}


_ENABLED = {**FROZEN, "how": "gemm_tuner.torch.enable, torch.compile"}

ROWS = (
    Way(
        name="enable",
        wheel="gemm-tuner",
        prepare=partial(_enable, {}),
        settings=_ENABLED,
        is_ours=True,
    ),
    Way(
        name="replace",
        wheel="gemm-tuner",
        prepare=_replace,
        settings={"how": "gemm_tuner.torch.replace, eager mode"},
        unable={"int8": "a quantised model has no torch.nn.Linear"},
        is_ours=True,
    ),
    Way(
        name="enable-cpp-wrapper",
        wheel="gemm-tuner",
        prepare=partial(_enable, CPP_WRAPPER),
        settings={**_ENABLED, "cpp_wrapper": "on"},
        is_ours=True,
    ),
)
