"""One half of a kernel: compilers leave out what nothing calls, and take a third of the time."""

import re
from dataclasses import replace

from gemm_tuner.domain.source import Source

_BODY = r"(int32_t {name}\([^)]*\)\n\{{\n).*?\n\}}\n"

_SHARE = "const Share share = share_of(args->m, products, part, parts);"


def only_packing(source: Source) -> Source:
    """Return a kernel that packs weights, and refuses each call."""
    return _refusing(source, "gemm_tuner_run")


def only_calls(source: Source) -> Source:
    """Return a kernel that refuses to pack weights."""
    return _refusing(source, "gemm_tuner_pack_weights_part")


def only_one_part(source: Source) -> Source:
    """Return a kernel that computes all of y in each part, and refuses to pack weights.

    Its loops are what they were. What it lacks is how calls are cut.
    """
    calls = only_calls(source)
    text = calls.text.replace(_SHARE, "Share share{}; share.own = 1;")
    assert text != calls.text, f"the source lacks {_SHARE!r}"
    return replace(calls, text=text)


def _refusing(source: Source, name: str) -> Source:
    """Return a kernel with another body in one of its functions, all else as it was."""
    body = re.compile(_BODY.format(name=name), re.DOTALL)
    text, count = body.subn(r"\1    return GEMM_TUNER_BAD_ARGS;\n}\n", source.text)
    assert count == 1, f"{name} has {count} definitions"
    return replace(source, text=text)
