"""HTTP/2 frames: their numbers, limits and layout (RFC 9113, sections 4, 6 and 7)."""

import struct
from enum import IntEnum
from typing import Final, TypeVar

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER: Final = struct.Struct(">HBBBL")
"""Length in 16 + 8 bits, kind, flags, stream."""
LARGEST_FRAME: Final = 16_384
LARGEST_WINDOW: Final = (1 << 31) - 1
DEFAULT_WINDOW: Final = 65_535
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = 0x1, 0x1, 0x4, 0x8, 0x20
"""Flags."""
_PRIORITY_BYTES: Final = 5
_Payload = TypeVar("_Payload", bytes, memoryview)


class Kind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    """What SETTINGS tell."""

    HEADER_TABLE_SIZE = 1
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Code(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


_OF_CONNECTION: Final = frozenset({Kind.SETTINGS, Kind.PING, Kind.GOAWAY})
_OF_EITHER: Final = frozenset({Kind.WINDOW_UPDATE})
_SIZES: Final = {Kind.PRIORITY: _PRIORITY_BYTES, Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}


class PeerError(Exception):
    """The peer does what it must not: the connection ends, with a GOAWAY of this code."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def check(kind: int, stream_id: int, size: int) -> None:
    """What holds for every frame of its kind, but DATA. Raises `PeerError`."""
    if kind > Kind.CONTINUATION:
        return
    if kind == Kind.PUSH_PROMISE:
        raise PeerError(Code.PROTOCOL_ERROR, "a client must not push")
    if kind not in _OF_EITHER and (kind in _OF_CONNECTION) is bool(stream_id):
        raise PeerError(Code.PROTOCOL_ERROR, f"{Kind(kind).name} of stream {stream_id}")
    if size != _SIZES.get(Kind(kind), size):
        raise PeerError(Code.FRAME_SIZE_ERROR, f"{Kind(kind).name} of {size} bytes")


def content(flags: int, payload: _Payload, prioritized: int = 0) -> _Payload:
    """DATA or HEADERS without padding and priority. Raises `PeerError`."""
    begin, end = 0, len(payload)
    if flags & PADDED and payload:
        begin, end = 1, end - payload[0]
    elif flags & PADDED:
        end = -1
    if flags & prioritized:
        begin += _PRIORITY_BYTES
    if begin > end:
        raise PeerError(Code.PROTOCOL_ERROR, "more padding than there is room for")
    return payload[begin:end]


def read_settings(payload: bytes) -> dict[int, int]:
    """The last value of each setting. Raises `PeerError`."""
    if len(payload) % 6:
        raise PeerError(Code.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    values = dict(struct.iter_unpack(">HL", payload))
    if values.get(Setting.INITIAL_WINDOW_SIZE, 0) > LARGEST_WINDOW:
        raise PeerError(Code.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
    if not LARGEST_FRAME <= values.get(Setting.MAX_FRAME_SIZE, LARGEST_FRAME) < 1 << 24:
        raise PeerError(Code.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of range")
    return values


def frame(kind: Kind, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: dict[Setting, int]) -> bytes:
    """SETTINGS."""
    return frame(Kind.SETTINGS, 0, 0, b"".join(struct.pack(">HL", *pair) for pair in values.items()))


def window_update(stream_id: int, increment: int) -> bytes:
    """WINDOW_UPDATE."""
    return frame(Kind.WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def reset(stream_id: int, code: Code) -> bytes:
    """RST_STREAM."""
    return frame(Kind.RST_STREAM, 0, stream_id, code.to_bytes(4))


def go_away(last_id: int, code: Code) -> bytes:
    """GOAWAY."""
    return frame(Kind.GOAWAY, 0, 0, last_id.to_bytes(4) + code.to_bytes(4))
