"""The ZeroMQ sockets on which an engine publishes its KV events, and repeats those that were missed.

Nothing here waits: ZeroMQ has its own threads, which connect, reconnect, and queue what comes.
"""

import zmq

from extproc.config.node import KvEvents
from extproc.engines.kvevents import LAST, MAX_MESSAGE_BYTES

_MOST_QUEUED = 500
"""Messages that wait to be read: 10 s of steps, 2 GB at the worst. What is dropped then shows as a gap."""
_MOST_REPEATED = 10_000
"""The same of those asked for: the engine sends all it keeps at once, and drops what finds no room."""
_HEARTBEAT_MS, _DEAD_MS = 1_000, 3_000
_MOST_PAUSE_MS = 2_000
_SUBSCRIBED_FRAMES = (3,)
_REPEATED_FRAMES = (3, 4)
"""vLLM 0.32 repeats the topic too, which earlier releases leave out."""

Frames = tuple[bytes, bytes]
"""A message's number and its payload."""


class KvSockets:
    """Of one engine. Connects at once, or whenever the engine is there; `close` it."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", events: KvEvents) -> None:
        self._context = context
        self._events = events
        self._feed = self._open(zmq.SUB, events.endpoint, _MOST_QUEUED)
        self._feed.set(zmq.SUBSCRIBE, events.topic.encode())
        self._replay: zmq.Socket[bytes] | None = None

    @property
    def can_replay(self) -> bool:
        """Whether missed messages can be asked for."""
        return self._events.replay_endpoint is not None

    def receive(self) -> Frames | None:
        """The next message of the feed, or `None` while there is none; empty frames for one that is none."""
        return _read(self._feed, _SUBSCRIBED_FRAMES)

    def ask(self, number: int) -> None:
        """Ask for all messages from a number on that the engine still has; what is still to come is void."""
        self.hush()
        assert self._events.replay_endpoint is not None
        self._replay = self._open(zmq.DEALER, self._events.replay_endpoint, _MOST_REPEATED)
        self._replay.send_multipart((b"", number.to_bytes(8, "big")), zmq.NOBLOCK)

    def repeated(self) -> Frames | None:
        """The next message asked for, as `receive`; the last has the number `LAST`."""
        if self._replay is None:
            return LAST, b""
        return _read(self._replay, _REPEATED_FRAMES)

    def hush(self) -> None:
        """Ask no more."""
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None

    def close(self) -> None:
        """Harmless when repeated."""
        self.hush()
        self._feed.close(linger=0)

    def _open(self, kind: int, endpoint: str, most: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.RCVHWM, most)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RECONNECT_IVL_MAX, _MOST_PAUSE_MS)
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS)
        socket.connect(endpoint)
        return socket


def _read(socket: "zmq.Socket[bytes]", counts: tuple[int, ...]) -> Frames | None:
    """All kinds of messages end with a number and a payload."""
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return (frames[-2], frames[-1]) if len(frames) in counts else (b"", b"")
