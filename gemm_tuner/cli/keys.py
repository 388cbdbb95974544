"""`gemm-tuner keys`: whose answers a client believes."""

from typing import Annotated

import typer

from gemm_tuner.cli import options
from gemm_tuner.cli.output import print_json, print_line
from gemm_tuner.client.client import TIMEOUT_S
from gemm_tuner.client.keys import KnownKeys, parse_keys
from gemm_tuner.client.transport import Address, connect
from gemm_tuner.errors import SignatureInvalid

keys = typer.Typer(help="Say whose answers to believe", no_args_is_help=False)

Url = Annotated[str, typer.Argument(metavar="URL", help="Address of a service")]


@keys.command("list", help="Print the keys that are remembered of each service")
def list_command(as_json: options.AsJson = False) -> None:
    """Print the keys that are remembered of each service."""
    known = {url: sorted(found) for url, found in KnownKeys().all().items()}
    if as_json:
        print_json(known)
        return
    for url, key_ids in sorted(known.items()):
        print_line(f"{url} {' '.join(key_ids)}")


@keys.command("accept", help="Believe a service from now on, by the key that it shows")
def accept_command(
    url: Url,
    key_id: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY_ID", help="Accept no other; the service prints it at its start"
        ),
    ] = None,
) -> None:
    """Believe a service from now on, by the key that it shows."""
    address = Address.parse(url)
    with connect(address, TIMEOUT_S) as session:
        shown = parse_keys(session.keys())
    if key_id is not None and key_id not in shown:
        raise SignatureInvalid(
            f"{address.url} shows the key {', '.join(shown)}, not {key_id}; "
            "nothing was accepted: check the address and the key id."
        )
    accepted = shown if key_id is None else {key_id: shown[key_id]}
    known = KnownKeys()
    before = known.of(address.url) or {}
    known.replace(address.url, accepted)
    dropped = ", ".join(each for each in before if each not in accepted)
    instead = f" instead of {dropped}" if dropped else ""
    print_line(f"{address.url} is believed by the key {', '.join(accepted)}{instead}.")
    if key_id is None:
        print_line('Compare it with what "gemm-tuner serve" printed there.')


@keys.command("forget", help="Forget the keys of a service")
def forget_command(url: Url) -> None:
    """Forget the keys of a service; exit with 1 if there were none."""
    if not KnownKeys().forget(Address.parse(url).url):
        print_line("No key of it was remembered.")
        raise typer.Exit(1)
