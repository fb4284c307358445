"""One connection as a state machine: bytes in, bytes out. No socket, no clock, no task."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from extproc.calls import Open
from extproc.exchange import ProtocolError
from extproc.lean import frames, headers
from extproc.lean.frames import Code, Kind, PeerError, Setting
from extproc.lean.sending import Sender
from extproc.lean.stream import Stream

logger = logging.getLogger(__name__)

MOST_STREAMS: Final = 4_096
"""At once; Envoy opens another connection past it (and past 1,024 by its own default)."""
STREAM_WINDOW: Final = 1 << 20
CONNECTION_WINDOW: Final = 16 << 20
"""Messages are taken as they come, so windows limit what is under way, not what is kept."""
MOST_KEPT_BYTES: Final = 1 << 30
"""Of messages and replies that are not complete, in all streams together."""
MOST_UNREAD_BYTES: Final = 1 << 16
"""A peer that asks more while it has more than this to read is refused."""
MOST_IDLE_FRAMES: Final = 10_000
"""Frames between two ticks that bring no message on."""
SETTINGS_WEIGHT: Final = 100
"""As many idle frames are SETTINGS, which may change the windows of all streams."""
TICKS_TO_SETTLE: Final = 10
READ_BYTES: Final = 1 << 18
"""At once: so frames are read where they arrive, and what is copied is messages."""

_GREETING: Final = frames.settings(
    {
        Setting.HEADER_TABLE_SIZE: 0,
        Setting.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
        Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        Setting.MAX_HEADER_LIST_SIZE: headers.LARGEST_BLOCK,
    }
) + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
_SETTINGS_READ: Final = frames.frame(Kind.SETTINGS, frames.ACK, 0)
_DRAIN: Final = b"draining"
_OK, _UNKNOWN, _INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _UNIMPLEMENTED = 0, 2, 3, 8, 12
"""gRPC's statuses."""
_FINISHED: Final = headers.trailers(_OK)


class Connection:
    """The server's side; `services` begin calls by path, `write` takes bytes for the peer.

    `largest_bytes` tells the largest message that is taken now.
    """

    def __init__(
        self, services: Mapping[str, Open], write: Callable[[bytes], None], largest_bytes: Callable[[], int]
    ) -> None:
        self.over = False
        """Nothing more is read or written: the socket may be closed once all is sent."""
        self._services, self._largest_bytes = services, largest_bytes
        self._sender = Sender(write, self._forget)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._filled = 0
        self._greeted = self._settled = self._acknowledged = self._peer_leaves = self._no_more = False
        self._streams: dict[int, Stream] = {}
        self._last_id = self._served_id = 0
        """The highest that came, and that was not refused."""
        self._headers = headers.HeaderReader()
        self._block = bytearray()
        self._block_of: tuple[int, int] | None = None
        """Stream and flags of a HEADERS frame whose block goes on in CONTINUATION frames."""
        self._used = 0
        """Of the connection's window, which is opened again as soon as half of it is used."""
        self._partial_bytes = self._idle_frames = self._ticks = 0
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            Kind.HEADERS: self._on_headers,
            Kind.RST_STREAM: self._on_reset,
            Kind.SETTINGS: self._on_settings,
            Kind.PING: self._on_ping,
            Kind.GOAWAY: self._on_go_away,
            Kind.WINDOW_UPDATE: self._on_window_update,
            Kind.CONTINUATION: self._on_continuation,
        }
        self._sender.put(_GREETING)
        self._sender.flush()

    def room(self) -> memoryview:
        """Where bytes of the peer's may be put; then `received`."""
        return self._buffer[self._filled :]

    def received(self, count: int) -> None:
        """So many bytes came from the peer; all that they give rise to is written at once."""
        if self.over:
            return
        end = self._filled + count
        try:
            read = self._read(self._buffer[:end])
        except PeerError as error:
            self._fail(error)
            read = end
        self._filled = end - read
        self._buffer[: self._filled] = self._buffer[read:end]
        self.over |= self._peer_leaves and not self._streams
        self._sender.flush()

    def tick(self) -> None:
        """To be called about once a second: so many idle frames may come meanwhile."""
        self._idle_frames = 0
        self._ticks += 1
        if self._ticks > TICKS_TO_SETTLE and not self._acknowledged and not self.over:
            self._fail(PeerError(Code.SETTINGS_TIMEOUT, "our SETTINGS were not acknowledged"))
            self._sender.flush()

    def drain(self) -> None:
        """Tell the peer to open no more streams; those under way are still served (RFC 9113, 6.8)."""
        if not self.over:
            self._sender.put(frames.go_away(frames.LARGEST_WINDOW, Code.NO_ERROR))
            self._sender.put(frames.frame(Kind.PING, 0, 0, _DRAIN))
            self._sender.flush()

    def close(self) -> None:
        """End all streams, properly those that have a last reply, and the connection."""
        if self.over:
            return
        for stream in list(self._streams.values()):
            last = stream.call.finish() if stream.call else None
            if last is not None:
                self._sender.reply(stream, last)
                self._end(stream)
            else:
                self._sender.put(frames.reset(stream.id, Code.CANCEL))
        self._sender.put(frames.go_away(self._served_id, Code.NO_ERROR))
        self.lost()
        self._sender.flush()

    def lost(self) -> None:
        """The peer is gone."""
        self.over = True
        for stream in list(self._streams.values()):
            self._forget(stream)

    # What comes.

    def _read(self, data: memoryview) -> int:
        """Read whole frames; the number of their bytes."""
        at, end, header = 0, len(data), frames.HEADER
        if not self._greeted:
            if data[: len(frames.PREFACE)] != frames.PREFACE[:end]:
                raise PeerError(Code.PROTOCOL_ERROR, "this is not HTTP/2")
            if end < len(frames.PREFACE):
                return 0
            self._greeted, at = True, len(frames.PREFACE)
        while end - at >= header.size and not self.over:
            high, low, kind, flags, stream_id = header.unpack_from(data, at)
            size = high << 8 | low
            if size > frames.LARGEST_FRAME:
                raise PeerError(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            begin = at + header.size
            if begin + size > end:
                break
            at = begin + size
            self._on_frame(kind, flags, stream_id & frames.LARGEST_WINDOW, data[begin:at])
        return at

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        if kind == Kind.DATA and self._settled and self._block_of is None:
            self._on_data(flags, stream_id, payload)
            return
        if self._block_of is not None and kind != Kind.CONTINUATION:
            raise PeerError(Code.PROTOCOL_ERROR, "a header block was cut short")
        if not self._settled and kind != Kind.SETTINGS:
            raise PeerError(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        frames.check(kind, stream_id, len(payload))
        if kind != Kind.HEADERS:
            self._idle(1)
        handler = self._handlers.get(kind)
        if handler is not None:  # PRIORITY and extensions are ignored
            handler(flags, stream_id, bytes(payload))

    def _on_data(self, flags: int, stream_id: int, payload: memoryview) -> None:
        size = len(payload)
        self._used += size
        if self._used > CONNECTION_WINDOW // 2:
            self._sender.put(frames.window_update(0, self._used))
            self._used = 0
        stream = self._streams.get(stream_id)
        if stream is None or stream.said_all:
            self._idle(1)
            self._must_have_been(stream_id)
            self._sender.put(frames.reset(stream_id, Code.STREAM_CLOSED))  # we may have ended it just now
            if stream is not None:
                self._forget(stream)
            return
        stream.used += size
        if flags & frames.PADDED:
            payload = frames.content(flags, payload)
        if payload:
            self._take(stream, payload)
        elif not flags & frames.END_STREAM:
            self._idle(1)
        if flags & frames.END_STREAM:
            stream.said_all = True
            self._finish(stream)
        elif stream.used > STREAM_WINDOW // 2 and stream.call is not None:
            self._sender.put(frames.window_update(stream_id, stream.used))
            stream.used = 0

    def _take(self, stream: Stream, payload: memoryview) -> None:
        """Hand complete messages to the stream's call."""
        if stream.call is None:
            return
        before = len(stream.partial)
        try:
            messages = stream.messages(payload, self._largest_bytes)
        except ProtocolError as error:
            self._end(stream, _INVALID_ARGUMENT, str(error))
            return
        finally:
            self._partial_bytes += len(stream.partial) - before
        kept_bytes = self._partial_bytes + self._sender.unsent_bytes
        if kept_bytes > MOST_KEPT_BYTES or len(stream.unsent) > MOST_UNREAD_BYTES:
            self._end(stream, _RESOURCE_EXHAUSTED, "too much is kept for this Envoy")
        for message in messages:
            if stream.call is not None:
                self._ask(stream, stream.call.receive, message)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = frames.content(flags, payload, frames.PRIORITIZED)
        if flags & frames.END_HEADERS:
            self._on_block(flags, stream_id, block)
        else:
            self._block_of = flags, stream_id
            self._block[:] = block

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block_of is None or self._block_of[1] != stream_id:
            raise PeerError(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._block += payload
        if len(self._block) > headers.LARGEST_BLOCK:
            raise PeerError(Code.ENHANCE_YOUR_CALM, "a header block that is too large")
        if flags & frames.END_HEADERS:
            first, self._block_of = self._block_of, None
            self._on_block(*first, bytes(self._block))

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        said_all = bool(flags & frames.END_STREAM)
        if stream_id <= self._last_id or not stream_id & 1:
            raise PeerError(Code.PROTOCOL_ERROR, "HEADERS that begin no stream")
        self._last_id = stream_id
        path = self._headers.path(block)
        if self._no_more or len(self._streams) >= MOST_STREAMS:
            self._idle(1)
            self._sender.put(frames.reset(stream_id, Code.REFUSED_STREAM))
            return
        self._served_id = stream_id
        stream = Stream(stream_id, self._sender.stream_window, said_all)
        self._streams[stream_id] = stream
        service = self._services.get(path)
        if service is None or said_all:
            self._idle(1)
        if service is None:
            self._end(stream, _UNIMPLEMENTED, "no such method")
            return
        stream.call = service(partial(self._resume, stream))
        if said_all:
            self._finish(stream)

    def _on_reset(self, _: int, stream_id: int, __: bytes) -> None:
        self._must_have_been(stream_id)
        if stream_id in self._streams:
            self._forget(self._streams[stream_id])

    def _on_settings(self, flags: int, _: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                raise PeerError(Code.FRAME_SIZE_ERROR, "an acknowledgement with content")
            if not self._acknowledged:
                self._acknowledged = True
                self._headers.without_table()
            return
        self._idle(SETTINGS_WEIGHT)
        self._settled = True
        self._sender.put(_SETTINGS_READ)
        self._sender.settle(frames.read_settings(payload), self._streams.values())

    def _on_ping(self, flags: int, _: int, payload: bytes) -> None:
        if not flags & frames.ACK:
            self._sender.put(frames.frame(Kind.PING, frames.ACK, 0, payload))
        elif payload == _DRAIN and not self._no_more:  # what the peer sent before it knew is here
            self._no_more = True
            self._sender.put(frames.go_away(self._served_id, Code.NO_ERROR))

    def _on_go_away(self, *_: object) -> None:
        self._peer_leaves = True

    def _on_window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        increment = int.from_bytes(payload) & frames.LARGEST_WINDOW
        if not increment:
            raise PeerError(Code.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
        if not stream_id:
            self._sender.widen_all(increment, self._streams.values())
            return
        self._must_have_been(stream_id)
        if stream_id in self._streams:
            self._sender.widen(self._streams[stream_id], increment)

    def _must_have_been(self, stream_id: int) -> None:
        if not stream_id & 1 or stream_id > self._last_id:
            raise PeerError(Code.PROTOCOL_ERROR, "a frame of a stream that was never open")

    def _idle(self, weight: int) -> None:
        self._idle_frames += weight
        if self._idle_frames > MOST_IDLE_FRAMES:
            raise PeerError(Code.ENHANCE_YOUR_CALM, "too many frames that bring no message on")

    # What calls say, and what goes out.

    def _resume(self, stream: Stream) -> None:
        """The call of a stream may have come to a reply."""
        if stream.call is not None:
            self._ask(stream, stream.call.resume)
            self._sender.flush()

    def _ask(self, stream: Stream, ask: Callable[..., bytes | None], *message: bytes) -> None:
        try:
            reply = ask(*message)
        except ProtocolError as error:
            logger.warning("ext_proc stream refused: %s", error)
            self._end(stream, _INVALID_ARGUMENT, str(error))
        except Exception:
            logger.exception("an ext_proc stream failed")
            self._end(stream, _UNKNOWN, "internal error")
        else:
            if reply is not None:
                self._sender.reply(stream, reply)

    def _finish(self, stream: Stream) -> None:
        """The peer has said all: so do we."""
        if stream.call is not None:
            last = stream.call.finish()
            if last is not None:
                self._sender.reply(stream, last)
            self._end(stream)

    def _end(self, stream: Stream, status: int = _OK, message: str = "") -> None:
        """The call is over; its status goes out after what is unsent."""
        self._over(stream)
        self._sender.end(stream, headers.trailers(status, message) if status else _FINISHED)

    def _forget(self, stream: Stream) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._partial_bytes -= len(stream.partial)
            self._sender.drop(stream)
        self._over(stream)

    def _over(self, stream: Stream) -> None:
        call, stream.call = stream.call, None
        if call is not None:
            call.end()

    def _fail(self, error: PeerError) -> None:
        logger.warning("a connection of Envoy's is closed: %s", error)
        self._sender.put(frames.go_away(self._served_id, error.code))
        self.lost()
