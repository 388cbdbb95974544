"""Writing a bundle: its files follow from what is collected, byte by byte."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gemm_tuner.bundle.collect import BundledKernel, Missing
from gemm_tuner.bundle.place import ENCODING, SUMS, replacing
from gemm_tuner.client.lock import LOCK_FILE, LockedKernel, lock_text
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.printable import quoted
from gemm_tuner.domain.reason import speed_text
from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.resources import templates_dir
from gemm_tuner.trust.payload import SignedArtifact
from gemm_tuner.tuning.generator import generator_version

_FILES = Path(__file__).parent / "files"
_LICENCE = "The kernels, and what calls them, are generated or copied from gemm-tuner.\n"
_NAME_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What is called for some rows of a layer: a kernel, or none where a library was faster.

    `layout` counts the formats of packed weights of the layer.
    """

    layer_name: str
    low: int
    high: int
    operation: Operation
    kernel: BundledKernel | None = None
    layout: int = 0

    def facts(self) -> dict[str, object]:
        """Return what the files say of it."""
        facts: dict[str, object] = {
            "file": None,
            "layer": self.layer_name,
            "rows": Rows(low=self.low, high=self.high).text,
            "m_low": self.low,
            "m_high": self.high,
            "layout": self.layout,
            "features": "",
            "description": '""',
        }
        if self.kernel is None:
            return facts
        name, verdict = _name_of(self.kernel), self.kernel.verdict
        measured = verdict.measurement
        speed = (
            speed_text(measured.ratio, measured.baseline)
            if measured
            else "its speed is not known for these rows"
        )
        told = f"{verdict.decision.value}, {verdict.basis.text}: {speed}"
        return facts | {
            "file": f"{name}.so",
            "source_file": f"{name}.cpp",
            "features": " ".join(sorted(self.kernel.artifact.required_isa)),
            "description": json.dumps(self.kernel.description),
            "candidate": self.kernel.candidate.text,
            "verdict": quoted(told).replace("|", "\\|"),
        }


def _name_of(kernel: BundledKernel) -> str:
    return kernel.artifact.sha256[:_NAME_CHARACTERS]


def write_bundle(
    folder: Path,
    kernels: Sequence[BundledKernel],
    missing: Sequence[Missing],
    *,
    cpu: Cpu,
    context: ExecutionContext,
) -> int:
    """Write a bundle, whole or not at all, in the place of an older one; return its size in bytes.

    Raises:
        InvalidSetting: there is no kernel, the folder holds something else than a bundle, or it
            cannot be written.
    """
    if not kernels:
        raise InvalidSetting("a bundle needs a kernel, and none is served for these layers.")
    with replacing(folder) as made:
        _write_files(made, kernels, missing, cpu=cpu, context=context)
        return _open_to_all(made)


def _open_to_all(made: Path) -> int:
    """Let others read a bundle, whatever the umask, and nobody write; return its size in bytes."""
    size_bytes = 0
    for path in (made, *made.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        size_bytes += 0 if path.is_dir() else path.stat().st_size
    return size_bytes


def _write_files(
    made: Path,
    kernels: Sequence[BundledKernel],
    missing: Sequence[Missing],
    *,
    cpu: Cpu,
    context: ExecutionContext,
) -> None:
    rows = tuple(_rows(kernels, missing))
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
        "missing": sorted((one.problem.text, quoted(one.reason)) for one in missing),
        "version": generator_version(),
        "cpu": cpu.exact_key,
        "context": f"threads {context.threads}, {context.regime.value}",
    }
    for path in sorted(_FILES.iterdir()):
        if path.suffix == ".j2":
            text = environment.get_template(path.name).render(facts)
            (made / path.stem).write_text(text, ENCODING)
        else:
            shutil.copyfile(path, made / path.name)
    shutil.copyfile(templates_dir() / "abi" / "gemm_tuner.h", made / "gemm_tuner.h")
    (made / "LICENSE").write_text(_licence(), ENCODING)
    (made / "kernels").mkdir()
    for kernel in kernels:
        name = made / "kernels" / _name_of(kernel)
        name.with_suffix(".so").write_bytes(kernel.binary)
        name.with_suffix(".cpp").write_text(kernel.source_text, ENCODING)
    (made / LOCK_FILE).write_text(lock_text([_locked(kernel) for kernel in kernels]), ENCODING)
    sums = _sums(made)
    lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    (made / SUMS).write_text(lines, ENCODING)


def _rows(kernels: Sequence[BundledKernel], missing: Sequence[Missing]) -> Iterator[_Row]:
    """Yield what is called, layer by layer, for the fewest numbers of rows first.

    A kernel for a range says nothing of a number of rows in it at which a library was faster. What
    a range without a kernel was timed at is its greatest number.
    """
    formats: dict[str, list[str]] = {}
    rows = []
    for kernel in sorted(kernels, key=lambda one: one.problem.text):
        m, known = kernel.problem.m, formats.setdefault(kernel.layer_name, [])
        if kernel.packed_format not in known:
            known.append(kernel.packed_format)
        layout = known.index(kernel.packed_format)
        name = kernel.layer_name
        rows.append(
            _Row(
                layer_name=name,
                low=m.low,
                high=m.high,
                operation=kernel.problem.operation,
                kernel=kernel,
                layout=layout,
            )
        )
    for one in missing:
        if one.layer_name in formats:
            high = one.problem.m.high
            rows.append(
                _Row(
                    layer_name=one.layer_name,
                    low=high,
                    high=high,
                    operation=one.problem.operation,
                )
            )

    def place(row: _Row) -> tuple[str, int, int, bool]:
        return row.layer_name, row.high - row.low, row.low, row.kernel is None

    yield from sorted(rows, key=place)


def _layers(rows: Sequence[_Row]) -> list[dict[str, object]]:
    layers: list[dict[str, object]] = []
    first = 0
    for name, each in groupby(rows, key=lambda row: row.layer_name):
        of_layer = list(each)
        layouts = 1 + max(row.layout for row in of_layer)
        layers.append(
            {
                "name": name,
                "first_kernel": first,
                "kernels": len(of_layer),
                "layouts": layouts,
                "packs_ahead": of_layer[0].operation.packs_ahead,
            }
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
    text = found[0].read_text(ENCODING) if found else ""
    return f"{_LICENCE}\n{text}" if text else _LICENCE
