"""The options that commands share, and what their texts mean."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.errors import InvalidSetting

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s|m|h)?")
_NO_TIME = re.compile(r"0+(\.0*)?\s*(ms|s|m|h)?")
_LONGEST_S = 365 * 86400.0  # what waits cannot count much longer
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def kept_url(url: str | None) -> str | None:
    """Return the URL of a database, unless nothing in it would be kept: for typer, as a callback.

    What else is wrong with it is said by who opens it.

    Raises:
        InvalidSetting: it is empty, or of a database in memory.
    """
    if url is None:
        return None
    if not url:
        raise InvalidSetting("a database URL is empty; name a database.")
    # Imported here: it takes long to load.
    from gemm_tuner.store.sql.database import is_in_memory  # noqa: PLC0415

    if is_in_memory(url):
        raise InvalidSetting(
            f"database URL {url} cannot be used: nothing would be kept of a database in memory; "
            "name a file, as sqlite:////folder/file.sqlite3."
        )
    return url


# Options, below the headings that the help of a command has.
of_layer = partial(typer.Option, rich_help_panel="The layer")
of_tuning = partial(typer.Option, rich_help_panel="How it is tuned")
of_several_rows = partial(typer.Option, rich_help_panel="Kernels for several numbers of rows")
of_fleet = partial(typer.Option, rich_help_panel="With the workers of a fleet")

# fmt: off
_COLUMNS_HELP = "Columns of y; for attention the number of keys, or a range as 1..4096"
_DEPTH_HELP = "Columns of x, which are summed over; for attention the size of a head"
Rows = Annotated[
    str, typer.Argument(metavar="M", help="Rows of x: a number, or a range as 1..512")]
Columns = Annotated[str, typer.Argument(metavar="N", help=_COLUMNS_HELP)]
Depth = Annotated[int, typer.Argument(metavar="K", help=_DEPTH_HELP)]
OptionalRows = Annotated[
    str | None, typer.Argument(metavar="M", help="Rows of x: a number, a range as 1..512, or a "
                               "list as 1,16,17..64")]
OptionalColumns = Annotated[str | None, typer.Argument(metavar="N", help=_COLUMNS_HELP)]
OptionalDepth = Annotated[int | None, typer.Argument(metavar="K", help=_DEPTH_HELP)]
Shapes = Annotated[
    Path | None, of_layer(metavar="FILE.csv", help="Read the layers from a file with the "
                              "columns name, m, n, k and, if needed, dtype, epilogue, w_layout, "
                              "reduction, operation, from")]
DTypeName = Annotated[
    str, of_layer("--dtype", help="Types of x, w and y, such as f32, bf16, int8, bf16_s4")]
EpilogueText = Annotated[
    str, of_layer("--epilogue", help="Steps after the product, such as bias+relu")]
LayoutName = Annotated[
    str, of_layer("--w-layout", help="How w is stored: nk as PyTorch's Linear, or kn")]
Groups = Annotated[
    str | None, of_layer("--groups", help="Quantised weights along k that share a scale: 32, "
                             "64, 128, or k for a whole column")]
ReductionName = Annotated[
    str, of_layer("--reduction", help="Order of additions: any, or fixed, for the same bits "
                      "from every kernel")]
OperationName = Annotated[
    str, of_layer("--operation", help="linear: w is constant; matmul: w comes with each "
                      "call; attention: softmax of q (M, K) by keys (N, K), times values")]
Threads = Annotated[int, of_tuning("--threads", help="Threads that share one call")]
RegimeName = Annotated[
    str, of_tuning("--regime", help="Weights in the caches (hot) or in memory (cold_weights)")]
RegimeChoice = Annotated[
    str, of_tuning("--regime", help="Weights in the caches (hot), in memory (cold_weights), or "
                      "both")]
Budget = Annotated[str, of_tuning("--budget", help="Longest time per layer, such as 30s or 2m")]
ModelBudget = Annotated[
    str, of_tuning("--budget", help="Longest time to tune all layers, such as 10m")]
Target = Annotated[
    str | None, of_tuning("--target", metavar="CPU", help="Choose and prove kernels for a CPU "
                             "that is not here, such as sapphire_rapids, without timing them")]
DatabaseUrl = Annotated[
    str | None, typer.Option("--db", envvar="GEMM_TUNER_DB", metavar="URL", callback=kept_url,
                             help="Database; by default SQLite in your data directory")]
Compiler = Annotated[
    str | None, of_tuning("--compiler", help="gcc, clang or zig; by default the first found")]
Again = Annotated[
    bool, of_tuning("--again", help="Measure anew what was tuned before")]
RankerFile = Annotated[
    Path | None, of_tuning("--ranker", metavar="FILE.json", help="For --strategy learned: what "
                              '"gemm-tuner model train" wrote')]
SchedulerAddress = Annotated[
    str | None, of_fleet("--scheduler", metavar="URL", help="Scheduler of a fleet: "
                             "tls://HOST:PORT, or tcp:// on this machine")]
TlsAuthority = Annotated[
    Path | None, of_fleet("--tls-ca", metavar="FILE", help="Certificate of the fleet's "
                              "authority, in PEM")]
TlsCertificate = Annotated[
    Path | None, of_fleet("--tls-cert", metavar="FILE", help="Certificate of this machine for "
                              "the fleet, in PEM")]
TlsKey = Annotated[
    Path | None, of_fleet("--tls-key", metavar="FILE", help="Its private key, in PEM")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the same facts as JSON")]
# fmt: on


def with_groups(w_layout: str, groups: str | None) -> str:
    """Return the weight layout meant by the options `--w-layout` and `--groups`: `nk:g128`."""
    return w_layout if groups is None else f"{w_layout}:g{groups}"


def parse_duration_s(text: str) -> float:
    """Return the seconds written as `30s`, `2m`, `500ms`, `1h` or `30`.

    Raises:
        InvalidSetting: `text` is not a positive duration, or longer than a year.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match["number"]) * _UNIT_S[match["unit"] or "s"] if match else 0.0
    if seconds <= 0:
        raise InvalidSetting(f"duration {text!r} is not understood; write it as '30s' or '2m'.")
    if seconds > _LONGEST_S:
        raise InvalidSetting(f"duration {text[:40]!r} is longer than a year; choose a shorter one.")
    return seconds


def parse_duration_or_none_s(text: str) -> float:
    """Return the seconds as `parse_duration_s` does, and 0.0 for `0` or `0s`: no time at all.

    Raises:
        InvalidSetting: `text` is not a duration.
    """
    return 0.0 if _NO_TIME.fullmatch(text) else parse_duration_s(text)


def parse_percent(name: str, percent: float) -> float:
    """Return the share meant by a number of percent, 0.02 for 2.

    Raises:
        InvalidSetting: it is not from 0 to below 100.
    """
    share = percent / 100
    if not 0 <= share < 1:
        raise InvalidSetting(f"{name} {percent:g} is out of range; use percent below 100, as 2.")
    return share


def execution_contexts(threads: int, regime: str) -> tuple[ExecutionContext, ...]:
    """Return the contexts meant by the options `--threads` and `--regime`."""
    return tuple(
        ExecutionContext(threads=threads, regime=chosen) for chosen in Regime.parse_choice(regime)
    )


def execution_context(threads: int, regime: str) -> ExecutionContext:
    """Return the one context meant by the options `--threads` and `--regime`.

    Raises:
        InvalidSetting: `regime` is not one regime.
    """
    return ExecutionContext(threads=threads, regime=Regime.parse_one(regime))
