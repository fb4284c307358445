"""What one node holds of prompts: a radix tree of block hashes, which loses its least recently used leaves.

It is closed under prefixes: with a block it holds all that come before it. A prompt is inserted whole and
used from its last block to its first, so that the least recently used block is always the end of something;
and with a block that is forgotten goes all that follows it.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Final

from extproc.routing.blocks import PromptBlocks

PINNED_RATIO: Final = 0.25
"""The most of a node's capacity that pinned blocks may take."""
LEAST_BLOCK_BYTES: Final = 64
"""What a block counts at least: short system prompts, each with a block of its own, take memory too."""


@dataclass(slots=True, eq=False)
class _Tree:
    """The root of the radix tree of what a node holds: runs by their first block."""

    children: dict[int, "_Run"] = field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class _Run(_Tree):
    """Blocks in a row that were always used together; `ends` are bytes of the prompt, as is `start`."""

    parent: _Tree
    start: int
    hashes: list[int]
    ends: "array[int]"
    pinned: bool = False

    def shared(self, hashes: Sequence[int], at: int, end: int) -> int:
        """How many of its blocks a prompt has from number `at`, where its first one stands, to `end`."""
        most = min(len(self.hashes), end - at)
        if self.hashes[most - 1] == hashes[at + most - 1]:  # they are chained: so are all before it
            return most
        return bisect_left(range(most - 1), True, key=lambda i: self.hashes[i] != hashes[at + i])

    def size_bytes(self, from_block: int = 0) -> int:
        """The bytes of its blocks from a number on."""
        return self.ends[-1] - (self.ends[from_block - 1] if from_block else self.start)

    def without(self, freed_bytes: float) -> int:
        """How many of its blocks are left when so many bytes, or just more, are taken from its end."""
        return bisect_right(self.ends, self.ends[-1] - freed_bytes)


class Held:
    """What one node holds, and in which order it was used. Methods return the hashes that came or went."""

    __slots__ = ("blocks", "capacity_bytes", "loose", "mask", "pinned_bytes", "pins", "root", "used_bytes")

    def __init__(self, mask: int, capacity_bytes: int) -> None:
        self.mask = mask
        self.capacity_bytes = capacity_bytes
        self.blocks = 0
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.root = _Tree()
        # Least recently used first. Within a run, that is the last block.
        self.loose: OrderedDict[_Run, None] = OrderedDict()
        self.pins: OrderedDict[_Run, None] = OrderedDict()

    def runs(self) -> Iterator[_Run]:
        """All runs, in no order."""
        yield from self.loose
        yield from self.pins

    def hashes(self) -> Iterator[int]:
        """All blocks, in no order."""
        return chain.from_iterable(run.hashes for run in self.runs())

    def insert(self, blocks: PromptBlocks, pinned: int) -> list[int]:
        """Use a prompt's blocks, and pin that many of the first."""
        hashes = blocks.hashes
        tree, at = self.root, 0
        path: list[_Run] = []
        new: list[int] = []
        while at < len(hashes):
            end = pinned if at < pinned else len(hashes)
            run = tree.children.get(hashes[at])
            if run is None:
                run = self._grow(tree, blocks, at, end)
                new += run.hashes
            elif (shared := run.shared(hashes, at, end)) < len(run.hashes):
                run = self._split(run, shared)
            if at < pinned and not run.pinned:
                self._set_pinned(run, True)
            path.append(run)
            tree, at = run, at + len(run.hashes)
        for run in reversed(path):
            self._order(run).move_to_end(run)
        return new

    def fit(self) -> list[int]:
        """Take back pins, then evict, until the capacity holds both."""
        most_bytes = self.capacity_bytes * PINNED_RATIO
        self._unpin(self.pinned_bytes - most_bytes)
        while len(self.pins) > most_bytes / LEAST_BLOCK_BYTES:
            self._set_pinned(next(iter(self.pins)), False)
        return self.evict(self.capacity_bytes)

    def evict(self, to_bytes: float) -> list[int]:
        """Remove the least recently used blocks that have no pin."""
        gone: list[int] = []
        most_blocks = int(to_bytes / LEAST_BLOCK_BYTES)
        while self.loose and (self.used_bytes > to_bytes or self.blocks > most_blocks):
            run = next(iter(self.loose))
            left = min(len(run.hashes), len(run.hashes) - self.blocks + most_blocks)
            gone += self._cut(run, max(0, min(left, run.without(self.used_bytes - to_bytes))))
        return gone

    def forget(self, hashes: Sequence[int], from_block: int) -> list[int]:
        """Remove a prompt's blocks from number `from_block` on, and all that follow them in any prompt."""
        tree, at = self.root, 0
        while at < len(hashes) and (run := tree.children.get(hashes[at])):
            shared = run.shared(hashes, at, len(hashes))
            if at + shared > from_block:
                return self._cut(run, max(0, from_block - at))
            tree, at = run, at + shared
        return []

    def withdraw(self, hashes: Sequence[int], from_block: int) -> list[int]:
        """Remove a prompt's blocks from its end back to `from_block`, as far as no other needs them."""
        path: list[tuple[_Run, int]] = []
        tree, at = self.root, 0
        while at < len(hashes) and (run := tree.children.get(hashes[at])):
            if run.shared(hashes, at, len(hashes)) < len(run.hashes):
                break
            path.append((run, at))
            tree, at = run, at + len(run.hashes)
        gone: list[int] = []
        for run, at in reversed(path):
            if run.children or at + len(run.hashes) <= from_block:
                break
            gone += self._cut(run, max(0, from_block - at))
        return gone

    def unpin(self) -> None:
        """Take all pins."""
        self._unpin(inf)

    def _order(self, run: _Run) -> OrderedDict[_Run, None]:
        return self.pins if run.pinned else self.loose

    def _grow(self, parent: _Tree, blocks: PromptBlocks, at: int, end: int) -> _Run:
        """Hold the blocks from `at` to `end` as a new run."""
        run = _Run(
            parent=parent,
            start=blocks.ends_bytes[at - 1] if at else 0,
            hashes=list(blocks.hashes[at:end]),
            ends=array("I", blocks.ends_bytes[at:end]),
        )
        parent.children[run.hashes[0]] = run
        self.loose[run] = None
        self.blocks += len(run.hashes)
        self.used_bytes += run.size_bytes()
        return run

    def _split(self, run: _Run, length: int) -> _Run:
        """Make a run's first blocks one of their own; it counts as used now, and the rest keeps its place."""
        head = _Run(
            parent=run.parent,
            start=run.start,
            hashes=run.hashes[:length],
            ends=run.ends[:length],
            pinned=run.pinned,
        )
        del run.hashes[:length], run.ends[:length]
        head.parent.children[head.hashes[0]] = head
        head.children[run.hashes[0]] = run
        run.parent, run.start = head, head.ends[-1]
        self._order(head)[head] = None
        return head

    def _cut(self, run: _Run, length: int) -> list[int]:
        """Shorten a run to `length` blocks, or to none, and remove what follows it."""
        gone = run.hashes[length:]
        freed_bytes = run.size_bytes(length)
        self.blocks -= len(gone)
        self.used_bytes -= freed_bytes
        self.pinned_bytes -= freed_bytes * run.pinned
        del run.hashes[length:], run.ends[length:]
        for child in list(run.children.values()):
            gone += self._cut(child, 0)
        if not length:
            del run.parent.children[gone[0]], self._order(run)[run]
        return gone

    def _set_pinned(self, run: _Run, pinned: bool) -> None:
        """Pin a run or take its pin; it counts as used now."""
        del self._order(run)[run]
        run.pinned = pinned
        self._order(run)[run] = None
        self.pinned_bytes += run.size_bytes() if pinned else -run.size_bytes()

    def _unpin(self, surplus_bytes: float) -> None:
        """Take the pins of the least recently used blocks; what follows them still goes before they go."""
        while self.pins and surplus_bytes > 0:
            run = next(iter(self.pins))
            if length := run.without(surplus_bytes):
                self.pins.move_to_end(self._split(run, length), last=False)
            surplus_bytes -= run.size_bytes()
            self._set_pinned(run, False)
