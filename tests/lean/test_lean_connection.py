"""Messages over a lean connection: what goes in comes out, whatever the cuts, the windows and the order."""

import pytest
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, PingFrame, WindowUpdateFrame
from hypothesis import given
from hypothesis import strategies as st
from lean_fuzz import Round
from lean_peer import ECHO, LARGEST_MESSAGE, LOG, Peer, grpc, raw

from extproc.lean.connection import CONNECTION_WINDOW, MOST_UNREAD_BYTES, STREAM_WINDOW
from extproc.lean.frames import Code

INITIAL = 65_535


def opened(path: str = ECHO) -> Peer:
    peer = Peer()
    peer.settle()
    peer.open(1, path)
    return peer


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_messages_may_be_cut_anywhere(messages: list[bytes], data: st.DataObject) -> None:
    peer = opened()
    whole = b"".join(map(grpc, messages))
    while whole:
        size = data.draw(st.integers(1, len(whole)))
        peer.send(raw(0, 0, 1, whole[:size]))
        whole = whole[size:]
    assert peer.calls[0].received == peer.replies(1) == messages


@given(st.integers(1, 60))
def test_frames_may_be_cut_anywhere(size: int) -> None:
    peer = Peer(greet=False)
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + raw(4, 0, 0, b"\0\4\0\1\0\0") + raw(1, 4, 1, peer.block())
    sent += raw(0, 8, 1, b"\3" + grpc(b"padded") + bytes(3)) + raw(0, 1, 1)
    for at in range(0, len(sent), size):
        peer.send(sent[at : at + size])
    assert peer.replies(1) == [b"padded"]
    assert peer.status(1) == "0"


def test_an_answer_is_headers_data_and_trailers() -> None:
    peer = opened()
    peer.say(1, b"one", flags=1)
    first, data, last = peer.of(1)
    assert isinstance(first, HeadersFrame) and isinstance(data, DataFrame) and isinstance(last, HeadersFrame)
    assert dict(peer.decoder.decode(first.data)) == {":status": "200", "content-type": "application/grpc"}
    assert dict(peer.decoder.decode(last.data)) == {"grpc-status": "0"}
    assert peer.counts["ended"] == 1


def test_replies_of_one_read_go_out_in_one_write() -> None:
    peer = opened()
    peer.open(3)
    writes: list[bytes] = []
    peer.connection._sender._write = writes.append
    peer.send(raw(0, 0, 1, grpc(b"one")), raw(0, 0, 3, grpc(b"two")))
    assert len(writes) == 1


@pytest.mark.parametrize("size", [INITIAL - 5, INITIAL - 4, 3 * INITIAL, 1_000_000])
def test_a_reply_waits_for_windows_and_its_trailers_for_it(size: int) -> None:
    peer = opened()
    message = bytes(size)
    whole = grpc(message)
    for at in range(0, len(whole), 16_384):
        peer.send(raw(0, 0, 1, whole[at : at + 16_384]))
    peer.send(raw(0, 1, 1))
    assert len(peer.data(1)) == min(INITIAL, size + 5)
    assert (peer.status(1) == "0") is (size + 5 <= INITIAL)
    peer.send(raw(8, 0, 1, (1 << 20).to_bytes(4)))  # the stream's alone does not help
    assert len(peer.data(1)) == min(INITIAL, size + 5)
    peer.send(raw(8, 0, 0, (1 << 20).to_bytes(4)))
    assert peer.replies(1) == [message]
    assert peer.status(1) == "0"
    assert max(len(one.data) for one in peer.of(1) if isinstance(one, DataFrame)) <= 16_384
    assert peer.connection._sender.unsent_bytes == 0


def test_a_window_may_shrink_below_nothing() -> None:
    peer = opened()
    peer.say(1, bytes(10_000))
    peer.send(raw(4, 0, 0, b"\0\4\0\0\0\1"))
    peer.say(1, b"later")
    assert len(peer.replies(1)) == 1
    peer.send(raw(8, 0, 1, (10_000).to_bytes(4)))
    assert len(peer.replies(1)) == 1
    peer.send(raw(4, 0, 0, b"\0\4\0\1\0\0"))
    assert peer.replies(1)[1] == b"later"


def test_large_frames_are_sent_to_who_wants_them() -> None:
    peer = opened()
    peer.send(raw(4, 0, 0, b"\0\5\0\1\0\0"))
    for at in (0, 16_384, 32_768):
        peer.send(raw(0, 0, 1, grpc(bytes(40_000))[at : at + 16_384]))
    assert [len(one.data) for one in peer.of(1) if isinstance(one, DataFrame)] == [40_005]


def test_windows_are_opened_again_as_bodies_come_in() -> None:
    peer = opened(LOG)
    chunk, sent = raw(0, 0, 1, bytes(16_384)), 0
    stream = connection = 0
    while sent < 2 * CONNECTION_WINDOW:
        assert sent + 16_384 <= STREAM_WINDOW + stream and sent + 16_384 <= CONNECTION_WINDOW + connection
        peer.send(chunk)
        sent += 16_384
        updates = [one for one in peer.frames if isinstance(one, WindowUpdateFrame)][1:]
        stream = sum(one.window_increment for one in updates if one.stream_id)
        connection = sum(one.window_increment for one in updates if not one.stream_id)


def test_messages_that_are_too_large_or_compressed_end_their_stream_only() -> None:
    peer = opened()
    peer.send(raw(0, 0, 1, b"\0" + (LARGEST_MESSAGE + 1).to_bytes(4)))
    peer.open(3)
    peer.send(raw(0, 0, 3, grpc(b"x", compressed=1)))
    peer.open(5)
    peer.say(5, b"fine")
    assert (peer.status(1), peer.status(3), peer.status(5)) == ("3", "3", None)
    assert (peer.reset_code(1), peer.reset_code(3)) == (Code.NO_ERROR, Code.NO_ERROR)
    assert peer.replies(5) == [b"fine"]


def test_who_asks_on_without_reading_is_refused() -> None:
    peer = opened()
    peer.send(raw(4, 0, 0, b"\0\4\0\0\0\0"))
    for _ in range(MOST_UNREAD_BYTES // 10_000 + 3):
        peer.say(1, bytes(10_000))
    assert peer.counts["ended"] == 1
    assert peer.connection._sender.unsent_bytes < 2 * MOST_UNREAD_BYTES


@pytest.mark.parametrize(("message", "status"), [(b"refuse", "3"), (b"fail", "2")])
def test_a_call_that_fails_tells_its_stream_and_no_other(message: bytes, status: str) -> None:
    peer = opened()
    peer.open(3)
    peer.say(1, message)
    peer.say(3, b"fine")
    assert peer.status(1) == status
    assert peer.replies(3) == [b"fine"]
    assert [call.ended for call in peer.calls] == [1, 0]


def test_an_unknown_method_is_unimplemented() -> None:
    assert opened("/what.Is/This").status(1) == "12"


def test_a_reply_may_come_later() -> None:
    peer = opened()
    peer.say(1, b"wait")
    call = peer.calls[0]
    call.ready()
    assert peer.replies(1) == [b"hold"]
    call.late = b"now"
    call.ready()
    assert peer.replies(1) == [b"hold", b"now"]
    peer.send(raw(3, 0, 1, bytes(4)))
    call.ready()
    assert call.ended == 1


def test_pings_and_settings_are_answered() -> None:
    peer = opened()
    peer.send(raw(6, 0, 0, b"are you?"), raw(4, 0, 0, b"\0\4\0\1\0\0"))
    pings = [one for one in peer.frames if isinstance(one, PingFrame)]
    assert [(one.opaque_data, set(one.flags)) for one in pings] == [(b"are you?", {"ACK"})]
    assert peer.acknowledged() == 2


def test_a_drain_serves_what_is_under_way_and_refuses_the_rest() -> None:
    peer = opened()
    peer.connection.drain()
    peer.open(3)  # sent before the GOAWAY came
    ping = next(one for one in peer.frames if isinstance(one, PingFrame))
    peer.send(raw(6, 1, 0, ping.opaque_data))
    peer.open(5)
    for stream in (1, 3):
        peer.say(stream, b"go on", flags=1)
    assert [one.last_stream_id for one in peer.frames if isinstance(one, GoAwayFrame)] == [(1 << 31) - 1, 3]
    assert (peer.status(1), peer.status(3)) == ("0", "0")
    assert peer.reset_code(5) == Code.REFUSED_STREAM


def test_the_end_answers_logs_and_cuts_exchanges() -> None:
    peer = opened()
    peer.open(3, LOG)
    peer.connection.close()
    assert peer.reset_code(1) == Code.CANCEL
    assert (peer.replies(3), peer.status(3)) == ([b"read"], "0")
    assert peer.goodbye() == Code.NO_ERROR
    assert peer.counts["ended"] == 2


def test_when_the_peer_leaves_the_last_stream_is_the_end() -> None:
    peer = opened()
    peer.send(raw(7, 0, 0, bytes(8)))
    peer.say(1, b"go on")
    assert peer.replies(1) == [b"go on"] and not peer.connection.over
    peer.send(raw(0, 1, 1))
    assert peer.connection.over


@pytest.mark.parametrize("seed", range(60))
def test_peers_of_all_kinds(seed: int) -> None:
    Round(seed).run()
