"""The KV memory of a replayed engine, counted in tokens: prompt units shared by prefix, all else private."""

from collections import OrderedDict
from collections.abc import Sequence

from extproc.simulator.replay.traces import UNIT_TOKENS


class UnitCache:
    """Full prompt units that nobody holds stay until their room is needed, least recently used first out."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._private_tokens = 0
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def held_tokens(self) -> int:
        """Tokens that some request holds."""
        return len(self._holders) * UNIT_TOKENS + self._private_tokens

    def match(self, units: Sequence[int]) -> int:
        """How many of the leading `units` are there, without a gap."""
        for index, unit in enumerate(units):
            if unit not in self._holders and unit not in self._idle:
                return index
        return len(units)

    def hold(self, matched: Sequence[int], tokens: int) -> bool:
        """Hold the `matched` units and private room, `tokens` in all; False, and nothing done, if full."""
        waking = sum(unit in self._idle for unit in matched)
        private = tokens - len(matched) * UNIT_TOKENS
        if self.held_tokens + waking * UNIT_TOKENS + private > self.capacity_tokens:
            return False
        for unit in matched:
            self._hold(unit)
        self._private_tokens += private
        while self.held_tokens + len(self._idle) * UNIT_TOKENS > self.capacity_tokens:
            self._idle.popitem(last=False)
        return True

    def publish(self, units: Sequence[int]) -> None:
        """Make units that were computed in private room findable by others."""
        self._private_tokens -= len(units) * UNIT_TOKENS
        for unit in units:
            self._hold(unit)

    def release(self, units: Sequence[int], private_tokens: int) -> None:
        """Give back what a request holds; the end of its prompt will be evicted before the beginning."""
        self._private_tokens -= private_tokens
        for unit in reversed(units):
            holders = self._holders[unit] - 1
            if holders:
                self._holders[unit] = holders
            else:
                del self._holders[unit]
                self._idle[unit] = None

    def _hold(self, unit: int) -> None:
        self._idle.pop(unit, None)
        self._holders[unit] = self._holders.get(unit, 0) + 1
