"""Who asks, and what they may: a token, a user of this machine, or nobody that is known."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from anyio import to_thread
from starlette.types import Scope as AsgiScope

from gemm_tuner.domain.access import Scope, Token, TokenSecret
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.tokens import Tokens
from gemm_tuner_service.clients.client_limits import ClientLimits
from gemm_tuner_service.clients.peers import Peer, Proxies
from gemm_tuner_service.clients.sessions import Sessions, session_in
from gemm_tuner_service.routing import SCOPES_OF_LOOPBACK, SCOPES_OF_SOCKET

TOKEN_KNOWN_S = 5.0  # a revoked token counts for so long in a service that just saw it
MAX_KNOWN_TOKENS = 1024

_GUESS_COST = 20  # a token that is not known costs a question to the database


class NotAuthenticated(Exception):
    """The caller has no token that counts; it is not said what is wrong with it."""


class SentInClearText(Exception):
    """A token came by a way on which others could read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: `key` names them for limits, `name` for logs and the audit log."""

    key: str
    name: str
    scopes: frozenset[Scope]
    token_id: str | None = None

    @property
    def owner(self) -> str:
        """Return whose it is what they contribute: a token's, or a user's."""
        return self.token_id or self.key


class Callers:
    """Finds out who asks. A token that was found is remembered for `TOKEN_KNOWN_S`."""

    def __init__(
        self,
        tokens: Tokens,
        proxies: Proxies,
        limits: ClientLimits,
        sessions: Sessions,
        *,
        now_s: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._tokens = tokens
        self._proxies = proxies
        self._limits = limits
        self._sessions = sessions
        self._now_s = now_s
        self._now = now
        self._known = OrderedDict[str, _Known]()

    def peer_of(self, scope: AsgiScope) -> Peer:
        """Return where a request comes from."""
        return self._proxies.peer_of(scope)

    async def identify(self, scope: AsgiScope, peer: Peer, *, is_page: bool = False) -> Caller:
        """Return who sent a request. For a page, a session stands for the token it was made with.

        Raises:
            NotAuthenticated: it has no token and needs one, or one that does not count.
            SentInClearText: it has a token that others could read on the way.
            TooManyRequests: this address tried too many tokens.
            StoreFailed: the database does not answer.
        """
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if sent:
            return _caller_with(await self.token_of(_bearer_in(sent), peer))
        token = await self._token_of_session(scope, peer) if is_page else None
        return _without_token(peer) if token is None else _caller_with(token)

    async def token_of(self, text: str, peer: Peer) -> Token:
        """Return the token whose secret a caller sent.

        Raises:
            NotAuthenticated: it does not count.
            SentInClearText: others could read it on the way.
            TooManyRequests: this address tried too many.
            StoreFailed: the database does not answer.
        """
        if not peer.is_private:
            raise SentInClearText
        try:
            digest = TokenSecret.parse(text).digest
        except InvalidSetting:
            raise NotAuthenticated from None
        token = self._remembered(digest)
        if token is None:
            self._limits.charge(peer.key, _GUESS_COST)
            token = await to_thread.run_sync(self._tokens.with_secret, digest)
            if token is None or not token.is_valid(self._now()):
                raise NotAuthenticated
            self._remember(digest, token)
        return token

    async def _token_of_session(self, scope: AsgiScope, peer: Peer) -> Token | None:
        """Return the token that the session of a browser was made with, None if none counts."""
        session = session_in(scope["headers"])
        token_id = None if session is None else self._sessions.token_id_of(session, self._now())
        if token_id is None:
            return None
        if not peer.is_private:
            raise SentInClearText
        key = f"session of {token_id}"
        token = self._remembered(key)
        if token is None:
            token = await to_thread.run_sync(self._tokens.with_id, token_id)
            if token is None or not token.is_valid(self._now()):
                return None
            self._remember(key, token)
        return token

    def _remembered(self, key: str) -> Token | None:
        known = self._known.get(key)
        if known is None:
            return None
        if self._now_s() >= known.until_s or not known.token.is_valid(self._now()):
            del self._known[key]
            return None
        return known.token

    def _remember(self, key: str, token: Token) -> None:
        self._known[key] = _Known(token=token, until_s=self._now_s() + TOKEN_KNOWN_S)
        if len(self._known) > MAX_KNOWN_TOKENS:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    token: Token = field(repr=False)
    until_s: float


def _without_token(peer: Peer) -> Caller:
    if peer.is_local_user:
        return Caller(key=peer.key, name=peer.name, scopes=SCOPES_OF_SOCKET)
    if peer.is_loopback:
        return Caller(key=peer.key, name=peer.name, scopes=SCOPES_OF_LOOPBACK)
    raise NotAuthenticated


def _caller_with(token: Token) -> Caller:
    return Caller(
        key=f"token {token.id}",
        name=f"token {token.id} ({token.name})",
        scopes=token.scopes,
        token_id=token.id,
    )


def _bearer_in(sent: list[bytes]) -> str:
    """Return what stands for a token in the header Authorization, empty if nothing does."""
    scheme, _space, text = sent[0].decode("latin-1").partition(" ")
    return text.strip() if len(sent) == 1 and scheme.lower() == "bearer" else ""
