"""TLS: the handshake is part of the connection, with the same deadline and bound."""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.files import open_plain

# asyncio keeps 256 KiB for each connection to read into; a record of TLS has at most 16.
SSLProtocol.max_size = 2**14


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A chain of certificates in PEM, and the file with its private key."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Return what a server needs to speak TLS 1.2 or newer.

        Raises:
            InvalidSetting: the certificate or its key cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            for file in (self.certificate, self.key):
                open_plain(file).close()  # OpenSSL would wait for a pipe
            # A password is not asked for: nobody may be there to type it.
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:
            raise InvalidSetting(
                f"certificate {self.certificate} and key {self.key} cannot be used "
                f"({error.strerror or error}); name a PEM chain and its unencrypted key."
            ) from None
        return context


class SecuredTransport(asyncio.Transport):
    """TLS and the transport below it as one: what either of them holds is unsent.

    It closes as a transport without TLS does: what is unsent is sent, and what else the caller
    sends, the end of TLS among it, is not waited for.
    """

    def __init__(self, secured: asyncio.Transport, raw: asyncio.Transport) -> None:
        super().__init__()
        self._secured = secured
        self._raw = raw
        # TLS holds only what the transport below has no room for, so any of it is too much.
        secured.set_write_buffer_limits(high=1)

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return what is known of the connection."""
        return self._secured.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """Return how many bytes are unsent."""
        return self._secured.get_write_buffer_size() + self._raw.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send some bytes, now or later."""
        self._secured.write(data)

    def pause_reading(self) -> None:
        """Take nothing from the caller for now."""
        self._secured.pause_reading()

    def resume_reading(self) -> None:
        """Take what comes again."""
        self._secured.resume_reading()

    def is_closing(self) -> bool:
        """Return whether nothing more is read or written."""
        return self._secured.is_closing() or self._raw.is_closing()

    def close(self) -> None:
        """Send what is unsent and the end of TLS, and close the connection."""
        if not self._secured.is_closing():  # asyncio forgets a transport that is closed twice
            self._secured.close()
        self._raw.close()

    def abort(self) -> None:
        """Close the connection at once, whatever is unsent."""
        self._raw.abort()


class Handshake(asyncio.Protocol):
    """A connection until its TLS handshake is done; then `make` takes it over.

    `begun` and `ended` are called with it when it begins to wait for its caller, and when that
    is over. When the connection is closed, `flush_s` is left for what is unsent.
    """

    unsent_bytes = 0

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        timeout_s: float,
        flush_s: float,
        make: Callable[[], asyncio.Protocol],
        begun: Callable[["Handshake"], None],
        ended: Callable[["Handshake"], None],
    ) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._flush_s = flush_s
        self._make = make
        self._begun = begun
        self._ended = ended
        self._early = bytearray()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # what comes is read by TLS, not here
        self._transport = transport
        self._begun(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    def data_received(self, data: bytes) -> None:
        """Keep what came with the last part of the handshake."""
        self._early += data

    def abort(self) -> None:
        """Close the connection at once."""
        self._ended(self)
        if self._transport is not None:
            self._transport.abort()
            self._transport = self._task = None

    shutdown = abort  # as uvicorn calls it at its end

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=self._flush_s,
            )
        except OSError:  # no TLS, too slow, or gone
            self.abort()
            return
        self._ended(self)
        if secured is None or secured.is_closing():
            transport.abort()
            return
        protocol = self._make()
        secured.set_protocol(protocol)
        protocol.connection_made(SecuredTransport(secured, transport))
        if self._early:
            protocol.data_received(bytes(self._early))
