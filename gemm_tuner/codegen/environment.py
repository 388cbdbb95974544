"""The jinja2 environment in which kernels are rendered."""

from functools import cache
from hashlib import sha256
from importlib.metadata import version

from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from gemm_tuner.resources import templates_dir


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
    """Return what identifies the generator: the package's version and its templates' digest."""
    digest = sha256()
    folder = templates_dir()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in {".j2", ".h"}:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return f"gemm-tuner {version('gemm-tuner')}+{digest.hexdigest()[:12]}"
