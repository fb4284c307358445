"""Messages as vLLM publishes them, and a feed that a test plays."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from extproc.config import KvCache, NodeConfig
from extproc.engines.kvevents import LAST
from extproc.engines.kvfeed import Feed
from extproc.routing.node import EngineReport, Health, Node
from extproc.routing.router import Router

DATA = Path(__file__).parent.parent / "data"
MODEL = "tiny"
BLOCK_TOKENS = 4
Frames = tuple[bytes, bytes]


def recorded() -> list[dict[str, Any]]:
    """What a vLLM 0.32 said over two chats, a salted one, evictions and a reset."""
    return [json.loads(line) for line in (DATA / "vllm-0.32-kv-events.jsonl").read_text().splitlines()]


def frames(number: int, *events: object, at_s: float | None = None) -> Frames:
    at_s = float(number) if at_s is None else at_s
    return number.to_bytes(8, "big"), msgspec.msgpack.encode([at_s, events, 0])


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **members: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_TOKENS,
        **members,
    }


def removed(*hashes: int, **members: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, **members}


CLEARED = {"type": "AllBlocksCleared"}


def as_row(event: dict[str, Any]) -> list[Any]:
    """The layout of older releases."""
    return [event["type"], *(value for key, value in event.items() if key != "type")]


def make_node(node_id: str = "a", models: tuple[str, ...] = (MODEL,), **settings: Any) -> Node:
    config = NodeConfig(
        **{
            "id": node_id,
            "hardware": "a100-80g",
            "backend": "vllm",
            "endpoint": "http://127.0.0.1:1",
            "models": models,
            "kv_events": {"endpoint": "tcp://127.0.0.1:1"},
            **settings,
        }
    )
    return Node(config=config, profile=config.profile, health=Health.HEALTHY)


class Played:
    """A source of messages: those put in, and those that the engine would repeat."""

    def __init__(self, can_replay: bool = False) -> None:
        self.can_replay = can_replay
        self.comes: deque[Frames] = deque()
        self.kept: list[Frames] = []
        self.answers = True
        self.asked_from: list[int] = []
        self._repeats: deque[Frames] = deque()

    def receive(self) -> Frames | None:
        return self.comes.popleft() if self.comes else None

    def ask(self, number: int) -> None:
        self.asked_from.append(number)
        if self.answers:
            self._repeats.extend(one for one in self.kept if one[0] >= number.to_bytes(8, "big"))
            self._repeats.append((LAST, b""))

    def repeated(self) -> Frames | None:
        return self._repeats.popleft() if self._repeats else None

    def hush(self) -> None:
        self._repeats.clear()


class FedNode:
    """A node with a feed and a clock that a test moves."""

    def __init__(self, can_replay: bool = False) -> None:
        self.node = make_node()
        self.router = Router([self.node], cache=KvCache())
        self.source = Played(can_replay)
        self.feed = Feed(self.node, self.source, self.router.exact)
        self.now_s = 100.0

    def gets(self, *messages: Frames) -> None:
        self.source.comes.extend(messages)
        while self.feed.tick(self.now_s):
            pass

    def waits(self, seconds: float) -> None:
        self.now_s += seconds
        while self.feed.tick(self.now_s):
            pass

    def reports(self, **numbers: Any) -> None:
        self.node.report = EngineReport(self.now_s, **numbers)
        self.router.reported(self.node)
        while self.feed.tick(self.now_s):
            pass

    @property
    def blocks(self) -> int:
        return self.router.exact.blocks(self.node)

    @property
    def exact(self) -> bool:
        return self.node.events.exact
