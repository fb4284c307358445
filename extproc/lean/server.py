"""The listening socket of the lean transport: connections made, ticked, drained and closed."""

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any, Final, cast

from extproc.accesslog import AccessLog
from extproc.calls import PROCESS, STREAM_LOGS, BindError, ExtProc, LogCall, Open
from extproc.config import HostPort, ListenerTls
from extproc.lean.connection import Connection

TICK_S: Final = 1.0
MOST_CONNECTIONS: Final = 1_024
STALLED_TICKS: Final = 30
"""A peer that reads nothing for so long is let go."""
UNSENT_BYTES: Final = 1 << 20
"""Past it no more is read from the peer, until it reads."""
MESSAGE_SLACK_BYTES: Final = 2 << 20
"""Over the largest body: headers, and the megabyte below which Envoy enforces no limit."""
_CLOSE_LIMIT_S: Final = 1.0


class LeanServer:
    """The listening server: `start`, then `stop`."""

    def __init__(self, extproc: ExtProc, access_log: AccessLog) -> None:
        self.services: dict[str, Open] = {PROCESS: extproc.open, STREAM_LOGS: lambda _: LogCall(access_log)}
        self.peers: set[_Peer] = set()
        self.empty = asyncio.Event()
        """Set while there is no peer."""
        self.empty.set()
        self._extproc = extproc
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None

    async def start(self, address: Path | HostPort, tls: ListenerTls | None = None) -> None:
        """Listen on a Unix socket or on host and port. Raises `BindError`."""
        loop = asyncio.get_running_loop()
        context = _context(tls) if tls else None
        try:
            if isinstance(address, Path):
                await asyncio.to_thread(address.parent.mkdir, parents=True, exist_ok=True)
                self._server = await loop.create_unix_server(self._peer, str(address), ssl=context)
                await asyncio.to_thread(address.chmod, 0o660)
            else:
                self._server = await loop.create_server(self._peer, address.host, address.port, ssl=context)
        except OSError as error:
            raise BindError(f"cannot listen on {address}: is another `inferact` running?") from error
        self._ticking = loop.call_later(TICK_S, self._tick)

    async def stop(self, grace_s: float) -> None:
        """Take no new stream, give the running exchanges `grace_s` seconds to end; may be repeated."""
        if self._server is not None:
            self._server.close()
        for peer in self.peers:
            peer.connection.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._extproc.idle.wait()
        except TimeoutError:
            pass
        finally:
            if self._ticking is not None:
                self._ticking.cancel()
            for peer in tuple(self.peers):
                peer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await self.empty.wait()
        for peer in tuple(self.peers):
            peer.abort()

    def largest_bytes(self) -> int:
        """Of a message."""
        return self._extproc.limits.body_bytes + MESSAGE_SLACK_BYTES

    def _peer(self) -> "_Peer":
        return _Peer(self)

    def _tick(self) -> None:
        for peer in list(self.peers):
            peer.tick()
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)


class _Peer(asyncio.BufferedProtocol):
    """A socket and its connection."""

    connection: Connection
    _transport: asyncio.Transport

    def __init__(self, server: LeanServer) -> None:
        self._server = server
        self._stalled_ticks: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._server.peers) >= MOST_CONNECTIONS:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(UNSENT_BYTES)
        self.connection = Connection(self._server.services, self._transport.write, self._server.largest_bytes)
        self._server.peers.add(self)
        self._server.empty.clear()

    def get_buffer(self, _: int) -> memoryview:
        return self.connection.room()

    def buffer_updated(self, count: int) -> None:
        self.connection.received(count)
        if self.connection.over:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if self in self._server.peers:
            self._server.peers.discard(self)
            self.connection.lost()
        if not self._server.peers:
            self._server.empty.set()

    def pause_writing(self) -> None:
        self._stalled_ticks = 0
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled_ticks = None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def tick(self) -> None:
        """Let go of peers that do not read, or do not begin."""
        self.connection.tick()
        if self._stalled_ticks is not None:
            self._stalled_ticks += 1
            if self._stalled_ticks > STALLED_TICKS:
                self._transport.abort()
        if self.connection.over:
            self._transport.close()

    def close(self) -> None:
        """Say so, and close when all is sent."""
        self.connection.close()
        self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()


def _context(tls: ListenerTls) -> ssl.SSLContext:
    """Mutual TLS, HTTP/2 alone."""
    context: Any = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tls.ca_file))
    context.load_cert_chain(tls.cert_file, tls.key_file)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return cast(ssl.SSLContext, context)
