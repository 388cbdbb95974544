"""Successions: from a believed key to the next, and to no other."""

from base64 import b64encode
from pathlib import Path

import pytest

from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.succession import (
    MAX_SUCCESSIONS,
    read_successions,
    rotate,
    succession_path,
    successors,
    unrevoked,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of a signing key."""
    path = tmp_path / "keys" / "signing-key.pem"
    KeyPair.load_or_create(path)
    return path


def by_id(*pairs: KeyPair) -> dict[str, bytes]:
    return {pair.key_id: pair.public_key for pair in pairs}


def test_a_new_key_takes_the_place_of_the_old_one_which_signs_it_over(path: Path) -> None:
    before = KeyPair.load_or_create(path)

    old, new = rotate(path, is_compromised=False)

    assert old.key_id == before.key_id
    assert KeyPair.load_or_create(path).key_id == new.key_id != old.key_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert successors(by_id(old), read_successions(path), ()) == by_id(new)


def test_successions_lead_over_several_keys_in_any_order(path: Path) -> None:
    first, second = rotate(path, is_compromised=False)
    _, third = rotate(path, is_compromised=False)
    found = read_successions(path)

    assert successors(by_id(first), found, ()) == by_id(second, third)
    assert successors(by_id(first), reversed(found), ()) == by_id(second, third)
    assert successors(by_id(third), found, ()) == {}


def test_a_revoked_key_leads_nowhere_and_is_led_to_by_none(path: Path) -> None:
    first, second = rotate(path, is_compromised=False)
    _, third = rotate(path, is_compromised=False)
    found = read_successions(path)

    assert successors(by_id(first), found, [first.key_id]) == {}
    assert successors(by_id(first), found, [second.key_id]) == {}
    assert successors(by_id(first), found, [third.key_id]) == by_id(second)
    assert unrevoked(found, [second.key_id]) == ()
    assert unrevoked(found, [third.key_id]) == found[:1]


def test_a_compromised_key_signs_nothing_over(path: Path) -> None:
    rotate(path, is_compromised=False)

    old, new = rotate(path, is_compromised=True)

    assert KeyPair.load_or_create(path).key_id == new.key_id
    assert read_successions(path) == ()
    assert successors(by_id(old), read_successions(path), ()) == {}


def test_what_another_signed_is_no_succession(path: Path, tmp_path: Path) -> None:
    thief = KeyPair.load_or_create(tmp_path / "thief.pem")
    old, _ = rotate(path, is_compromised=False)
    (genuine,) = read_successions(path)
    thiefs = b64encode(thief.public_key).decode()

    for forged in (
        genuine.model_copy(update={"successor": thiefs}),
        genuine.model_copy(update={"signature": "AAAA"}),
        genuine.model_copy(update={"signature": "not base64"}),
        genuine.model_copy(update={"predecessor": thiefs}),
        genuine.model_copy(update={"successor": "AAAA"}),
    ):
        assert successors(by_id(old), [forged], ()) == {}


def test_only_the_newest_successions_are_kept(path: Path) -> None:
    for _ in range(MAX_SUCCESSIONS + 1):
        rotate(path, is_compromised=False)

    assert len(read_successions(path)) == MAX_SUCCESSIONS


def test_a_damaged_file_of_successions_is_named(path: Path) -> None:
    succession_path(path).write_text("[{}]")

    with pytest.raises(InvalidSetting, match=r"successions\.json.* is damaged"):
        rotate(path, is_compromised=False)


def test_a_key_that_is_not_there_is_not_rotated(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="there is no signing key"):
        rotate(tmp_path / "none.pem", is_compromised=False)


def test_a_rotation_that_cannot_be_written_leaves_the_old_key(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = KeyPair.load_or_create(path).key_id

    def fail(_path: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gemm_tuner.trust.succession.write_privately", fail)

    with pytest.raises(StoreFailed, match="No space left"):
        rotate(path, is_compromised=False)
    assert KeyPair.load_or_create(path).key_id == before
    assert read_successions(path) == ()


def test_keys_in_one_folder_have_successions_of_their_own(tmp_path: Path) -> None:
    paths = [tmp_path / "keys" / name for name in ("service.one", "service.two")]
    for path in paths:
        KeyPair.load_or_create(path)

    rotate(paths[0], is_compromised=False)
    rotate(paths[1], is_compromised=True)

    assert [len(read_successions(path)) for path in paths] == [1, 0]


def test_successions_by_their_earlier_name_are_read_and_kept(path: Path) -> None:
    rotate(path, is_compromised=False)
    succession_path(path).rename(path.with_suffix(".successions.json"))
    assert len(read_successions(path)) == 1

    rotate(path, is_compromised=False)

    assert len(read_successions(path)) == 2
    assert succession_path(path).exists()
