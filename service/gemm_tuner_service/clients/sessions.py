"""Sessions of browsers: what stands for a token in a cookie, so that the token itself does not.

A session names a token and ends after some hours. Its code is made with a key that follows from the
signing key, so each process of a service knows it, and nothing is stored. It is good for pages
alone, which change nothing.
"""

import hmac
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from http.cookies import CookieError, SimpleCookie

from gemm_tuner.domain.access import Token
from gemm_tuner.trust.keys import KeyPair

LIFETIME = timedelta(hours=12)

# A browser takes the second from https alone, for this host alone.
_NAME = "gemm-tuner-session"
_SECURE_NAME = f"__Host-{_NAME}"

_PURPOSE = b"gemm-tuner session 1"
_FORM = re.compile(r"([0-9a-f]{1,16})\.([0-9]{1,12})\.([0-9a-f]{64})")
_MAX_COOKIES = 4096


class Sessions:
    """Makes sessions, and says of which token one is."""

    def __init__(self, key_pair: KeyPair) -> None:
        self._key = hmac.digest(key_pair.mac_key, _PURPOSE, "sha256")

    def begin(self, token: Token, now: datetime) -> tuple[str, datetime]:
        """Return a new session of a token, and when it ends: no later than the token."""
        ends_at = min(filter(None, (now + LIFETIME, token.expires_at)))
        said = f"{token.id}.{int(ends_at.timestamp())}"
        return f"{said}.{self._code(said)}", ends_at

    def token_id_of(self, session: str, now: datetime) -> str | None:
        """Return the id of the token of a session, None if it ended or was made by others."""
        found = _FORM.fullmatch(session)
        if found is None:
            return None
        said, _dot, code = session.rpartition(".")
        is_ours = hmac.compare_digest(code, self._code(said))
        return found[1] if is_ours and now.timestamp() < int(found[2]) else None

    def _code(self, said: str) -> str:
        return hmac.digest(self._key, said.encode(), "sha256").hex()


def session_in(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the session in the cookies of a request, None if there is none."""
    sent = b"; ".join(value for name, value in headers if name == b"cookie")
    if not sent or len(sent) > _MAX_COOKIES:
        return None
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(sent.decode("latin-1"))
    except CookieError:
        return None
    found = cookies.get(_SECURE_NAME) or cookies.get(_NAME)
    return None if found is None else found.value


def cookie_of(session: str, *, ends_at: datetime, now: datetime, is_secure: bool) -> str:
    """Return the header that gives a browser a session; an empty one takes it away."""
    seconds = max(0, int((ends_at - now).total_seconds()))
    name = _SECURE_NAME if is_secure else _NAME
    secure = "; Secure" if is_secure else ""
    return f"{name}={session}; Max-Age={seconds}; Path=/; HttpOnly; SameSite=Strict{secure}"


def cookies_away() -> tuple[str, str]:
    """Return the headers that take a session from a browser."""
    now = datetime.now(UTC)
    return (
        cookie_of("", ends_at=now, now=now, is_secure=False),
        cookie_of("", ends_at=now, now=now, is_secure=True),
    )
