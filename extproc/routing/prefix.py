"""Which nodes hold which blocks of which prompts, as far as the router knows."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from sys import getsizeof
from typing import Final

from extproc.routing.blocks import PromptBlocks
from extproc.routing.held import Held

UNKNOWN_CAPACITY_BYTES: Final = 2 << 20
"""Taken where an engine does not tell its own: half a million tokens, as of an 8B model on 80 GB."""
MAX_HINTS: Final = 10_000
"""The most hints known at a time; the least recently used ones go."""
MAX_REPORTS: Final = 100_000
"""The most numbers that nodes reported for hints and that are known at a time."""

# A dict is copied when it grows, and no request shall wait for a copy of all that the fleet holds.
_SHARDS: Final = 256
_SHARD: Final = _SHARDS - 1

# What Python takes for a hash, for its place in a run, and for a run.
_HASH_BYTES: Final = 32
_HELD_BYTES: Final = 12
_RUN_BYTES: Final = 500


@dataclass(slots=True, frozen=True)
class Match:
    """How much of a prompt the nodes hold: masks of nodes, each with the number of blocks that these hold.

    The numbers rise from step to step. A node is in one of them at most; in none, it holds nothing.
    """

    steps: tuple[tuple[int, int], ...]

    def matched_blocks(self, bit: int) -> int:
        """The node's longest unbroken run from the first block."""
        return next((blocks for nodes, blocks in self.steps if nodes >> bit & 1), 0)


class PrefixIndex:
    """The blocks that nodes hold. A node is known by the number of its bit in a mask of nodes.

    Methods raise KeyError for a bit that no node has.
    """

    def __init__(self) -> None:
        self._shards: tuple[dict[int, int], ...] = tuple({} for _ in range(_SHARDS))
        self._nodes: dict[int, Held] = {}

    def __len__(self) -> int:
        """How many different blocks are held."""
        return sum(map(len, self._shards))

    def add_node(self, capacity_bytes: int | None) -> int:
        """A bit for a new node, which holds nothing; the bits of removed nodes are given out again."""
        bit = next(bit for bit in count() if bit not in self._nodes)
        capacity_bytes = UNKNOWN_CAPACITY_BYTES if capacity_bytes is None else capacity_bytes
        self._nodes[bit] = Held(1 << bit, capacity_bytes)
        return bit

    def remove_node(self, bit: int) -> None:
        """Forget a node and what it holds."""
        self.clear_node(bit)
        del self._nodes[bit]

    def clear_node(self, bit: int) -> None:
        """The node has lost its cache."""
        held = self._nodes[bit]
        self._release(held, held.hashes())
        self._nodes[bit] = Held(held.mask, held.capacity_bytes)

    def set_capacity(self, bit: int, capacity_bytes: int) -> None:
        """What a node can hold, in bytes of prompts; what is over it is evicted."""
        held = self._nodes[bit]
        held.capacity_bytes = capacity_bytes
        self._release(held, held.fit())

    def match(self, blocks: PromptBlocks) -> Match:
        """How much of a prompt each node holds.

        The nodes that hold a block all hold those before it, so that where two blocks have the same ones,
        the blocks between need no look.
        """
        hashes, shards = blocks.hashes, self._shards
        if not hashes or not (nodes := shards[hashes[0] & _SHARD].get(hashes[0], 0)):
            return Match(())
        steps = []
        low, last = 0, len(hashes) - 1
        open_ends = [(last, nodes & shards[hashes[last] & _SHARD].get(hashes[last], 0))]
        while open_ends:
            high, holders = open_ends[-1]
            if holders == nodes:
                low = high
                open_ends.pop()
            elif high - low > 1:
                middle = (low + high) // 2
                block = hashes[middle]
                open_ends.append((middle, nodes & shards[block & _SHARD].get(block, 0)))
            else:
                steps.append((nodes ^ holders, high))
                nodes = holders
        if nodes:
            steps.append((nodes, len(hashes)))
        return Match(tuple(steps))

    def insert(self, bit: int, blocks: PromptBlocks, pin: bool) -> None:
        """A node gets a prompt: its blocks become the most recently used; `pin` keeps its system prompt.

        What the node cannot hold beside it is evicted.
        """
        held = self._nodes[bit]
        mask, shards = held.mask, self._shards
        for block in held.insert(blocks, blocks.system_blocks if pin else 0):
            shard = shards[block & _SHARD]
            others = shard.setdefault(block, mask)  # most blocks are on one node: they share one mask
            if others is not mask:
                shard[block] = others | mask
        self._release(held, held.fit())

    def forget(self, bit: int, blocks: PromptBlocks, from_block: int) -> None:
        """The node does not hold a prompt's blocks from number `from_block` on, nor what follows them."""
        held = self._nodes[bit]
        self._release(held, held.forget(blocks.hashes, from_block))

    def withdraw(self, bit: int, blocks: PromptBlocks, from_block: int) -> None:
        """The node did not get a prompt: it lacks the blocks from `from_block` on that no other needs."""
        held = self._nodes[bit]
        self._release(held, held.withdraw(blocks.hashes, from_block))

    def evict(self, bit: int, to_bytes: int) -> None:
        """Take from a node its least recently used blocks without a pin, until it holds `to_bytes`."""
        held = self._nodes[bit]
        self._release(held, held.evict(to_bytes))

    def unpin(self) -> None:
        """Take all pins, of all nodes."""
        for held in self._nodes.values():
            held.unpin()

    def used_bytes(self, bit: int) -> int:
        """How many bytes of prompts a node holds."""
        return self._nodes[bit].used_bytes

    def pinned_bytes(self, bit: int) -> int:
        """How many of a node's bytes have a pin."""
        return self._nodes[bit].pinned_bytes

    def blocks(self, bit: int) -> int:
        """How many blocks a node holds."""
        return self._nodes[bit].blocks

    def memory_bytes(self) -> int:
        """About what the index takes of the process's memory."""
        runs = sum(len(held.loose) + len(held.pins) for held in self._nodes.values())
        blocks = sum(map(self.blocks, self._nodes))
        kept = len(self)
        masks = min(kept, blocks - kept) * getsizeof(1 << len(self._nodes))
        return (
            sum(map(getsizeof, self._shards))
            + kept * _HASH_BYTES
            + masks
            + blocks * _HELD_BYTES
            + runs * _RUN_BYTES
        )

    def _release(self, held: Held, blocks: Iterable[int]) -> None:
        """Take a node out of the masks of blocks that it holds no longer."""
        others, shards = ~held.mask, self._shards
        for block in blocks:
            shard = shards[block & _SHARD]
            holders = shard.get(block, 0) & others
            if holders:
                shard[block] = holders
            else:
                shard.pop(block, None)


@dataclass(slots=True)
class _Hint:
    """The last block of the system prompt it names, and the bytes of it that nodes reported, by bit."""

    block: int
    reports: dict[int, int] = field(default_factory=dict)


class HintTable:
    """What a client's `kv_prefix_hint` names for a model, and which nodes reported it cached."""

    def __init__(self) -> None:
        self._hints: OrderedDict[tuple[str, str], _Hint] = OrderedDict()
        self._reports = 0

    def __len__(self) -> int:
        """How many hints are known."""
        return len(self._hints)

    def bind(self, model: str, hint: str, blocks: PromptBlocks) -> None:
        """The hint names this prompt's system prompt; without one there is nothing to name.

        What nodes reported for another text is void.
        """
        if not blocks.system_blocks:
            return
        key, (block, _) = (model, hint), _system_end(blocks)
        known = self._hints.get(key)
        if known is not None and known.block == block:
            self._hints.move_to_end(key)
            return
        self._drop(key)
        self._hints[key] = _Hint(block)
        self._trim()

    def reports(self, model: str, hint: str, blocks: PromptBlocks) -> Mapping[int, int]:
        """The bytes of this prompt's system prompt that nodes reported cached for the hint, by bit."""
        known = self._hints.get((model, hint))
        if known is None or not blocks.system_blocks or known.block != _system_end(blocks)[0]:
            return {}
        return known.reports

    def report(self, model: str, hint: str, blocks: PromptBlocks, bit: int, cached_bytes: int) -> None:
        """A node found that many bytes of the prompt cached; ignored when the hint names another text now."""
        known = self._hints.get((model, hint))
        if known is None or not blocks.system_blocks:
            return
        block, end_bytes = _system_end(blocks)
        if known.block == block:
            self._reports += bit not in known.reports
            known.reports[bit] = min(cached_bytes, end_bytes)
            self._trim()

    def clear_node(self, bit: int) -> None:
        """The node has lost its cache."""
        for known in self._hints.values():
            self._reports -= known.reports.pop(bit, None) is not None

    def _drop(self, key: tuple[str, str]) -> None:
        if known := self._hints.pop(key, None):
            self._reports -= len(known.reports)

    def _trim(self) -> None:
        while len(self._hints) > MAX_HINTS or self._reports > MAX_REPORTS:
            self._drop(next(iter(self._hints)))


def _system_end(blocks: PromptBlocks) -> tuple[int, int]:
    """The last block of a system prompt, and where it ends."""
    last = blocks.system_blocks - 1
    return blocks.hashes[last], blocks.ends_bytes[last]
