"""What was found of a model, in a folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gemm_tuner.bench.reproduce import KernelCall, write_call
from gemm_tuner.codegen.render import render
from gemm_tuner.errors import GemmTunerError, InvalidSetting, StoreFailed
from gemm_tuner.layers.sources import HasSources, Source
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.space.catalog import family_named
from gemm_tuner.torch.inductor.compiling import Watched

_INDEX, _GRAPHS, _KERNELS, _WRONG_CALL = "index.md", "graphs", "kernels", "wrong_call"


def checked_folder(folder: str | Path) -> Path:
    """Return the path of a folder that is new or empty.

    Raises:
        InvalidSetting: there is something, or it is no path.
        StoreFailed: it cannot be read.
    """
    path = Path(folder)
    if "\0" in str(path):
        raise InvalidSetting(f"folder {str(path)!r} is no path; give one without zero bytes.")
    try:
        is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    except OSError as error:
        raise _failed(path, error) from error
    if not is_free:
        raise InvalidSetting(f"folder {str(path)!r} is not empty; give a new one.")
    return path


def write_folder(
    folder: Path,
    text: str,
    *,
    kernels: Mapping[str, Kernel],
    sources: Sequence[Source],
    graphs: Watched,
    wrong_call: KernelCall | None,
) -> None:
    """Write what was found: `text` in words, graphs, the C++ of kernels, and a call that is wrong.

    Raises:
        StoreFailed: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["# Layers beside their exact results", "", "```text", text, "```", ""]
        if wrong_call is not None:
            lines += _write_wrong_call(wrong_call, sources, folder / _WRONG_CALL)
        lines += _write_kernels(kernels, sources, folder / _KERNELS)
        lines += _write_graphs(graphs, folder / _GRAPHS)
        (folder / _INDEX).write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise _failed(folder, error) from error


def _write_wrong_call(call: KernelCall, sources: Sequence[Source], folder: Path) -> list[str]:
    """Write a call that is wrong, and return what the index says of it."""
    write_call(call, folder)
    source = _write_source(call.kernel, sources, folder / "kernel.cpp")
    return [
        "## The first call that is wrong",
        "",
        f"`python {folder.name}/reproduce.py` makes it without PyTorch, and ends with exit code 1.",
        "Rows of x and w that do not matter are zero.",
        "",
        f"- problem: `{call.kernel.problem.text}`",
        f"- kernel: `{call.kernel.artifact.sha256}`, {source}",
        "",
    ]


def _write_kernels(
    kernels: Mapping[str, Kernel], sources: Sequence[Source], folder: Path
) -> list[str]:
    folder.mkdir()
    lines = ["## Kernels", ""]
    for sha256, kernel in kernels.items():
        source = _write_source(kernel, sources, folder / f"{sha256}.cpp")
        lines.append(f"- `{sha256}`, {source}: `{kernel!r}`. {kernel.reason}".rstrip())
    return [*lines, ""]


def _write_graphs(watched: Watched, folder: Path) -> list[str]:
    if not watched.graphs:
        return []
    folder.mkdir()
    for number, texts in enumerate(watched.graphs, 1):
        for when, graph in zip(("before", "after"), texts, strict=True):
            (folder / f"{number}_{when}.txt").write_text(graph + "\n")
    return [
        "## What was compiled",
        "",
        f"`{folder.name}` has each graph before and after the pass, which has seen these products:",
        "",
        *(f"- {one.text}" for one in watched.reports),
    ]


def _write_source(kernel: Kernel, sources: Sequence[Source], path: Path) -> str:
    """Write the C++ of a kernel, and return a link to it, or that it is not kept."""
    text = _source_text(kernel, sources)
    if text is None:
        return "whose C++ is not kept"
    path.write_text(text)
    return f"[C++]({path.parent.name}/{path.name})"


def _source_text(kernel: Kernel, sources: Sequence[Source]) -> str | None:
    try:
        family = family_named(kernel.candidate.micro_kernel.family)
        rendered = render(kernel.problem, kernel.candidate, family)
        if rendered.sha256 == kernel.artifact.source_sha256:
            return rendered.text
        kept = [
            one.source_text(kernel.artifact.sha256)
            for one in sources
            if isinstance(one, HasSources)
        ]
    except GemmTunerError:  # of an older generator, or damaged
        return None
    return next((one for one in kept if one is not None), None)


def _failed(folder: Path, error: OSError) -> StoreFailed:
    return StoreFailed(
        f"folder {str(folder)!r} cannot be written: {error.strerror}; give one that can be."
    )
