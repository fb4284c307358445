"""A fuzzer of the lean transport: peers that behave, and peers that do not, from a seed.

    python tests/lean/lean_fuzz.py --seconds 3600 --seed 1

Peers that behave must get every reply, byte for byte; the others must be refused. Whatever came: no
exception, no call that is not ended exactly once, no byte kept, nothing written past a window, and a GOAWAY
at the end.
"""

import argparse
import gc
import logging
import random
import sys
import time
from dataclasses import dataclass, field

from hyperframe.frame import (
    DataFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from lean_peer import ACK, ECHO, LOG, PREFACE, Echo, Peer, grpc, raw

WRONG_CODES = {1, 3, 5, 6, 9, 11}
DEFAULT_WINDOW = 65_535


@dataclass
class Wanted:
    """A stream as the peer sees it."""

    call: Echo | None = None
    sent: list[bytes] = field(default_factory=list)
    expected: list[bytes] = field(default_factory=list)
    window: int = DEFAULT_WINDOW
    finished: bool = False
    gone: bool = False


class Round:
    """One connection."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.peer = Peer(greet=False)
        self.wrong = self.rng.random() < 0.6
        self.streams: dict[int, Wanted] = {}
        self.next_id = 1
        self.chunk = self.rng.choices((1, 7, 100, 20_000, 1 << 20), (1, 2, 3, 10, 10))[0]
        self.window, self.their_initial = DEFAULT_WINDOW, DEFAULT_WINDOW
        self.granted, self.our_initial, self.stream_granted = DEFAULT_WINDOW, DEFAULT_WINDOW, dict[int, int]()
        self.largest_initial = DEFAULT_WINDOW
        self.read = 0
        self.checked, self.taken, self.ended = 0, dict[int, int](), set[int]()

    def run(self) -> None:
        actions = self.rng.randrange(1, 60)
        self.feed(PREFACE + raw(4, 0, 0, self.settings()))
        for _ in range(actions):
            if self.peer.connection.over:
                break
            if self.rng.random() < 0.5:
                self.look()
            if self.wrong and self.rng.random() < 0.15:
                self.feed(self.nonsense())
            else:
                self.act()
        if not self.wrong:
            self.complete()
        self.check()

    def act(self) -> None:
        rng = self.rng
        kind = rng.choices(("open", "say", "finish", "reset", "control", "wake"), (4, 10, 2, 1, 4, 2))[0]
        alive = [one for one, state in self.streams.items() if not state.gone and not state.finished]
        if kind == "open" or not alive:
            self.open()
        elif kind == "say":
            self.say(rng.choice(alive))
        elif kind == "finish":
            self.finish(rng.choice(alive))
        elif kind == "reset":
            one = rng.choice(alive)
            self.streams[one].gone = True
            self.feed(raw(3, 0, one, (8).to_bytes(4)))
        elif kind == "control":
            self.feed(self.control())
        else:
            for state in self.streams.values():
                if state.call is not None and state.call.waits and not state.call.ended:
                    state.call.late = b"late" * rng.randrange(1, 9)
                    state.expected.append(state.call.late)
                    state.call.ready()

    def open(self) -> None:
        rng, one = self.rng, self.next_id
        self.next_id += rng.choice((2, 2, 2, 8))
        path = rng.choices((ECHO, LOG, "/nowhere"), (8, 2, 1))[0]
        more = [("x-any", rng.randbytes(rng.randrange(20)).hex())] if rng.random() < 0.3 else []
        block = self.peer.block(path, *more)
        before = len(self.peer.calls)
        cuts = sorted(rng.randrange(len(block) + 1) for _ in range(rng.choice((0, 0, 0, 1, 3))))
        pieces = [block[a:b] for a, b in zip([0, *cuts], [*cuts, len(block)], strict=True)]
        data = b""
        for index, piece in enumerate(pieces):
            last = 4 if index == len(pieces) - 1 else 0
            data += raw(9 if index else 1, last, one, piece)
        state = self.streams[one] = Wanted(window=self.their_initial)
        self.stream_granted[one] = 0
        self.feed(data)
        if len(self.peer.calls) > before:
            state.call = self.peer.calls[-1]
        else:
            state.gone = True

    def say(self, one: int) -> None:
        rng, state = self.rng, self.streams[one]
        order = rng.choices((b"", b"wait", b"refuse", b"fail"), (30, 3, 1, 1))[0]
        if state.call is not None and state.call.waits:
            order = b""
        longest = self.chunk * 1_000  # byte by byte, large messages take too long
        message = order or rng.randbytes(min(longest, rng.choice((0, 1, 50, 2_000, 20_000, 300_000)))) + b"."
        data = grpc(message)
        size = rng.choice(
            (16_384, 16_384, 1_000, max(1, min(16_384, len(data) // 8)), 3 if len(data) < 2_000 else 300)
        )
        if len(self.peer.connection._streams[one].unsent if one in self.peer.connection._streams else b""):
            return  # a peer that reads slowly asks no more
        if len(data) + 300 * (len(data) // size + 1) > min(self.window, state.window):
            self.look()
            if len(data) + 300 * (len(data) // size + 1) > min(self.window, state.window):
                return
        frames = b""
        for at in range(0, len(data), size):
            piece = data[at : at + size]
            if rng.random() < 0.1 and len(piece) < 16_000:
                room = rng.randrange(256)
                piece = bytes((room,)) + piece + bytes(room)
                frames += raw(0, 8, one, piece)
            else:
                frames += raw(0, 0, one, piece)
            self.window -= len(piece)
            state.window -= len(piece)
        state.sent.append(message)
        if not isinstance(state.call, Echo) or type(state.call) is not Echo:
            pass
        elif order == b"wait":
            state.expected.append(b"hold")
        elif order:
            state.gone = True
        else:
            state.expected.append(message)
        if order in (b"refuse", b"fail"):
            state.gone = True
        self.feed(frames)

    def finish(self, one: int) -> None:
        state = self.streams[one]
        state.finished = True
        self.feed(raw(0, 1, one))
        if type(state.call) is not Echo:
            state.expected.append(b"read")

    def settings(self) -> bytes:
        rng, values = self.rng, b""
        if rng.random() < 0.5:
            self.our_initial = rng.choice((0, 10, 65_535, 1 << 20, (1 << 31) - 1 - (1 << 30)))
            self.largest_initial = max(self.largest_initial, self.our_initial)
            values += b"\0\4" + self.our_initial.to_bytes(4)
        if rng.random() < 0.3:
            values += b"\0\5" + rng.choice((16_384, 1 << 20)).to_bytes(4)
        if rng.random() < 0.3:
            values += rng.randrange(7, 60_000).to_bytes(2) + rng.randbytes(4)
        return values

    def control(self) -> bytes:
        rng = self.rng
        match rng.randrange(6):
            case 0:
                return raw(6, 0, 0, rng.randbytes(8))
            case 1:
                return raw(4, 0, 0, self.settings())
            case 2:
                self.granted += (by := rng.randrange(1, 1 << 20))
                return raw(8, 0, 0, by.to_bytes(4))
            case 3 if self.streams:
                one = rng.choice(list(self.streams))
                self.stream_granted[one] += (by := rng.randrange(1, 1 << 20))
                return raw(8, 0, one, by.to_bytes(4))
            case 4 if self.streams:
                return raw(2, 0, rng.choice(list(self.streams)), rng.randbytes(5))
            case _:
                return raw(rng.randrange(10, 256), rng.randrange(256), rng.randrange(9), rng.randbytes(9))

    def nonsense(self) -> bytes:
        rng = self.rng
        one = rng.choice((0, 1, 2, self.next_id, rng.randrange(1 << 31)))
        match rng.randrange(9):
            case 0:
                return rng.randbytes(rng.randrange(1, 200))
            case 1:
                return raw(rng.randrange(10), rng.randrange(256), one, rng.randbytes(rng.randrange(40)))
            case 2:
                return raw(rng.randrange(10), rng.randrange(256), one, b"", rng.randrange(1 << 24))
            case 3:
                return raw(8, 0, one, rng.choice((0, (1 << 31) - 1)).to_bytes(4))
            case 4:
                return raw(4, 0, 0, rng.randbytes(6 * rng.randrange(40)))
            case 5:
                return raw(0, 0, one, grpc(b"x", rng.randrange(256)))
            case 6:
                self.next_id = max(self.next_id, one | 1) + 2 if one < 1 << 20 else self.next_id
                return raw(1, 4 | rng.randrange(256), one, rng.randbytes(rng.randrange(80)))
            case 7:
                return raw(1, 0, one, self.peer.block()) + raw(9, 0, one, bytes(8_000)) * rng.randrange(4)
            case _:
                right = bytearray(self.control() + raw(0, 0, one, grpc(rng.randbytes(30))))
                for _ in range(rng.randrange(1, 4)):
                    right[rng.randrange(len(right))] ^= 1 << rng.randrange(8)
                return bytes(right)

    def feed(self, data: bytes) -> None:
        for at in range(0, len(data), self.chunk):
            self.peer.send(data[at : at + self.chunk])
        self.check_output()

    def look(self) -> None:
        """Read what came, as a real peer does some time later."""
        for one in self.peer.frames[self.read :]:
            if isinstance(one, SettingsFrame) and "ACK" not in one.flags:
                grown = one.settings[4] - self.their_initial
                self.their_initial = one.settings[4]
                for state in self.streams.values():
                    state.window += grown
                self.peer.encoder.header_table_size = one.settings[1]
                self.feed(ACK)
            elif isinstance(one, WindowUpdateFrame):
                if one.stream_id:
                    self.streams[one.stream_id].window += one.window_increment
                else:
                    self.window += one.window_increment
        self.read = len(self.peer.frames)

    def complete(self) -> None:
        """Windows wide open: all that was asked for must come."""
        self.largest_initial = (1 << 31) - 1 - (1 << 30)
        self.feed(raw(4, 0, 0, b"\0\4" + self.largest_initial.to_bytes(4)))
        self.granted += 1 << 30
        self.feed(raw(8, 0, 0, (1 << 30).to_bytes(4)))
        assert not self.peer.connection.over, self.peer.goodbye()
        for one, state in self.streams.items():
            if state.gone:
                continue
            assert state.call is not None and state.call.received == state.sent, "a message is lost"
            assert self.peer.replies(one) == state.expected, "a reply is lost"
            if state.finished:
                assert self.peer.status(one) == "0"

    def check(self) -> None:
        """Whatever happened."""
        connection = self.peer.connection
        streams, sender = connection._streams.values(), connection._sender
        assert connection._partial_bytes == sum(len(one.partial) for one in streams), "counted wrong"
        assert sender.unsent_bytes == sum(len(one.unsent) for one in streams), "counted wrong"
        if connection.over:
            assert self.peer.goodbye() in WRONG_CODES | {0} or connection._peer_leaves
        connection.close()
        assert connection.over and not streams
        assert not connection._partial_bytes and not sender.unsent_bytes
        assert self.peer.counts["begun"] == self.peer.counts["ended"] == len(self.peer.calls)
        assert all(call.ended == 1 for call in self.peer.calls)
        assert not self.peer._unread, "half a frame"
        self.check_output()

    def check_output(self) -> None:
        """What was written since the last time is in order, and within the windows as they were given."""
        for one in self.peer.frames[self.checked :]:
            if isinstance(one, DataFrame | HeadersFrame):
                assert one.stream_id not in self.ended, "after the end"
            if isinstance(one, DataFrame):
                self.taken[one.stream_id] = self.taken.get(one.stream_id, 0) + len(one.data)
            elif isinstance(one, RstStreamFrame) or (
                isinstance(one, HeadersFrame) and "END_STREAM" in one.flags
            ):
                self.ended.add(one.stream_id)
        self.checked = len(self.peer.frames)
        if not self.wrong:
            assert sum(self.taken.values()) <= self.granted, "past the connection's window"
            for one, count in self.taken.items():
                assert count <= self.largest_initial + self.stream_granted[one], "past a stream's window"


def main() -> None:
    """Until time is up, or something is found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable()
    seed, until_s, said_s = given.seed, time.monotonic() + given.seconds, 0.0
    while time.monotonic() < until_s:
        try:
            Round(seed).run()
        except BaseException:
            print(f"seed {seed} fails", file=sys.stderr)
            raise
        seed += 1
        if time.monotonic() > said_s:
            said_s = time.monotonic() + 30
            gc.collect()
            print(f"{seed - given.seed} connections, {len(gc.get_objects())} objects alive", flush=True)
    print(f"done: {seed - given.seed} connections")


if __name__ == "__main__":
    main()
