"""Writing a bundle: its files follow from the kernels alone, byte by byte."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gemm_tuner.bundle.collect import BundledKernel, Missing
from gemm_tuner.client.lock import LOCK_FILE, LockedKernel, write_lock
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.reason import speed_text
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.resources import templates_dir
from gemm_tuner.trust.payload import SignedArtifact
from gemm_tuner.tuning.generator import generator_version

_FILES = Path(__file__).parent / "files"
_LICENCE = "The kernels, and what calls them, are generated or copied from gemm-tuner.\n"
_SUMS = "SHA256SUMS"
_NAME_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A kernel as the table has it: `layout` counts the formats of packed weights of its layer."""

    kernel: BundledKernel
    layout: int

    def facts(self) -> dict[str, object]:
        """Return what the files say of it."""
        kernel, problem = self.kernel, self.kernel.problem
        name = kernel.artifact.sha256[:_NAME_CHARACTERS]
        measured = kernel.verdict.measurement
        speed = (
            speed_text(measured.ratio, measured.baseline)
            if measured
            else "its speed is not known for these rows"
        )
        return {
            "file": f"{name}.so",
            "source_file": f"{name}.cpp",
            "layer": kernel.layer_name,
            "rows": problem.m.text,
            "m_low": problem.m.low,
            "m_high": problem.m.high,
            "layout": self.layout,
            "features": " ".join(sorted(kernel.artifact.required_isa)),
            "description": json.dumps(kernel.description),
            "candidate": kernel.candidate.text,
            "verdict": f"{kernel.verdict.decision.value}, {speed}",
        }


def write_bundle(
    folder: Path,
    kernels: Sequence[BundledKernel],
    missing: Sequence[Missing],
    *,
    cpu: Cpu,
    context: ExecutionContext,
) -> None:
    """Write a bundle, whole or not at all, in the place of an older one if there is one.

    Raises:
        InvalidSetting: there is no kernel, the folder holds something else than a bundle, or it
            cannot be written.
    """
    if not kernels:
        raise InvalidSetting("a bundle needs a kernel, and none is served for these layers.")
    check_place(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _not_written(folder, error) from None
    try:
        _write_files(made, kernels, missing, cpu=cpu, context=context)
        made.chmod(0o755)
        _put_in_place(made, folder)
    except OSError as error:
        raise _not_written(folder, error) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def check_place(folder: Path) -> None:
    """Check that a folder is new, empty, or an older bundle.

    Raises:
        InvalidSetting: it is something else.
    """
    try:
        is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        is_bundle = folder.is_dir() and (folder / "gemm_tuner_bundle.h").is_file()
    except OSError as error:
        raise _not_written(folder, error) from None
    if folder.is_symlink() or not (is_new or is_bundle):
        raise InvalidSetting(
            f"{folder} is no bundle, and is not replaced by one; name a new or an empty folder."
        )


def _not_written(folder: Path, error: OSError) -> InvalidSetting:
    return InvalidSetting(
        f"the bundle {folder} cannot be written ({error.strerror}); name another folder."
    )


def _put_in_place(made: Path, folder: Path) -> None:
    """Move a new bundle to its place; what was there is there until then."""
    if folder.exists():
        former = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            folder.rename(former / "bundle")
            made.rename(folder)
        finally:
            if not folder.exists():
                (former / "bundle").rename(folder)
            shutil.rmtree(former, ignore_errors=True)
    else:
        made.rename(folder)


def _write_files(
    made: Path,
    kernels: Sequence[BundledKernel],
    missing: Sequence[Missing],
    *,
    cpu: Cpu,
    context: ExecutionContext,
) -> None:
    rows = tuple(_rows(kernels))
    environment = Environment(
        loader=FileSystemLoader(_FILES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - C and Markdown, of text that was parsed
    )
    facts = {
        "kernels": [row.facts() for row in rows],
        "layers": _layers(rows),
        "missing": [(one.problem.text, one.reason) for one in missing],
        "version": generator_version(),
        "cpu": cpu.exact_key,
        "context": f"threads {context.threads}, {context.regime.value}",
    }
    for path in sorted(_FILES.iterdir()):
        if path.suffix == ".j2":
            text = environment.get_template(path.name).render(facts)
            (made / path.stem).write_text(text)
        else:
            shutil.copyfile(path, made / path.name)
    shutil.copyfile(templates_dir() / "abi" / "gemm_tuner.h", made / "gemm_tuner.h")
    (made / "LICENSE").write_text(_licence())
    (made / "kernels").mkdir()
    for row in rows:
        name = row.kernel.artifact.sha256[:_NAME_CHARACTERS]
        (made / "kernels" / f"{name}.so").write_bytes(row.kernel.binary)
        (made / "kernels" / f"{name}.cpp").write_text(row.kernel.source_text)
    write_lock(made / LOCK_FILE, [_locked(kernel) for kernel in kernels])
    sums = _sums(made)
    (made / _SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))


def _rows(kernels: Iterable[BundledKernel]) -> Iterable[_Row]:
    """Yield kernels layer by layer, those for the fewest numbers of rows first."""

    def place(kernel: BundledKernel) -> tuple[str, int, int]:
        rows = kernel.problem.m
        return kernel.layer_name, rows.high - rows.low, rows.low

    for _layer, each in groupby(sorted(kernels, key=place), key=lambda one: one.layer_name):
        of_layer = list(each)
        formats = list(dict.fromkeys(kernel.packed_format for kernel in of_layer))
        for kernel in of_layer:
            yield _Row(kernel=kernel, layout=formats.index(kernel.packed_format))


def _layers(rows: Sequence[_Row]) -> list[dict[str, object]]:
    layers: list[dict[str, object]] = []
    first = 0
    for name, each in groupby(rows, key=lambda row: row.kernel.layer_name):
        of_layer = list(each)
        layouts = 1 + max(row.layout for row in of_layer)
        layers.append(
            {"name": name, "first_kernel": first, "kernels": len(of_layer), "layouts": layouts}
        )
        first += len(of_layer)
    return layers


def _locked(kernel: BundledKernel) -> LockedKernel:
    verdict, artifact = kernel.verdict, kernel.artifact
    return LockedKernel(
        problem=verdict.problem.text,
        cpu_key=verdict.cpu_key,
        threads=verdict.context.threads,
        regime=verdict.context.regime,
        decision=verdict.decision,
        basis=verdict.basis,
        complete=verdict.complete,
        candidate=kernel.candidate.text,
        artifact=SignedArtifact(
            sha256=artifact.sha256,
            size_bytes=artifact.size_bytes,
            abi_version=artifact.abi_version,
            required_isa=tuple(sorted(artifact.required_isa)),
            toolchain=artifact.toolchain,
            source_sha256=artifact.source_sha256,
        ),
        key_id=verdict.attested_by or "",
    )


def _sums(made: Path) -> Mapping[str, str]:
    files = sorted(path for path in made.rglob("*") if path.is_file())
    return {
        path.relative_to(made).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files
    }


def _licence() -> str:
    from importlib.metadata import files  # noqa: PLC0415 - looks through the installed package

    found = [path for path in files("gemm-tuner") or () if path.name == "LICENSE"]
    text = found[0].read_text() if found else ""
    return f"{_LICENCE}\n{text}" if text else _LICENCE
