"""Makes the prompt index true where engines tell which blocks of tokens they store and remove.

A decision costs nothing more for it: it looks prompts up in the index as ever. Beside the decisions, the
tokens of prompts are learned, and with them at which block of tokens each block of a prompt ends. From then
on the index follows the events. A node that removes the block of tokens at which a block of a prompt ends
loses that one and what follows it; a node that stores it gains it and all before it, whoever sent the prompt.
For prompts not learned yet the index stays what it is elsewhere: a record of what was sent where.

Where a block of a prompt ends among the tokens is taken from its share of the prompt's bytes. Engines remove
what follows a block before they remove it, so that ends alone tell.
"""

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain as concat
from itertools import groupby, repeat
from typing import Final, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from extproc.routing.blocks import PromptBlocks
from extproc.routing.caches import Caches
from extproc.routing.node import Node
from extproc.routing.tokenblocks import PLAIN, CacheEvent, Removed, Stored, TokenBlocks, chain

MAX_ENDS: Final = 200_000
"""The most blocks of prompts whose tokens are known at a time; the prompts learned first are forgotten."""

_Kind: TypeAlias = tuple[int, int]
"""Nodes whose keys are the same for the same tokens: the root of their keys, and the tokens of a block."""
_End: TypeAlias = tuple[PromptBlocks, int, int]
"""A block of tokens at which blocks of a prompt end: the number of the first, and that after the last."""


@dataclass(slots=True, frozen=True)
class Tokens:
    """The tokens of a prompt, as engines have them; `adapter`: the LoRA that the request asks for."""

    ids: "array[int]"
    salt: str | None = None
    adapter: str | None = None

    def keys(self, root: int, block_tokens: int) -> list[int]:
        """Those of its full blocks."""
        always = [] if self.adapter is None else [self.adapter]
        first = always if self.salt is None else [*always, self.salt]
        extras = concat((_packed(first),), repeat(_packed(always)))
        return chain(self.ids, block_tokens, root, extras)


@dataclass(slots=True)
class _Learned:
    """A prompt, and for each kind of nodes the keys at which its blocks end."""

    blocks: PromptBlocks
    ends: dict[_Kind, tuple[int, ...]] = field(default_factory=dict)


class ExactCaches:
    """What the engines with KV events hold, and the prompts whose tokens are known."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._nodes: dict[str, Node] = {}
        self._held: dict[str, TokenBlocks] = {}
        self._secret = secrets.randbits(64)
        self._learned: OrderedDict[int, _Learned] = OrderedDict()
        self._size = 0
        self._ends: dict[int, _End] = {}

    def add(self, node: Node) -> None:
        """One more node; of one without KV events nothing is known here."""
        if node.config.kv_events is not None:
            self._nodes[node.id] = node
            root = xxh3_64_intdigest("\0".join(sorted(_models(node))).encode(), self._secret)
            self._held[node.id] = TokenBlocks(root)

    def remove(self, node: Node) -> None:
        """The node has left."""
        self._nodes.pop(node.id, None)
        self._held.pop(node.id, None)

    def blocks(self, node: Node) -> int:
        """How many blocks of tokens the node is known to hold."""
        held = self._held.get(node.id)
        return 0 if held is None else len(held)

    def block_tokens(self, node: Node) -> int | None:
        """Tokens in a block of the node's; `None` while it is not known."""
        held = self._held.get(node.id)
        return None if held is None else held.block_tokens

    def happened(self, node: Node, event: CacheEvent) -> None:
        """The engine's cache has changed."""
        held = self._held[node.id]
        match event:
            case Stored():
                self._gained(node, held.store(event))
            case Removed():
                self._lost(node, held.remove(event))
            case _:
                held.clear()
                self._caches.lost(node)

    def forget(self, node: Node) -> None:
        """Events were missed: what the node holds is not known exactly. The index keeps what it has."""
        self._held[node.id].clear()

    def wants(self, node: Node, blocks: PromptBlocks) -> bool:
        """Whether the tokens of a prompt that goes to this node are worth asking for."""
        held = self._held.get(node.id)
        if held is None or held.block_tokens is None or not blocks.hashes:
            return False
        known = self._learned.get(blocks.hashes[-1])
        return known is None or (held.root, held.block_tokens) not in known.ends

    def learn(self, model: str, blocks: PromptBlocks, tokens: Tokens) -> None:
        """The tokens of a prompt to a model, by the engines' name of it; nodes that hold some gain it."""
        learned = _Learned(blocks)
        for node_id, held in self._held.items():
            node = self._nodes[node_id]
            if held.block_tokens is None or model not in _models(node):
                continue
            kind = held.root, held.block_tokens
            if kind not in learned.ends:
                learned.ends[kind] = _ends(blocks, tokens.keys(*kind), len(tokens.ids) / held.block_tokens)
            if count := _run(held, learned.ends[kind]):
                self._caches.insert(node, _first(blocks, count))
        self._keep(learned)

    def settle(self, node: Node, blocks: PromptBlocks) -> None:
        """The request is over: what the node did not store of its prompt, though it was sent there, it lacks.

        A prompt of which it holds nothing at all was not rendered as we think, which tells nothing.
        """
        held = self._held.get(node.id)
        if held is None or held.block_tokens is None or not node.events.exact or not blocks.hashes:
            return
        learned = self._learned.get(blocks.hashes[-1])
        ends = learned.ends.get((held.root, held.block_tokens), ()) if learned else ()
        if 0 < (count := _run(held, ends)) < len(ends):
            self._caches.index.forget(node.slot, blocks, count)

    def _gained(self, node: Node, keys: Sequence[int]) -> None:
        """The last one decides: the engine holds all that comes before a block that it stores."""
        for key in reversed(keys):
            if end := self._ends.get(key):
                self._caches.insert(node, _first(end[0], end[2]))
                return

    def _lost(self, node: Node, keys: Iterable[int]) -> None:
        for key in keys:
            if end := self._ends.get(key):
                self._caches.index.forget(node.slot, end[0], end[1])

    def _keep(self, learned: _Learned) -> None:
        """Where prompts share a block of tokens, the latest counts: they share the blocks before it, too."""
        name = learned.blocks.hashes[-1]
        self._drop(name)
        self._learned[name] = learned
        for ends in learned.ends.values():
            self._size += len(ends)
            for key, numbers in groupby(range(len(ends)), ends.__getitem__):
                first, *others = numbers
                self._ends[key] = learned.blocks, first, first + len(others) + 1
        while self._size > MAX_ENDS:
            self._drop(next(iter(self._learned)))

    def _drop(self, name: int) -> None:
        learned = self._learned.pop(name, None)
        for ends in learned.ends.values() if learned else ():
            self._size -= len(ends)
            for key in ends:
                if learned and (end := self._ends.get(key)) and end[0] is learned.blocks:
                    del self._ends[key]


def _models(node: Node) -> set[str]:
    """Its models by the engine's names."""
    return set(map(node.config.engine_model, node.config.serves))


def _packed(extra: list[str]) -> bytes:
    """As engines name what a block depends on beside tokens."""
    return msgspec.msgpack.encode(extra) if extra else PLAIN


def _ends(blocks: PromptBlocks, keys: Sequence[int], token_blocks: float) -> tuple[int, ...]:
    """The key at which each block of a prompt ends; the prompt's tokens may leave the last of them open."""
    if not keys:
        return ()
    per_byte = token_blocks / blocks.total_bytes
    return tuple(keys[min(max(round(end * per_byte), 1), len(keys)) - 1] for end in blocks.ends_bytes)


def _run(held: TokenBlocks, ends: Sequence[int]) -> int:
    """How many of a prompt's blocks are held, from the first on without a gap."""
    return next((number for number, key in enumerate(ends) if key not in held), len(ends))


def _first(blocks: PromptBlocks, count: int) -> PromptBlocks:
    """A prompt's first blocks."""
    if count == len(blocks.hashes):
        return blocks
    return PromptBlocks(
        blocks.hashes[:count], blocks.ends_bytes[:count], blocks.total_bytes, min(blocks.system_blocks, count)
    )
