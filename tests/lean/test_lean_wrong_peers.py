"""Peers that break the rules, by mistake or on purpose: each gets a GOAWAY that says why."""

import pytest
from lean_peer import ACK, ECHO, PREFACE, SETTINGS, Peer, grpc, raw, request

from extproc.lean.connection import MOST_IDLE_FRAMES, MOST_STREAMS, SETTINGS_WEIGHT, TICKS_TO_SETTLE
from extproc.lean.frames import Code

LARGEST = (1 << 31) - 1

WRONG = {
    "a frame over 16 KiB": (raw(0, 0, 1, bytes(16_385)), Code.FRAME_SIZE_ERROR),
    "a frame that only says that it is large": (raw(0, 0, 1, b"", 1 << 23), Code.FRAME_SIZE_ERROR),
    "DATA of no stream": (raw(0, 0, 0, b"x"), Code.PROTOCOL_ERROR),
    "DATA of a stream never opened": (raw(0, 0, 9, b"x"), Code.PROTOCOL_ERROR),
    "DATA of a stream of ours": (raw(0, 0, 2, b"x"), Code.PROTOCOL_ERROR),
    "more padding than DATA": (raw(0, 8, 1, b"\5abc"), Code.PROTOCOL_ERROR),
    "padding, and nothing else": (raw(0, 8, 1), Code.PROTOCOL_ERROR),
    "HEADERS of a stream of ours": (raw(1, 4, 2, b"\x88"), Code.PROTOCOL_ERROR),
    "HEADERS of no stream": (raw(1, 4, 0, b"\x88"), Code.PROTOCOL_ERROR),
    "HEADERS of a stream that is open": (raw(1, 4, 1, b"\x88"), Code.PROTOCOL_ERROR),
    "HEADERS too short for their priority": (raw(1, 0x24, 3, b"\0\0"), Code.PROTOCOL_ERROR),
    "a header that is in no table": (raw(1, 4, 3, b"\xff\x80\x01"), Code.COMPRESSION_ERROR),
    "a header cut short": (raw(1, 4, 3, b"\x00\x05ab"), Code.COMPRESSION_ERROR),
    "headers without a path": (raw(1, 4, 3, b"\x83\x86"), Code.PROTOCOL_ERROR),
    "a response's headers": (raw(1, 4, 3, b"\x88"), Code.PROTOCOL_ERROR),
    "PRIORITY of 4 bytes": (raw(2, 0, 1, b"1234"), Code.FRAME_SIZE_ERROR),
    "RST_STREAM of a stream never opened": (raw(3, 0, 9, b"1234"), Code.PROTOCOL_ERROR),
    "RST_STREAM of 3 bytes": (raw(3, 0, 1, b"123"), Code.FRAME_SIZE_ERROR),
    "RST_STREAM of no stream": (raw(3, 0, 0, b"1234"), Code.PROTOCOL_ERROR),
    "SETTINGS of a stream": (raw(4, 0, 1), Code.PROTOCOL_ERROR),
    "SETTINGS of 5 bytes": (raw(4, 0, 0, b"12345"), Code.FRAME_SIZE_ERROR),
    "an acknowledgement with content": (raw(4, 1, 0, b"\0\4\0\0\0\0"), Code.FRAME_SIZE_ERROR),
    "an initial window over 2^31-1": (raw(4, 0, 0, b"\0\4\x80\0\0\0"), Code.FLOW_CONTROL_ERROR),
    "frames of at most 100 bytes": (raw(4, 0, 0, b"\0\5\0\0\0\x64"), Code.PROTOCOL_ERROR),
    "a push": (raw(5, 4, 1, b"\0\0\0\2"), Code.PROTOCOL_ERROR),
    "PING of 7 bytes": (raw(6, 0, 0, b"1234567"), Code.FRAME_SIZE_ERROR),
    "PING of a stream": (raw(6, 0, 1, b"12345678"), Code.PROTOCOL_ERROR),
    "GOAWAY of a stream": (raw(7, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE by nothing": (raw(8, 0, 0, bytes(4)), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 3 bytes": (raw(8, 0, 0, bytes(3)), Code.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of a stream never opened": (raw(8, 0, 9, b"\0\0\0\1"), Code.PROTOCOL_ERROR),
    "a window over 2^31-1": (raw(8, 0, 0, LARGEST.to_bytes(4)), Code.FLOW_CONTROL_ERROR),
    "a stream's window over 2^31-1": (raw(8, 0, 1, LARGEST.to_bytes(4)), Code.FLOW_CONTROL_ERROR),
    "CONTINUATION of nothing": (raw(9, 4, 1, b"\x88"), Code.PROTOCOL_ERROR),
    "a header block cut short": (raw(1, 0, 3, b"\x83") + raw(6, 0, 0, bytes(8)), Code.PROTOCOL_ERROR),
    "a header block cut short by DATA": (raw(1, 0, 3, b"\x83") + raw(0, 0, 1, b"x"), Code.PROTOCOL_ERROR),
    "CONTINUATION of another stream": (raw(1, 0, 3, b"\x83") + raw(9, 4, 5), Code.PROTOCOL_ERROR),
}


@pytest.mark.parametrize(("data", "code"), WRONG.values(), ids=WRONG)
def test_what_breaks_the_protocol_ends_the_connection_and_its_calls(data: bytes, code: Code) -> None:
    peer = Peer()
    peer.open(1)
    peer.send(data, raw(6, 0, 0, b"too late"))
    assert peer.connection.over
    assert peer.goodbye() == code
    assert [call.ended for call in peer.calls] == [1]
    assert b"too late" not in [getattr(one, "opaque_data", None) for one in peer.frames]


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", b"\x16\x03\x01"])
def test_what_is_not_http_2_is_told_at_once(first: bytes) -> None:
    peer = Peer(greet=False)
    peer.send(first)
    assert peer.goodbye() == Code.PROTOCOL_ERROR


def test_the_first_frame_must_be_settings() -> None:
    for first in (raw(6, 0, 0, bytes(8)), raw(0, 0, 1, b"x"), raw(1, 4, 1, b"\x88")):
        peer = Peer(greet=False)
        peer.send(PREFACE, first)
        assert peer.goodbye() == Code.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "headers",
    [
        [*request(ECHO), (":path", "/again")],
        [("te", "trailers"), *request(ECHO)],
        [*request(ECHO), (":status", "200")],
        [*request(ECHO), ("Upper", "case")],
    ],
)
def test_headers_that_are_no_requests(headers: list[tuple[str, str]]) -> None:
    peer = Peer()
    peer.send(raw(1, 4, 1, peer.encoder.encode(headers)))
    assert peer.goodbye() == Code.PROTOCOL_ERROR


FLOODS = {
    "PING": raw(6, 0, 0, bytes(8)),
    "RST_STREAM": raw(3, 0, 1, bytes(4)),
    "PRIORITY": raw(2, 0, 1, bytes(5)),
    "WINDOW_UPDATE": raw(8, 0, 1, b"\0\0\0\1"),
    "empty DATA": raw(0, 0, 1),
    "frames of unknown kinds": raw(99, 0, 1),
    "acknowledgements": ACK,
}


@pytest.mark.parametrize("one", FLOODS.values(), ids=FLOODS)
def test_floods_of_frames_that_bring_nothing_on_are_cut(one: bytes) -> None:
    peer = Peer()
    peer.open(1)
    for _ in range(3):  # as many are allowed in each second
        peer.send(one * (MOST_IDLE_FRAMES - 2 * SETTINGS_WEIGHT))
        peer.connection.tick()
    assert not peer.connection.over
    peer.send(one * (MOST_IDLE_FRAMES + 1))
    assert peer.goodbye() == Code.ENHANCE_YOUR_CALM


def test_a_flood_of_settings_is_cut() -> None:
    peer = Peer()
    most = MOST_IDLE_FRAMES // SETTINGS_WEIGHT
    peer.send(SETTINGS * (most + 10))
    assert peer.goodbye() == Code.ENHANCE_YOUR_CALM
    assert peer.acknowledged() <= most


def test_streams_opened_and_reset_at_once_are_cut() -> None:
    peer = Peer()
    peer.settle()
    for stream in range(1, 2 * MOST_IDLE_FRAMES + 99, 2):
        peer.send(raw(1, 4, stream, peer.block()) + raw(3, 0, stream, (8).to_bytes(4)))
    assert peer.goodbye() == Code.ENHANCE_YOUR_CALM
    assert peer.counts["begun"] == peer.counts["ended"] <= MOST_IDLE_FRAMES


def test_endless_continuations_are_cut() -> None:
    peer = Peer()
    peer.send(raw(1, 0, 1, b"\x83"), *[raw(9, 0, 1, bytes(4_000))] * 5)
    assert peer.goodbye() == Code.ENHANCE_YOUR_CALM
    empty = Peer()
    empty.send(raw(1, 0, 1, b"\x83"), raw(9, 0, 1) * (MOST_IDLE_FRAMES + 1))
    assert empty.goodbye() == Code.ENHANCE_YOUR_CALM


def test_headers_that_unfold_to_much_are_refused() -> None:
    peer = Peer()
    bomb = b"\x40\x01a\x7f\xa1\x1f" + b"v" * 4_000 + b"\xbe" * 12_000  # one entry, then the same again
    peer.send(raw(1, 4, 1, bomb))
    assert peer.goodbye() == Code.COMPRESSION_ERROR


def test_streams_past_the_limit_are_refused_one_by_one() -> None:
    peer = Peer()
    for stream in range(1, 2 * MOST_STREAMS + 1, 2):
        peer.open(stream)
    late = 2 * MOST_STREAMS + 1
    peer.open(late)
    peer.say(late, b"sent before it could know")
    assert peer.reset_code(late) == Code.REFUSED_STREAM
    assert not peer.connection.over
    peer.send(raw(3, 0, 1, bytes(4)))
    peer.open(late + 2)
    peer.say(late + 2, b"room again")
    assert peer.replies(late + 2) == [b"room again"]


def test_who_never_acknowledges_our_settings_is_let_go() -> None:
    for peer in (Peer(), Peer(greet=False)):
        for _ in range(TICKS_TO_SETTLE):
            peer.connection.tick()
        assert not peer.connection.over
        peer.connection.tick()
        assert peer.goodbye() == Code.SETTINGS_TIMEOUT


def test_a_table_is_used_until_we_are_heard_and_not_after() -> None:
    peer = Peer()
    for stream in (1, 3):  # the second block is a few indices into the table of the first
        peer.open(stream)
    assert len(peer.calls) == 2
    peer.send(ACK)
    peer.open(5)  # by an encoder that does not listen
    assert peer.goodbye() == Code.COMPRESSION_ERROR


def test_data_of_a_stream_that_has_ended_ends_no_other() -> None:
    peer = Peer()
    peer.open(1)
    peer.send(raw(0, 1, 1), raw(0, 0, 1, grpc(b"more")))
    assert peer.reset_code(1) == Code.STREAM_CLOSED
    peer.open(3)
    peer.say(3, b"still here")
    assert peer.replies(3) == [b"still here"]
