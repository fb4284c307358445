"""An approximate index of prefixes, as routers keep one: what was sent where, not what engines have."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """For each node the prompt units sent to it, the least recently used forgotten past its capacity."""

    def __init__(self, capacity_units: Sequence[int]) -> None:
        self._capacity_units = capacity_units
        self._units: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacity_units]

    def match(self, units: Sequence[int], node: int) -> int:
        """How many of the leading units the node is believed to have."""
        known = self._units[node]
        for index, unit in enumerate(units):
            if unit not in known:
                return index
        return len(units)

    def add(self, units: Sequence[int], node: int) -> None:
        """The node gets these units; the beginning of the prompt counts as used last."""
        known = self._units[node]
        for unit in reversed(units):
            known[unit] = None
            known.move_to_end(unit)
        while len(known) > self._capacity_units[node]:
            known.popitem(last=False)

    def victims(self, units: int, node: int) -> list[int]:
        """The units that would be forgotten for this many new ones."""
        known = self._units[node]
        excess = len(known) + units - self._capacity_units[node]
        return [unit for unit, _ in zip(known, range(excess), strict=False)]
