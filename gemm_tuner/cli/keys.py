"""`gemm-tuner keys`: whose answers a client believes, and whose measurements a store serves."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.places import check_no_database
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message
from gemm_tuner.cli.tokens import actor_here
from gemm_tuner.client.cache import Cache, default_cache_dir
from gemm_tuner.client.client import TIMEOUT_S
from gemm_tuner.client.keys import KEYS_VARIABLE, KnownKeys, configured_keys, parse_keys
from gemm_tuner.client.transport import Address, Connections
from gemm_tuner.domain.canonical import identity
from gemm_tuner.errors import InvalidSetting, SignatureInvalid
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.attestation import MeasuringKeys
from gemm_tuner.trust.keys import KEY_VARIABLE, default_key_path
from gemm_tuner.trust.succession import present_key, rotate

keys = typer.Typer(
    help="Say which services, and whose measurements, to trust", no_args_is_help=False
)

Whom = Annotated[
    str, typer.Argument(metavar="URL|KEY", help="Address of a service, or a measuring key")
]


@keys.command("list", help="Print the keys that are trusted for each service")
def list_command(as_json: options.AsJson = False) -> None:
    """Print the keys that are remembered of each service."""
    pinned = configured_keys()
    known = {url: sorted(found) for url, found in KnownKeys().all().items()}
    if pinned is not None:
        known[f"{KEYS_VARIABLE}={os.environ[KEYS_VARIABLE]}"] = sorted(pinned)
    if as_json:
        print_json(known)
        return
    for url, key_ids in sorted(known.items()):
        print_line(f"{url} {' '.join(key_ids)}")
    if not known:
        print_message("No key of a service is trusted yet; see gemm-tuner keys accept --help.")


@keys.command("measuring", help="Print your measuring key, and those of others that are trusted")
def measuring_command(as_json: options.AsJson = False) -> None:
    """Print your measuring key, and those of others that are believed."""
    measuring = MeasuringKeys()
    own, accepted = measuring.own(), sorted(measuring.accepted())
    if as_json:
        print_json({"own": own, "accepted": accepted})
        return
    if own is not None:
        print_line(f"own {own}")
    for key in accepted:
        print_line(f"accepted {key}")


@keys.command("accept", help="Trust a service by the key that it shows, or a measuring key")
def accept_command(
    whom: Whom,
    key_id: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY_ID", help="Accept only this key; the service prints its id when it starts"
        ),
    ] = None,
) -> None:
    """Believe a service by the key that it shows, or who measures by theirs."""
    if _is_measuring_key(whom):
        if key_id is not None:
            raise InvalidSetting("a measuring key is whole as it is; leave out KEY_ID.")
        MeasuringKeys().accept(whom)
        print_line(f"What is attested with {whom} is served from now on.")
        return
    address = Address.parse(whom)
    shown = parse_keys(Connections(address).session(TIMEOUT_S).keys())
    if key_id is not None and key_id not in shown:
        raise SignatureInvalid(
            f"{address.url} shows the key {', '.join(shown)}, not {key_id}; "
            "nothing was accepted: check the address and the key id."
        )
    accepted = shown if key_id is None else {key_id: shown[key_id]}
    known = KnownKeys()
    before = known.of(address.url) or {}
    known.replace(address.url, accepted)
    # A service with a new key may have a new database, whose list begins anew.
    Cache(default_cache_dir()).forget_revocations(identity(address.url))
    dropped = ", ".join(each for each in before if each not in accepted)
    instead = f" instead of {dropped}" if dropped else ""
    print_line(f"{address.url} is believed by the key {', '.join(accepted)}{instead}.")
    if key_id is None:
        print_line('Compare it with what "gemm-tuner serve" printed there.')


@keys.command("forget", help="Forget the keys of a service, or a measuring key")
def forget_command(whom: Whom) -> None:
    """Forget the keys of a service, or a measuring key; exit with 1 if there were none."""
    if _is_measuring_key(whom):
        is_known = MeasuringKeys().forget(whom)
    else:
        is_known = KnownKeys().forget(Address.parse(whom).url)
    if not is_known:
        print_line("No key of it was remembered.")
        raise typer.Exit(1)


@keys.command("rotate", help="Replace the signing key of this user's service; the old one signs it")
def rotate_command(
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            envvar=KEY_VARIABLE,
            metavar="FILE",
            help="The signing key; by default in your data directory",
        ),
    ] = None,
    is_compromised: Annotated[
        bool,
        typer.Option(
            "--compromised",
            help="Others may have the old key: revoke it, and let it sign nothing; clients then "
            "have to accept the new one",
        ),
    ] = False,
    db: options.DatabaseUrl = None,
) -> None:
    """Replace the signing key of this user's service; the old one signs it."""
    path = key or default_key_path()
    check_no_database(path, [db])
    repository, now, actor = Repository(open_database(db)), datetime.now(UTC), actor_here()
    if is_compromised:
        # First: its id is known only while it is there, and a service with it must not start.
        stolen = present_key(path).key_id
        repository.revoke(stolen, reason="others may have it", actor=actor, now=now)
    old, new = rotate(path, is_compromised=is_compromised)
    repository.note_rotation(old.key_id, new.key_id, actor=actor, now=now)
    print_line(f"The signing key is {new.key_id} instead of {old.key_id}; restart the service.")
    if is_compromised:
        print_line(f'Clients must run "gemm-tuner keys accept URL {new.key_id}".')
    else:
        print_line("Clients that believe the old key will believe the new one.")


def _is_measuring_key(whom: str) -> bool:
    return ":" not in whom
