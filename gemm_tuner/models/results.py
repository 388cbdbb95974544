"""The file of results: what is finished is in it, whatever ends the process that measures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gemm_tuner.domain.model_run import ModelCase, ModelRun
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.files import behind_links, locked, read_bounded, written_whole
from gemm_tuner.models.measure import Plan, built_with, package_of

_FORMAT = 1
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    format: int
    runs: tuple[ModelRun, ...]


_CONTENTS: TypeAdapter[_Contents] = TypeAdapter(_Contents)


class Results:
    """Runs in a file, which is there as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        """Name the file; there may be none yet."""
        self._path = path

    def runs(self) -> tuple[ModelRun, ...]:
        """Return what is finished.

        Raises:
            InvalidSetting: the file cannot be read, or is none of results.
        """
        try:
            text = read_bounded(self._path, _MOST_BYTES)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._cannot("read", f"{error.strerror or error}") from error
        try:
            contents = _CONTENTS.validate_json(text, strict=False)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self._cannot(
                "read", f"it is no file of results ({where or 'it'}: {first['msg']})"
            ) from error
        if contents.format != _FORMAT:
            raise self._cannot("read", f"it has format {contents.format}, and not {_FORMAT}")
        return contents.runs

    def check(self) -> None:
        """Check that results can be kept, before a long measurement.

        Raises:
            InvalidSetting: the file or its folder cannot be read or written.
        """
        if not self._path.name:
            raise self._cannot("written", "it is a folder")
        if not self._path.parent.is_dir():
            raise self._cannot("written", f"there is no folder {self._path.parent}")
        self._write(self.runs)

    def add(self, run: ModelRun) -> None:
        """Keep a run, in the place of one of the same case.

        Raises:
            InvalidSetting: the file cannot be read or written.
        """
        self._write(lambda: (*(one for one in self.runs() if _place(one) != _place(run)), run))

    def _write(self, runs: Callable[[], Sequence[ModelRun]]) -> None:
        try:
            file = behind_links(self._path)
            with locked(file.with_name(f".{file.name}.lock")):
                contents = _Contents(format=_FORMAT, runs=tuple(runs()))
                text = _CONTENTS.dump_json(contents, indent=1) + b"\n"
                with written_whole(file) as whole:
                    whole.write(text)
        except OSError as error:
            raise self._cannot("written", f"{error.strerror or error}") from error

    def _cannot(self, verb: str, why: str) -> InvalidSetting:
        return InvalidSetting(
            f"file {self._path} cannot be {verb}: {why}; give another one by --out."
        )


def standing(runs: Sequence[ModelRun], case: ModelCase, plan: Plan) -> ModelRun | None:
    """Return the run of a case that stands: of the same ways, in the same versions, on this CPU.

    Versions are also those of the packages that make models; ways were asked as they are now.
    """
    asked = [(way.name, package_of(way) or "", dict(way.settings)) for way in plan.ways]
    for run in runs:
        if (
            run.case == case
            and run.conditions.cpu_key == plan.cpu.exact_key
            and run.rounds >= plan.rounds
            and run.conditions.built_with == built_with(case.dtype)
            and [(one.way, one.package, one.settings) for one in run.ways] == asked
        ):
            return run
    return None


def _place(run: ModelRun) -> tuple[object, ...]:
    """Return what no two runs of a file have in common."""
    return run.case, run.conditions.cpu_key, tuple(one.way for one in run.ways)
