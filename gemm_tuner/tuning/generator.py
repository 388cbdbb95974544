"""The identity of the generator: all that decides the kernels a sweep tries, and their bytes.

The list of its modules is computed: everything that the search, the renderer and the compiler
import, however far.
"""

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from modulefinder import ModuleFinder
from opcode import opmap
from pathlib import Path
from types import CodeType

from gemm_tuner.resources import templates_dir

_PACKAGE = Path(__file__).parents[1]
_ROOTS = (
    "gemm_tuner.strategies.table",
    "gemm_tuner.codegen.render",
    "gemm_tuner.build.compile",
)
_IMPORTS = opmap["IMPORT_NAME"]


@cache
def generator_version() -> str:
    """Return the package's version and a digest of the generator.

    Where two are equal, so are the candidates of a problem, their sources and the flags of each
    compiler. Where they differ, a source may still be the same: see `standing`.
    """
    digest = generator_digest(_PACKAGE, templates_dir())
    return f"gemm-tuner {version('gemm-tuner')}+{digest[:12]}"


def generator_digest(package: Path, templates: Path) -> str:
    """Return the sha256 of the generator whose modules and templates are in these folders."""
    digest = sha256(version("jinja2").encode())
    for root, files in (
        (templates, [path for path in templates.rglob("*") if path.is_file()]),
        (package, generator_files(package)),
    ):
        for path in sorted(files):
            digest.update(b"\0" + path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()


def generator_files(package: Path) -> list[Path]:
    """Return the modules that the roots import, and the tables of data that lie beside them."""
    modules: set[Path] = set()
    waiting = [module for root in _ROOTS for module in _files_of(root, package)]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules.add(module)
            waiting += _imported(module, package)
    tables = {path for module in modules for path in module.parent.glob("*.csv")}
    return sorted(modules | tables)


def _imported(module: Path, package: Path) -> Iterator[Path]:
    """Yield the files of the package's modules that a module imports, wherever in it.

    They are read from its bytecode, which Python keeps. To make an ast.Module fails in CPython 3.11
    where another thread makes one (its issue 106905), as each traceback that it prints does.
    """
    finder = ModuleFinder()
    whole = SourceFileLoader(module.stem, str(module)).get_code(module.stem)
    waiting = [whole] if whole else []
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        if _IMPORTS not in code.co_code[::2]:
            continue
        for kind, found in finder.scan_opcodes(code):
            if kind == "absolute_import":
                attributes, name = found
                for imported in (name, *(f"{name}.{attribute}" for attribute in attributes or ())):
                    yield from _files_of(imported, package)


def _files_of(name: str, package: Path) -> list[Path]:
    """Return the file of a module of `package`, or those of a whole package within it."""
    top, *parts = name.split(".")
    if top != package.name or not parts:
        return []
    path = package.joinpath(*parts)
    module = path.with_suffix(".py")
    return [module] if module.is_file() else sorted(path.glob("*.py"))
