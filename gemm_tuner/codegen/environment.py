"""The jinja2 environment in which kernels are rendered."""

from functools import cache

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
