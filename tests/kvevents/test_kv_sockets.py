"""The sockets hold little of what nobody reads, and all of what they asked for."""

from collections.abc import Iterator

import pytest
import zmq

from extproc.config.node import KvEvents
from extproc.engines.kvsockets import KvSockets

Context = zmq.Context["zmq.Socket[bytes]"]
FEED, REPLAY = "inproc://feed", "inproc://replay"  # no network: what was sent is there
NUMBERS = [number.to_bytes(8, "big") for number in range(10_000)]
"""As many messages as vLLM keeps."""


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def engine(context: Context) -> "zmq.Socket[bytes]":
    return bound(context, zmq.XPUB, FEED)


@pytest.fixture
def sockets(context: Context, engine: "zmq.Socket[bytes]") -> KvSockets:
    return KvSockets(context, KvEvents.model_construct(endpoint=FEED, replay_endpoint=REPLAY, topic=""))


def bound(context: Context, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
    """An engine's socket that itself keeps next to nothing."""
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, 1)
    socket.set(zmq.RCVTIMEO, 20_000)
    socket.bind(endpoint)
    return socket


def test_of_a_feed_that_nobody_reads_little_is_kept(engine: "zmq.Socket[bytes]", sockets: KvSockets) -> None:
    assert engine.recv() == b"\x01", "it listens"
    for number in NUMBERS:
        engine.send_multipart((b"", number, b"payload"))
    kept = 0
    while sockets.receive() is not None:
        kept += 1
    assert 0 < kept < 1_000


def test_all_that_an_engine_repeats_at_once_is_kept(context: Context, sockets: KvSockets) -> None:
    engine = bound(context, zmq.ROUTER, REPLAY)
    sockets.ask(0)
    client, *asked = engine.recv_multipart()
    assert asked == [b"", bytes(8)]
    for number in NUMBERS:
        engine.send_multipart((client, b"", number, b"payload"))
    assert [sockets.repeated() for _ in NUMBERS] == [(number, b"payload") for number in NUMBERS]
