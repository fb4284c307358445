"""KV events, published as vLLM does: what each step stored in the cache and removed from it."""

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from extproc.simulator import tokens
from extproc.simulator.batch import Generation
from extproc.simulator.blocks import BLOCK_TOKENS, TOKEN_BYTES

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
_REPEATED = 10_000
_LAST = b"\xff" * 8
_LOOK_EVERY_S = 0.02


class KvPublisher:
    """Numbers messages, sends them to whoever listens, and repeats the last ones for those who ask.

    Raises OSError where an address cannot be listened on. A port `*` takes a free one.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._topic = topic.encode()
        self._events: list[dict[str, Any]] = []
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=_REPEATED)
        self._count = 0
        try:
            self._feed = self._bind(zmq.PUB, endpoint)
            self._replay = self._bind(zmq.ROUTER, replay_endpoint) if replay_endpoint else None
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"cannot publish KV events: {error.strerror}") from error
        self.endpoint = self._feed.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.get_string(zmq.LAST_ENDPOINT) if self._replay else None

    def stored(self, generation: Generation, first: int, end: int) -> None:
        """See Watcher."""
        if first == end:
            return
        extras: list[list[str] | None] = [None] * (end - first)
        if generation.salt and not first:
            extras[0] = [generation.salt]
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": generation.hashes[first:end],
                "parent_block_hash": generation.hashes[first - 1] if first else None,
                "token_ids": tokens.to_ids(generation.ids[first * _BLOCK_BYTES : end * _BLOCK_BYTES]),
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": extras,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )

    def removed(self, block: int) -> None:
        """The cache has lost a block."""
        self._events.append(
            {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}
        )

    def step_done(self) -> None:
        """See Watcher: send what has happened, if anything."""
        if not self._events:
            return
        payload = msgspec.msgpack.encode([time.time(), self._events, 0])
        number = self._count.to_bytes(8, "big")
        self._count += 1
        self._events = []
        self._sent.append((number, payload))
        self._feed.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    async def repeat(self) -> None:
        """Answer those who missed some, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            while self._replay is not None and self._replay.poll(0):
                who, _, start = self._replay.recv_multipart()
                for number, payload in self._sent:
                    if number >= start:
                        self._replay.send_multipart((who, b"", self._topic, number, payload))
                self._replay.send_multipart((who, b"", b"", _LAST, b""))

    def close(self) -> None:
        """Listen no more."""
        self._context.destroy(linger=0)

    def _bind(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.bind(endpoint)
        return socket
