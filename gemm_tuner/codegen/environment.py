"""The jinja2 environment in which kernels are rendered."""

from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from gemm_tuner.resources import templates_dir

_PACKAGE = Path(__file__).parents[1]
_TABLES = (
    _PACKAGE / "domain" / "dtype.py",
    _PACKAGE / "domain" / "epilogue.py",
    _PACKAGE / "domain" / "micro_kernel.py",
    _PACKAGE / "domain" / "packed_format.py",
    _PACKAGE / "domain" / "step_table.py",
    _PACKAGE / "space" / "catalog.py",
)


@cache
def environment() -> SandboxedEnvironment:
    """Return the environment: sandboxed, strict about names, reading the package's templates."""
    return SandboxedEnvironment(
        loader=FileSystemLoader(templates_dir()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


@cache
def generator_version() -> str:
    """Return what identifies the generator: the package's version and a digest of what it is.

    That is the templates, the modules that fill them in, the tables of types, families and steps,
    and the names of packed formats.
    """
    digest = sha256()
    for root, files in (
        (templates_dir(), _files(templates_dir(), {".j2", ".h"})),
        (_PACKAGE, [*_files(_PACKAGE / "codegen", {".py"}), *_TABLES]),
    ):
        for path in files:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return f"gemm-tuner {version('gemm-tuner')}+{digest.hexdigest()[:12]}"


def _files(folder: Path, suffixes: set[str]) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
