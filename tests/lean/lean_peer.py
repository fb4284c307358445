"""The other side of a lean connection, as a test writes it: frames, right or wrong, and what came back."""

import struct
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame, SettingsFrame

from extproc.exchange import ProtocolError
from extproc.lean.connection import Connection

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ECHO, LOG = "/test.Echo/Both", "/test.Log/In"
LARGEST_MESSAGE = 4 << 20
SETTINGS, ACK = b"\0\0\0\4\0\0\0\0\0", b"\0\0\0\4\1\0\0\0\0"


def raw(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """A frame, or what looks like one."""
    size = len(payload) if length is None else length
    return struct.pack(">HBBBL", size >> 8, size & 0xFF, kind, flags, stream) + payload


def grpc(message: bytes, compressed: int = 0) -> bytes:
    """With gRPC's prefix."""
    return bytes((compressed,)) + struct.pack(">L", len(message)) + message


def request(path: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    """Headers as Envoy sends them."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "service"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]


@dataclass
class Echo:
    """Answers each message with itself; some messages are orders."""

    ready: Callable[[], None]
    counts: dict[str, int]
    waits: bool = False
    received: list[bytes] = field(default_factory=list)
    ended: int = 0
    late: bytes | None = None

    def __post_init__(self) -> None:
        self.counts["begun"] += 1

    def receive(self, message: bytes) -> bytes | None:
        assert not self.ended
        self.received.append(message)
        if message == b"refuse":
            raise ProtocolError("refused, as it was told")
        if message == b"fail":
            raise RuntimeError("failed, as it was told")
        if message == b"wait":
            self.waits = True
            return b"hold"
        return message

    def resume(self) -> bytes | None:
        assert not self.ended
        if self.late is not None:
            self.waits = False
        return self.late

    def finish(self) -> bytes | None:
        return None

    def end(self) -> None:
        self.counts["ended"] += 1
        self.ended += 1


class Log(Echo):
    """Answers once, at the end."""

    def receive(self, message: bytes) -> None:
        super().receive(message)

    def finish(self) -> bytes | None:
        return b"read"


class Peer:
    """A connection, and everything it wrote, read by another implementation."""

    def __init__(self, greet: bool = True) -> None:
        self.calls: list[Echo] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.frames: list[Frame] = []
        self.encoder = Encoder()
        self.decoder = Decoder()
        self._unread = b""
        services = {ECHO: self._begin(Echo), LOG: self._begin(Log)}
        self.connection = Connection(services, self._wrote, lambda: LARGEST_MESSAGE)
        if greet:
            self.send(PREFACE, SETTINGS)

    def send(self, *data: bytes) -> None:
        whole = b"".join(data)
        while whole:
            room = self.connection.room()
            piece, whole = whole[: len(room)], whole[len(room) :]
            room[: len(piece)] = piece
            self.connection.received(len(piece))

    def settle(self) -> None:
        """Acknowledge the server's SETTINGS: no dynamic table from here on."""
        self.encoder.header_table_size = 0
        self.send(ACK)

    def block(self, path: str = ECHO, *more: tuple[str, str]) -> bytes:
        return self.encoder.encode(request(path, *more))

    def open(self, stream: int, path: str = ECHO, flags: int = 4) -> None:
        self.send(raw(1, flags, stream, self.block(path)))

    def say(self, stream: int, message: bytes, flags: int = 0) -> None:
        self.send(raw(0, flags, stream, grpc(message)))

    def of(self, stream: int) -> list[Frame]:
        """What was written to a stream."""
        return [one for one in self.frames if one.stream_id == stream]

    def data(self, stream: int) -> bytes:
        return b"".join(one.data for one in self.of(stream) if isinstance(one, DataFrame))

    def replies(self, stream: int) -> list[bytes]:
        data, messages = self.data(stream), []
        while len(data) >= 5:
            end = 5 + int.from_bytes(data[1:5])
            if len(data) < end:
                break
            messages.append(data[5:end])
            data = data[end:]
        return messages

    def status(self, stream: int) -> str | None:
        """gRPC's, from the trailers."""
        for one in self.of(stream):
            if isinstance(one, HeadersFrame) and "END_STREAM" in one.flags:
                return dict(self.decoder.decode(one.data))["grpc-status"]
        return None

    def reset_code(self, stream: int) -> int | None:
        codes = [one.error_code for one in self.of(stream) if isinstance(one, RstStreamFrame)]
        return codes[0] if codes else None

    def goodbye(self) -> int | None:
        """The code of the last GOAWAY."""
        codes = [one.error_code for one in self.frames if isinstance(one, GoAwayFrame)]
        return codes[-1] if codes else None

    def acknowledged(self) -> int:
        return sum(isinstance(one, SettingsFrame) and "ACK" in one.flags for one in self.frames)

    def _begin(self, kind: type[Echo]) -> Callable[[Callable[[], None]], Echo]:
        def begin(ready: Callable[[], None]) -> Echo:
            self.calls.append(kind(ready, self.counts))
            return self.calls[-1]

        return begin

    def _wrote(self, data: bytes) -> None:
        data, at = self._unread + data, 0
        while len(data) - at >= 9:
            one, length = Frame.parse_frame_header(memoryview(data[at : at + 9]))
            if len(data) - at - 9 < length:
                break
            at += 9
            one.parse_body(memoryview(data[at : at + length]))
            at += length
            self.frames.append(one)
        self._unread = data[at:]
