"""From what a page says to its HTML, in which nothing that others wrote is more than text."""

from functools import cache
from importlib.metadata import version
from math import exp
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.types import Scope

from gemm_tuner.domain.access import Scope as Right
from gemm_tuner.domain.printable import harmless
from gemm_tuner.domain.units import bytes_text, context_text, duration_text, time_text
from gemm_tuner.domain.verdict import BASELINE_BELOW, TUNED_ABOVE
from gemm_tuner.store.tallies import RATIO_STEPS, RATIOS_PER_E
from gemm_tuner_service.clients.callers import Caller
from gemm_tuner_service.dashboard.pictures import BEING_DRAWN
from gemm_tuner_service.middleware.observing import CALLER

NONCE = "nonce"  # the member of the state of a request: what a style needs to be used

_FOLDER = Path(__file__).parent
_STYLE = "<style "


def render(scope: Scope, template: str, **values: Any) -> bytes:  # noqa: ANN401 - of a template
    """Return a page of HTML for the request of an ASGI scope."""
    caller: Caller | None = scope["state"].get(CALLER)
    rights = frozenset[Right]() if caller is None else caller.scopes
    nonce = scope["state"][NONCE]
    text = (
        _environment()
        .get_template(template)
        .render(
            path=scope["path"],
            rights={right.name.lower() for right in rights},
            signed_in=None if caller is None or caller.token_id is None else caller.name,
            picture=lambda svg: _picture(svg, nonce),
            **values,
        )
    )
    # What has no form in UTF-8 is spelled.
    return text.encode(errors="backslashreplace")


def compile_templates() -> None:
    """Compile all templates, which the first page that needs one would wait for."""
    for template in _environment().list_templates():
        _environment().get_template(template)


@cache
def style() -> bytes:
    """Return the style of all pages."""
    return (_FOLDER / "style.css").read_bytes()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        auto_reload=False,
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.globals |= {
        "being_drawn": BEING_DRAWN,
        "version": version("gemm-tuner"),
        "tuned_above": TUNED_ABOVE,
        "baseline_below": BASELINE_BELOW,
        "most_ratio": exp(RATIO_STEPS / RATIOS_PER_E),
    }
    environment.filters |= {
        "call_time": lambda time_ns: "" if time_ns is None else time_text(time_ns),
        "duration": lambda seconds: "" if seconds is None else duration_text(seconds),
        "context": context_text,
        "ratio": lambda ratio: "" if ratio is None else f"{ratio:.3f}",
        "share": lambda share: "" if share is None else f"{share:.1%}",
        "cache_size": lambda size_bytes: bytes_text(size_bytes) if size_bytes else "unknown",
        "moment": lambda at: f"{at:%Y-%m-%d}\N{NO-BREAK SPACE}{at:%H:%M} UTC",
        "figure_column": lambda name: f">{name}",
        "thousands": lambda number: f"{number:,}",
    }
    return environment


def _picture(svg: str, nonce: str) -> Markup:
    """Return a picture of `pictures.py`, whose texts are escaped, with a style that is used."""
    return Markup(svg.replace(_STYLE, f'{_STYLE}nonce="{nonce}" ', 1))  # noqa: S704 - ours


def _harmless(value: object) -> object:
    """Return what stands in the page: text of a database obeys nobody's terminal or reader."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return harmless(str(value)) if is_text else value
