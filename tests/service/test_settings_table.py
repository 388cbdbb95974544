"""The table of settings in docs/service.md is that of the code."""

import re
from pathlib import Path

import typer
from gemm_tuner_service.bounds import MAX_UPLOAD_BYTES
from gemm_tuner_service.clients.peers import Proxies
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


def test_callers_of_the_proxy_of_the_manual_come_from_elsewhere() -> None:
    text = DOCUMENT.read_text()
    sample = text.partition("```nginx\n")[2].partition("```")[0]
    named = re.findall("--behind-proxy ([0-9.]+)", text.partition(sample)[2])
    sent = {"$host": "kernels.example", "$remote_addr": "203.0.113.7", "$scheme": "https"}
    headers = [
        (name.lower().encode(), sent[value].encode())
        for name, value in re.findall(r"proxy_set_header (\S+) (\S+);", sample)
    ]

    peer = Proxies.parse(named[:1]).peer_of(
        {"client": ("127.0.0.1", 1), "scheme": "http", "headers": headers}
    )

    assert (peer.name, peer.is_loopback, peer.is_private) == ("203.0.113.7", False, True)


def test_the_proxy_of_the_manual_hands_out_kernels_and_passes_on_the_rest() -> None:
    text = DOCUMENT.read_text()
    mirrored = re.findall(r'location ~ "(\S+)"', text)
    kernel = f"/v1/artifacts/sha256/{'0' * 64}"

    assert [bool(re.search(mirrored[0], path)) for path in (kernel, f"{kernel}/source")] == [
        True,
        False,
    ]
    assert re.search(r"error_page .*\b405\b.* = @service;", text)  # for PUT
    assert f"client_max_body_size {MAX_UPLOAD_BYTES // 2**20}m;" in text
