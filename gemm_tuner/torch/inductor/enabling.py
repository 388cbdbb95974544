"""The switch of the pass: `enable` and `disable`."""

from collections.abc import Sequence

from torch._inductor import config

from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.layers.limited import within
from gemm_tuner.layers.sources import AnySource, Tune, check_tuning, open_source
from gemm_tuner.torch.asking import check_rows
from gemm_tuner.torch.inductor.compiling import TunedLinears
from gemm_tuner.torch.inductor.frozen_weights import follow_frozen_weights


def enable(
    source: AnySource = None,
    *,
    dynamic_rows: Sequence[int | str] = (),
    dynamic_keys: str = "",
    tune: Tune = "never",
    budget_s: float = 10.0,
    total_budget_s: float | None = None,
) -> TunedLinears:
    """Let what torch.compile compiles from now on call tuned kernels, where one is known.

    It switches Inductor's freezing on: weights become constants of what is compiled, and a warning
    tells of those that are changed in place later. Inference runs under `torch.no_grad()`; what is
    compiled for training stays as it was. `disable` ends it.

    Args:
        source: where kernels come from: a `Client`, the address of a service, the URL of a
            database, the path of a lock file; by default the user's own database.
        dynamic_rows: the numbers of rows to ask for where they are not known when a model is
            compiled, such as `[1, "2..64"]`; by default those of the example.
        dynamic_keys: the range of keys of attention to ask for where their number is not known
            when a model is compiled, such as `"1..4096"`; without it, such attention is left as it
            is. Calls with others are computed by PyTorch.
        tune: `never`; or what the source lacks is tuned, by `wait` while a model is compiled, or by
            `background` while it runs, for what is compiled later. A service is waited for up to a
            minute a layer.
        budget_s: the time to tune a layer for one number of rows, in seconds; a range such as
            `1..64` is tuned at several. A service has its own.
        total_budget_s: the time to tune all of them, in seconds, after which the others are left as
            they are; by default as long as it takes.

    Raises:
        InvalidInput: an argument is none that is known, or another pass is in the place of this.
        GemmTunerError: the source cannot be opened, or the operators cannot be built.
    """
    budget_s = check_tuning(tune, budget_s)
    check_rows("dynamic_rows", dynamic_rows)
    keys = _range_of_keys(dynamic_keys)
    before = config.joint_custom_pre_pass
    if before is not None and not isinstance(before, TunedLinears):
        raise InvalidSetting(
            "torch._inductor.config.joint_custom_pre_pass holds another pass; "
            "take it out before gemm_tuner.torch.enable."
        )
    from gemm_tuner.torch.inductor.lowering import lower_operators  # noqa: PLC0415 - the compiler, for seconds

    lower_operators()
    opened = within(open_source(source, may_tune=True), total_budget_s)
    disable()
    follow_frozen_weights(_is_enabled)
    tuned = TunedLinears(opened, dynamic_rows, keys, tune, budget_s)
    config.joint_custom_pre_pass = tuned
    config.freezing = True
    return tuned


def _range_of_keys(text: str) -> Rows | None:
    """Return the range written as `1..4096`, None where nothing is.

    Raises:
        InvalidInput: it is none.
    """
    if not text:
        return None
    if not isinstance(text, str):
        raise InvalidSetting(f"dynamic_keys = {text!r} is no text; give one, such as '1..4096'.")
    keys = Problem.create(1, text, 1, operation=Operation.ATTENTION.value).columns
    if keys.exact is not None:
        raise InvalidSetting(f"dynamic_keys = {text!r} is no range; give one, such as '1..4096'.")
    return keys


def _is_enabled() -> bool:
    """Return whether what this thread compiles is passed here."""
    return isinstance(config.joint_custom_pre_pass, TunedLinears)


def disable() -> None:
    """Let torch.compile compile as it did before `enable`; what waits for tuning is forgotten."""
    tuned = config.joint_custom_pre_pass
    if isinstance(tuned, TunedLinears):
        config.joint_custom_pre_pass = None
        config.freezing = tuned.freezing_before
        tuned.stop_tuning()
