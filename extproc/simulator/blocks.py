"""The KV cache as vLLM keeps it: fixed blocks under chained hashes, shared by prefix, evicted leaf first."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

BLOCK_TOKENS = 16
TOKEN_BYTES = 4
_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


def block_hashes(tokens: bytes, seed: int = 0) -> list[int]:
    """The hash of each full block of `tokens` (4 bytes each), each seeded by the one before it."""
    hashes = []
    for start in range(0, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        seed = xxh3_64_intdigest(tokens[start : start + _BLOCK_BYTES], seed)
        hashes.append(seed)
    return hashes


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks one request holds: those published under a hash, in chain order, and those not yet."""

    published: list[int] = field(default_factory=list)
    private: int = 0

    @property
    def blocks(self) -> int:
        """Blocks held in all."""
        return len(self.published) + self.private


class BlockCache:
    """A fixed number of blocks. Those that nobody holds stay cached until their room is needed."""

    def __init__(self, capacity: int, on_removed: Callable[[int], None] | None = None) -> None:
        self.capacity = capacity
        self._on_removed = on_removed
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._private = 0

    @property
    def held(self) -> int:
        """Blocks that some lease holds."""
        return len(self._holders) + self._private

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and that can still be matched."""
        return len(self._idle)

    @property
    def used_ratio(self) -> float:
        """Held blocks over capacity, 0-1."""
        return self.held / self.capacity

    def match(self, hashes: Sequence[int]) -> int:
        """How many of the leading `hashes` are in the cache, without a gap."""
        for index, block in enumerate(hashes):
            if block not in self._holders and block not in self._idle:
                return index
        return len(hashes)

    def lease(self, matched: Sequence[int], blocks: int) -> Lease | None:
        """Hold the cached `matched` and private blocks, `blocks` in all; None if there is no room."""
        waking = sum(block in self._idle for block in matched)
        if self.held + waking + blocks - len(matched) > self.capacity:
            return None
        lease = Lease()
        for block in matched:
            self._hold(block)
            lease.published.append(block)
        self.grow(lease, blocks)
        return lease

    def grow(self, lease: Lease, blocks: int) -> bool:
        """Add private blocks up to `blocks` in all; False, with nothing changed, if there is no room."""
        missing = blocks - lease.blocks
        if missing <= 0:
            return True
        if self.held + missing > self.capacity:
            return False
        while self.held + len(self._idle) + missing > self.capacity:
            block, _ = self._idle.popitem(last=False)
            if self._on_removed is not None:
                self._on_removed(block)
        lease.private += missing
        self._private += missing
        return True

    def publish(self, lease: Lease, hashes: Sequence[int]) -> None:
        """Make the lease's next private blocks, now full, findable under `hashes`."""
        for block in hashes:
            lease.private -= 1
            self._private -= 1
            self._hold(block)
            lease.published.append(block)

    def release(self, lease: Lease) -> None:
        """Give all back; the last blocks will be evicted before the first. Harmless if repeated."""
        self._private -= lease.private
        lease.private = 0
        for block in reversed(lease.published):
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
            else:
                del self._holders[block]
                self._idle[block] = None
        lease.published.clear()

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1
