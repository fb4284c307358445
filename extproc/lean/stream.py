"""One stream of a connection: what has come of a message, and what of the replies is still to go."""

from collections.abc import Callable
from typing import Final

from extproc.calls import Call
from extproc.exchange import ProtocolError

PREFIX_BYTES: Final = 5
"""Before each message: whether it is compressed, and its length in four bytes."""


class Stream:
    """State of a stream that is open or half closed."""

    __slots__ = (
        "_end", "answered", "call", "id", "partial", "said_all", "send_window", "trailers", "unsent", "used",
    )  # fmt: skip

    def __init__(self, stream_id: int, send_window: int, said_all: bool) -> None:
        self.id = stream_id
        self.call: Call | None = None
        """`None` once it is over, and only what it said is left to send."""
        self.used = 0
        """Of the peer's window, as `Connection` counts it."""
        self.send_window = send_window
        self.said_all = said_all
        """The peer has ended its half."""
        self.answered = False
        """The headers of the answer are sent."""
        self.partial = bytearray()
        """Of a message, with its prefix: the rest has not come."""
        self.unsent = bytearray()
        """Of messages, with their prefixes: the peer's windows are too small for it now."""
        self._end = PREFIX_BYTES
        self.trailers: bytes | None = None
        """To be sent after the unsent."""

    def messages(self, data: memoryview, largest_bytes: Callable[[], int]) -> list[bytes]:
        """The messages that are complete now. Raises `ProtocolError`."""
        if not self.partial and len(data) >= PREFIX_BYTES:
            end = _end(data, largest_bytes())
            if len(data) == end:  # nearly always
                return [bytes(data[PREFIX_BYTES:])]
            self._end = end
        self.partial += data
        complete = []
        while len(self.partial) >= self._end:
            if self._end == PREFIX_BYTES:  # perhaps not known until now
                self._end = _end(self.partial, largest_bytes())
                if len(self.partial) < self._end:
                    break
            with memoryview(self.partial) as view:
                complete.append(bytes(view[PREFIX_BYTES : self._end]))
            del self.partial[: self._end]
            self._end = PREFIX_BYTES
        return complete


def _end(prefixed: memoryview | bytearray, largest_bytes: int) -> int:
    """Where the first message ends."""
    size = int.from_bytes(prefixed[1:PREFIX_BYTES])
    if prefixed[0] or size > largest_bytes:
        raise ProtocolError("a compressed message" if prefixed[0] else "a message that is too large")
    return PREFIX_BYTES + size
