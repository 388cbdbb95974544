"""The table of settings in docs/service.md is that of the code."""

import re
from pathlib import Path

import typer
from typer.core import TyperOption

from gemm_tuner.cli.serve import serve

DOCUMENT = Path(__file__).parents[2] / "docs" / "service.md"
DEPLOY = Path(__file__).parents[2] / "deploy"


def _options() -> list[TyperOption]:
    app = typer.Typer(add_completion=False)
    app.command()(serve)
    found = typer.main.get_command(app).params
    return [each for each in found if isinstance(each, TyperOption) and each.name != "help"]


def _row(option: TyperOption) -> str:
    default = {"None": "", "False": "off"}.get(str(option.default), str(option.default))
    return f"| `{option.envvar}` | `{option.opts[0]}` | {default} | {option.help} |"


def test_every_setting_is_in_the_table() -> None:
    rows = "\n".join(_row(option) for option in _options())

    assert f"\n{rows}\n" in DOCUMENT.read_text(), f"the table should be:\n{rows}"


def test_every_setting_has_a_variable_of_the_environment() -> None:
    names = [str(option.envvar) for option in _options()]

    assert len(set(names)) == len(names)
    assert all(re.fullmatch("GEMM_TUNER_[A-Z_]+", name) for name in names)


def test_what_is_deployed_names_settings_that_there_are() -> None:
    known = {option.envvar for option in _options()}

    for file in ("Containerfile", "gemm-tuner.service"):
        named = set(re.findall(r"GEMM_TUNER_[A-Z_]+", (DEPLOY / file).read_text()))
        assert named
        assert named <= known, file
