"""What the nodes' KV caches hold of prompts: the index, kept true by what engines report of themselves."""

from typing import Final

import numpy as np

from extproc.config import KvCache
from extproc.openai.request import RoutingRequest
from extproc.routing.blocks import PromptBlocks
from extproc.routing.loads import Floats
from extproc.routing.node import REPORT_FRESH_S, EngineReport, Node
from extproc.routing.prefix import HintTable, Match, PrefixIndex

_FEW: Final = 8
"""Nodes in a mask up to which looking at its bits one by one is faster than unpacking it."""
_RESTART_S: Final = 1.0
"""Engines round their time of start."""


class Caches:
    """The prompts that each node holds, by slot (which is the node's bit in the index)."""

    def __init__(self, settings: KvCache) -> None:
        self.index = PrefixIndex()
        self.hints = HintTable()
        self.crowded_until_s: dict[int, float] = {}
        """Slots of nodes whose KV use exceeds the threshold, and until when their report counts."""
        self._capacity_bytes: list[int | None] = []
        self._seen: list[EngineReport | None] = []
        self.configure(settings)

    def configure(self, settings: KvCache) -> None:
        """Settings from now on; it is the engines' next reports that are held against another threshold."""
        self._pins = settings.pin_system_prompts
        if not self._pins:
            self.index.unpin()
        self._threshold = settings.eviction_threshold_pct / 100

    def add(self, slot: int) -> None:
        """One more node, which holds nothing yet, at the lowest slot that is free."""
        bit = self.index.add_node(None)
        assert bit == slot, "bits of the index are slots"
        self._capacity_bytes[slot : slot + 1] = [None]
        self._seen[slot : slot + 1] = [None]

    def remove(self, slot: int) -> None:
        """The slot has no node any more."""
        self.index.remove_node(slot)
        self.hints.clear_node(slot)
        self.crowded_until_s.pop(slot, None)

    def matched_bytes(self, request: RoutingRequest, blocks: PromptBlocks) -> Floats | None:
        """How many bytes of the prompt each node holds; `None`: no node holds any."""
        match = self.index.match(blocks)
        hint = request.hints.kv_prefix_hint
        reports = self.hints.reports(request.model, hint, blocks) if hint else {}
        if not match.steps and not reports:
            return None
        matched = _spread(match, blocks, len(self._seen))
        for slot, cached_bytes in reports.items():  # the engine itself may know more than the hashes
            matched[slot] = max(float(matched[slot]), cached_bytes)
        return matched

    def insert(self, node: Node, blocks: PromptBlocks) -> None:
        """A node gets a prompt, and will hold it."""
        if blocks.hashes:
            self.index.insert(node.slot, blocks, self._pins)

    def bind_hint(self, request: RoutingRequest, blocks: PromptBlocks) -> None:
        """The hint that came with a prompt, if any, names its system prompt."""
        if hint := request.hints.kv_prefix_hint:
            self.hints.bind(request.model, hint, blocks)

    def withdraw(self, node: Node, blocks: PromptBlocks, matched_bytes: float) -> None:
        """A node failed to take a prompt of which it held so much before."""
        self.index.withdraw(node.slot, blocks, _blocks_within(blocks, matched_bytes))

    def recomputed(self, node: Node, blocks: PromptBlocks, cached_bytes: float) -> None:
        """An engine had evicted a prompt but for its first bytes, and with it what followed it in others.

        By now it has the whole prompt again.
        """
        self.index.forget(node.slot, blocks, _blocks_within(blocks, cached_bytes))
        self.insert(node, blocks)

    def lost(self, node: Node) -> None:
        """A node is gone or has started anew: it holds nothing."""
        self.index.clear_node(node.slot)
        self.hints.clear_node(node.slot)

    def set_capacity(self, slot: int, capacity_bytes: int) -> None:
        """What a node can hold."""
        if self._capacity_bytes[slot] != capacity_bytes:
            self._capacity_bytes[slot] = capacity_bytes
            self.index.set_capacity(slot, capacity_bytes)

    def report(self, node: Node, report: EngineReport) -> None:
        """An engine's report: it may have started anew, or be fuller than the threshold allows."""
        slot = node.slot
        before, self._seen[slot] = self._seen[slot], report
        if before is not None and _restarted(before, report):
            self.lost(node)
        if report.kv_used_ratio is None or report.kv_used_ratio <= self._threshold:
            self.crowded_until_s.pop(slot, None)
            return
        self.crowded_until_s[slot] = report.at_s + REPORT_FRESH_S
        capacity_bytes = self._capacity_bytes[slot]
        if capacity_bytes is not None:
            self.index.evict(slot, int(capacity_bytes * self._threshold))

    def crowded(self, blocks: PromptBlocks, matched: Floats | None, now_s: float) -> set[int]:
        """Slots of the nodes over the KV threshold, unless they hold most of the prompt."""
        until_s = self.crowded_until_s
        crowded = {slot for slot in until_s if now_s <= until_s[slot]} if until_s else set()
        if matched is None:
            return crowded
        return {slot for slot in crowded if matched[slot] * 2 < blocks.total_bytes}


def _blocks_within(blocks: PromptBlocks, size_bytes: float) -> int:
    return sum(end <= size_bytes for end in blocks.ends_bytes)


def _spread(match: Match, blocks: PromptBlocks, size: int) -> Floats:
    """A match as bytes, node by node."""
    matched = np.zeros(size)
    for nodes, count in match.steps:
        held_bytes = blocks.ends_bytes[count - 1]
        if nodes.bit_count() > _FEW:
            bits = np.frombuffer(nodes.to_bytes((size + 7) // 8, "little"), np.uint8)
            matched[np.unpackbits(bits, bitorder="little", count=size).view(bool)] = held_bytes
            continue
        while nodes:
            lowest = nodes & -nodes
            matched[lowest.bit_length() - 1] = held_bytes
            nodes ^= lowest
    return matched


def _restarted(before: EngineReport, now: EngineReport) -> bool:
    """Whether the engine started anew between two reports: it says so, or its counters fell."""
    if before.started_unix_s is not None and now.started_unix_s is not None:
        return now.started_unix_s - before.started_unix_s > _RESTART_S
    if before.prefix_queries is None or now.prefix_queries is None:
        return False
    return now.prefix_queries < before.prefix_queries
