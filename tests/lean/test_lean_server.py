"""The lean server over real sockets: peers that do not read, and too many of them."""

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from accesslog_entries import Watched
from exchanges import Bench
from hpack import Encoder
from lean_peer import ACK, ECHO, PREFACE, Echo, grpc, raw, request

from extproc.accesslog import AccessLog
from extproc.calls import ExtProc
from extproc.exchange import Limits
from extproc.lean import server as lean
from extproc.lean.server import LeanServer

WIDE_OPEN = raw(4, 0, 0, b"\0\4\x3f\xff\xff\xff") + raw(8, 0, 0, (1 << 30).to_bytes(4))


@pytest.fixture
async def listening(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[LeanServer, Path]]:
    monkeypatch.setattr(lean, "TICK_S", 0.01)
    bench = Bench()
    extproc = ExtProc(bench.admission, bench.telemetry, Limits(30.0, 64 << 20))
    server = LeanServer(extproc, AccessLog(bench.router, bench.telemetry, extproc.exchanges, Watched()))
    server.services[ECHO] = lambda ready: Echo(ready, {"begun": 0, "ended": 0})
    path = Path(tempfile.gettempdir()) / f"inferact-{uuid.uuid4().hex}.sock"
    await server.start(path)
    yield server, path
    await server.stop(0)
    path.unlink(missing_ok=True)


async def until_empty(server: LeanServer) -> None:
    async with asyncio.timeout(10):
        await server.empty.wait()


async def test_a_peer_that_does_not_read_is_not_read_and_then_let_go(
    listening: tuple[LeanServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, path = listening
    monkeypatch.setattr(lean, "UNSENT_BYTES", 1_000)
    _, writer = await asyncio.open_unix_connection(str(path), limit=1)  # reads next to nothing
    encoder = Encoder()
    encoder.header_table_size = 0
    writer.write(PREFACE + WIDE_OPEN + ACK + raw(1, 4, 1, encoder.encode(request(ECHO))))
    sent = 0
    with pytest.raises((ConnectionError, TimeoutError)):
        async with asyncio.timeout(10):
            while sent < 64 << 20:
                writer.write(raw(0, 0, 1, grpc(bytes(16_000))))
                await writer.drain()
                sent += 16_000
    assert sent < 8 << 20
    await until_empty(server)
    writer.close()


async def test_connections_past_the_limit_are_closed_at_once(
    listening: tuple[LeanServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, path = listening
    monkeypatch.setattr(lean, "MOST_CONNECTIONS", 1)
    reader, first = await asyncio.open_unix_connection(str(path))
    assert await reader.readexactly(9)
    refused, second = await asyncio.open_unix_connection(str(path))
    with pytest.raises(ConnectionError):
        if not await refused.read(1):
            raise ConnectionError
    second.close()
    assert len(server.peers) == 1
    first.close()
    await until_empty(server)


async def test_a_peer_that_says_nothing_is_let_go(listening: tuple[LeanServer, Path]) -> None:
    server, path = listening
    reader, writer = await asyncio.open_unix_connection(str(path))
    async with asyncio.timeout(10):
        assert (await reader.read())[-17:-8] == b"\0\0\x08\7\0\0\0\0\0"  # a GOAWAY is the last
    await until_empty(server)
    writer.close()
