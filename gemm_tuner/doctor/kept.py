"""Checks of what is kept: the database, the keys, and the space for more."""

import shutil
import stat
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryFile

from gemm_tuner.domain.check import Check, Figure, Level
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.store.maintenance.examining import Examination, examine_database
from gemm_tuner.store.sql.database import database_file
from gemm_tuner.trust.attestation import MeasuringKeys
from gemm_tuner.trust.key_id import key_id_of
from gemm_tuner.trust.keys import KeyPair, default_key_path
from gemm_tuner.trust.ownership import check_owned

_ROWS_OF_EACH = 200
_SHOWN_DAMAGES = 3
_NO_SPACE_BYTES = 64 << 20
_LITTLE_SPACE_BYTES = 1 << 30
# What this version of the package was written in: no clock is right that says less.
_WRITTEN = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
_MAY_DIFFER = timedelta(hours=1)  # of machines that write to one database
_SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies"})


def check_store(url: str, shown: str, cpu: Cpu) -> tuple[Check, Examination | None]:
    """Say what is in the database, and whether the last rows of its tables are whole.

    `shown` is the URL without passwords.
    """
    name = "database"
    try:
        found = examine_database(url, cpu_key=cpu.exact_key, rows_of_each=_ROWS_OF_EACH)
        file = database_file(url)
        if found is not None and file is not None:
            check_owned(file, is_database=True)
    except (StoreFailed, InvalidSetting) as error:
        return Check.of_error(name, Level.PROBLEM, error), None
    if found is None:
        seen = f"there is none yet at {shown}; the first sweep makes it"
        return Check(name=name, level=Level.OK, seen=seen), None
    return _check_examined(name, shown, found), found


def _check_examined(name: str, shown: str, found: Examination) -> Check:
    figures: dict[str, Figure] = {"url": shown, "revision": found.revision}
    contents = found.contents
    if contents is None and found.is_known:
        seen = f"{shown}: an older schema, {found.revision}"
        advice = "any command that writes brings it up to date; older versions cannot read it then"
        return Check(name=name, level=Level.NOTE, seen=seen, advice=advice, figures=figures)
    if contents is None:
        return Check(
            name=name,
            level=Level.PROBLEM,
            seen=f"{shown}: the schema {found.revision!r}, which this version does not know",
            advice="update gemm-tuner, or name another with --db or GEMM_TUNER_DB",
            figures=figures,
        )
    sample = contents.sample
    figures |= {
        "problems": contents.problems,
        "trials": contents.trials,
        "verdicts_here": contents.verdicts_here,
        "rows_checked": sample.rows,
        "damages": len(sample.damages),
    }
    seen = (
        f"{shown}: schema {found.revision}; problems: {contents.problems}, trials: "
        f"{contents.trials}, verdicts for this CPU: {contents.verdicts_here}; {sample.rows} of the "
        "last rows "
    )
    if sample.damages:
        seen += f"checked, {len(sample.damages)} damaged: "
        seen += "; ".join(sample.damages[:_SHOWN_DAMAGES])
        advice = '"gemm-tuner db check" finds all damage; restore the database from a backup'
        return Check(name=name, level=Level.PROBLEM, seen=seen, advice=advice, figures=figures)
    return Check(name=name, level=Level.OK, seen=f"{seen}are whole", figures=figures)


def check_keys(folder: Path, signing_key: Path | None = None) -> Check:
    """Say which keys this user has, and whether others could read or change them."""
    name = "keys"
    signing_key = signing_key or default_key_path()
    try:
        mode = stat.S_IMODE(folder.stat().st_mode)
    except FileNotFoundError:
        seen = f"none yet: {folder} is made when the first trial is attested"
        return Check(name=name, level=Level.OK, seen=seen)
    except OSError as error:
        seen = f"{folder} cannot be read ({error.strerror})"
        advice = "make it yours, or name another by XDG_DATA_HOME: trials are attested with its key"
        return Check(name=name, level=Level.PROBLEM, seen=seen, advice=advice)
    measuring = MeasuringKeys(folder)
    try:
        own, accepted = measuring.own(), measuring.accepted()
        signing = _signing_key_id(signing_key)
    except (InvalidSetting, StoreFailed) as error:
        return Check.of_error(name, Level.PROBLEM, error)
    parts = [
        f"{folder} has the mode {mode:04o}",
        f"measuring key {key_id_of(bytes.fromhex(own))}" if own else "no measuring key yet",
        f"keys of others that are believed: {len(accepted)}",
    ]
    if signing:
        parts.append(f"signing key {signing}")
    figures: dict[str, Figure] = {
        "folder": str(folder),
        "mode": f"{mode:04o}",
        "accepted": len(accepted),
    }
    return Check(name=name, level=Level.OK, seen="; ".join(parts), figures=figures)


def _signing_key_id(path: Path) -> str | None:
    if not path.exists():
        return None
    check_owned(path)
    return KeyPair.load_or_create(path).key_id


def check_space(places: Mapping[str, Path]) -> Check:
    """Say how much space there is for what each place is for, and whether it can be written."""
    name, parts, advice, level = "space", [], [], Level.OK
    figures: dict[str, Figure] = {}
    for purpose, path in places.items():
        folder = _nearest(path)
        free = shutil.disk_usage(folder).free
        figures[f"{purpose}_free_bytes"] = free
        parts.append(f"{free / 2**30:.1f} GiB for the {purpose} ({path})")
        if why_not := _why_not_writable(folder):
            level = Level.PROBLEM
            advice.append(f"make {folder} writable for the {purpose} ({why_not})")
        elif free < _LITTLE_SPACE_BYTES:
            is_full = free < _NO_SPACE_BYTES
            level = Level.PROBLEM if is_full or level is Level.PROBLEM else Level.NOTE
            advice.append(f"free some space for the {purpose}")
    return Check(
        name=name,
        level=level,
        seen=f"free: {', '.join(parts)}",
        advice="; ".join(advice),
        figures=figures,
    )


def _nearest(path: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    return next(one for one in (path, *path.absolute().parents) if one.is_dir())


def _why_not_writable(folder: Path) -> str | None:
    """Return why no file can be made in a folder, None if one can."""
    try:
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def check_time(now: datetime, newest: datetime | None, source: str | None) -> Check:
    """Say whether the machine's clock can be right, and whether it is read quickly.

    `newest` is when the last trial of the database was made; `source` is what Linux reads.
    """
    name = "time"
    figures = {"now": now.isoformat(timespec="seconds"), "clock_source": source}
    text = f"it is {now:%Y-%m-%d %H:%M} UTC"
    is_before_trial = newest is not None and now + _MAY_DIFFER < newest
    if is_before_trial or now < _WRITTEN:
        before = "the newest trial in the database" if is_before_trial else "this version"
        return Check(
            name=name,
            level=Level.PROBLEM,
            seen=f"{text}, before {before}",
            advice="set the clock (timedatectl set-ntp true): signed answers expire by it",
            figures=figures,
        )
    if source is None:
        return Check(
            name=name,
            level=Level.NOTE,
            seen=f"{text}; not known: which counter the clock is read from",
            figures=figures,
        )
    if source in _SLOW_CLOCKS:
        return Check(
            name=name,
            level=Level.NOTE,
            seen=f"{text}; the clock is read from {source}, which takes microseconds",
            advice="look why Linux does not trust the tsc (dmesg names the reason)",
            figures=figures,
        )
    seen = f"{text}, which can be right; the clock is read from {source}"
    return Check(name=name, level=Level.OK, seen=seen, figures=figures)
