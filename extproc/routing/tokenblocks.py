"""What one engine's KV cache holds of tokens, exactly: what it stored, less what it removed.

The engine's hashes are opaque names. A block is known by a key of our own, chained over its tokens and over
whatever else the engine's hash depends on (the salt, the adapter, the images), so that the blocks of a prompt
whose tokens are known can be looked for.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, TypeAlias

from xxhash import xxh3_64_intdigest

MAX_BLOCKS: Final = 1 << 21
"""Of one node: more than any engine has. What comes beyond is not kept."""
PLAIN: Final = b"\xc0"
"""What a block's hash depends on beside tokens, as msgpack: nothing."""

EngineHash: TypeAlias = int | bytes


@dataclass(slots=True, frozen=True)
class Stored:
    """Blocks in a row that the engine has now; `extras`: what each depends on beside tokens, as msgpack."""

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: "array[int]"
    block_tokens: int
    extras: Sequence[bytes] | None = None
    group: int = 0
    """Which of the engine's groups of layers; all of them have the same blocks."""


@dataclass(slots=True, frozen=True)
class Removed:
    """Blocks that the engine has a copy less of."""

    hashes: Sequence[EngineHash]
    group: int = 0


@dataclass(slots=True, frozen=True)
class Cleared:
    """The engine has no blocks any more."""


CacheEvent: TypeAlias = Stored | Removed | Cleared


def chain(
    tokens: "array[int]", block_tokens: int, root: int, extras: Iterable[bytes] | None = None
) -> list[int]:
    """The keys of the full blocks of `tokens`, first to last; `root`: the key of what comes before."""
    view = memoryview(tokens)
    starts = range(0, len(view) - block_tokens + 1, block_tokens)
    keys, key = [], root
    for start, extra in zip(starts, repeat(PLAIN) if extras is None else extras, strict=False):
        key = xxh3_64_intdigest(view[start : start + block_tokens], key)
        if extra != PLAIN:
            key = xxh3_64_intdigest(extra, key)
        keys.append(key)
    return keys


class TokenBlocks:
    """The blocks of one node. Methods return the keys that came, or that went with their last copy.

    A name may be stored more than once. A key has several names where the engine does not say all that its
    hashes depend on.
    """

    __slots__ = ("_copies", "_group", "_names", "block_tokens", "root")

    def __init__(self, root: int) -> None:
        self.root = root
        self.block_tokens: int | None = None
        """Tokens in a block; `None` until the engine has stored one."""
        self._names: dict[EngineHash, tuple[int, int]] = {}
        """The key of each, and how many copies have this name."""
        self._copies: dict[int, int] = {}
        """Of each key, whatever their names."""
        self._group: int | None = None

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: int) -> bool:
        return key in self._copies

    def store(self, stored: Stored) -> list[int]:
        """Hold more blocks; none of them where it is not known what they follow."""
        if self._group is None:
            self._group, self.block_tokens = stored.group, stored.block_tokens
        root = self.root if stored.parent is None else self._names.get(stored.parent, (None,))[0]
        foreign = (stored.group, stored.block_tokens) != (self._group, self.block_tokens)
        if root is None or foreign or len(self._names) >= MAX_BLOCKS:
            return []
        keys = chain(stored.tokens, stored.block_tokens, root, stored.extras)
        for name, key in zip(stored.hashes, keys, strict=False):
            first, copies = self._names.get(name, (key, 0))
            self._names[name] = first, copies + 1
            self._copies[first] = self._copies.get(first, 0) + 1
        return keys

    def remove(self, removed: Removed) -> list[int]:
        """Hold a copy less of each block."""
        gone = []
        for name in removed.hashes if removed.group == self._group else ():
            key, copies = self._names.pop(name, (0, 0))
            if not copies:
                continue
            if copies > 1:
                self._names[name] = key, copies - 1
            self._copies[key] -= 1
            if not self._copies[key]:
                del self._copies[key]
                gone.append(key)
        return gone

    def clear(self) -> None:
        """Hold nothing."""
        self._group = self.block_tokens = None
        self._names.clear()
        self._copies.clear()
