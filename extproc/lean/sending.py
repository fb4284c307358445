"""The way out: replies as frames, no more of them than the peer's windows allow (RFC 9113, 5.2)."""

from collections.abc import Callable, Collection
from typing import Final

from extproc.lean import frames, headers
from extproc.lean.frames import Code, Kind, PeerError, Setting
from extproc.lean.stream import PREFIX_BYTES, Stream

_END: Final = frames.END_HEADERS | frames.END_STREAM


class Sender:
    """Collects what is to be written until `flush`; `on_sent` is told of streams that have sent all."""

    def __init__(self, write: Callable[[bytes], None], on_sent: Callable[[Stream], None]) -> None:
        self._write, self._on_sent = write, on_sent
        self.unsent_bytes = 0
        self._out: list[bytes] = []
        self._window = self.stream_window = frames.DEFAULT_WINDOW
        self._largest_frame = frames.LARGEST_FRAME

    def put(self, *data: bytes) -> None:
        """Frames that no window holds back."""
        self._out += data

    def flush(self) -> None:
        """Write all at once."""
        if self._out:
            out, self._out = self._out, []
            self._write(b"".join(out))

    def reply(self, stream: Stream, message: bytes) -> None:
        """One message."""
        if not stream.answered:
            stream.answered = True
            self.put(frames.frame(Kind.HEADERS, frames.END_HEADERS, stream.id, headers.RESPONSE))
        size = PREFIX_BYTES + len(message)
        prefix = b"\0" + len(message).to_bytes(4)
        if stream.unsent or size > min(self._window, stream.send_window, self._largest_frame):
            stream.unsent += prefix + message
            self.unsent_bytes += size
            self._send_unsent(stream)
            return
        self._window -= size
        stream.send_window -= size
        self.put(frames.HEADER.pack(size >> 8, size & 0xFF, Kind.DATA, 0, stream.id), prefix, message)

    def end(self, stream: Stream, trailers: bytes) -> None:
        """The stream ends with this header block, after what is unsent."""
        stream.trailers = trailers
        self._send_unsent(stream)

    def drop(self, stream: Stream) -> None:
        """The stream is over: nobody reads the rest."""
        self.unsent_bytes -= len(stream.unsent)
        stream.unsent.clear()

    def settle(self, values: dict[int, int], streams: Collection[Stream]) -> None:
        """What the peer's SETTINGS say of it. Raises `PeerError`."""
        self._largest_frame = values.get(Setting.MAX_FRAME_SIZE, self._largest_frame)
        window = values.get(Setting.INITIAL_WINDOW_SIZE, self.stream_window)
        increment, self.stream_window = window - self.stream_window, window
        for stream in tuple(streams) if increment else ():
            self.widen(stream, increment)

    def widen(self, stream: Stream, increment: int) -> None:
        """The window of a stream grows, or shrinks. Raises `PeerError`."""
        stream.send_window = _widened(stream.send_window, increment)
        self._send_unsent(stream)

    def widen_all(self, increment: int, streams: Collection[Stream]) -> None:
        """The window of the connection grows. Raises `PeerError`."""
        self._window = _widened(self._window, increment)
        for stream in [one for one in streams if one.unsent]:
            self._send_unsent(stream)

    def _send_unsent(self, stream: Stream) -> None:
        """As much as frames and windows allow."""
        while stream.unsent:
            size = min(len(stream.unsent), self._window, stream.send_window, self._largest_frame)
            if size <= 0:
                return
            self.put(frames.frame(Kind.DATA, 0, stream.id, bytes(stream.unsent[:size])))
            del stream.unsent[:size]
            self.unsent_bytes -= size
            self._window -= size
            stream.send_window -= size
        if stream.trailers is not None:
            block = stream.trailers if stream.answered else headers.RESPONSE + stream.trailers
            self.put(frames.frame(Kind.HEADERS, _END, stream.id, block))
            if not stream.said_all:
                self.put(frames.reset(stream.id, Code.NO_ERROR))
            self._on_sent(stream)


def _widened(window: int, increment: int) -> int:
    if window + increment > frames.LARGEST_WINDOW:
        raise PeerError(Code.FLOW_CONTROL_ERROR, "a window overflows")
    return window + increment
