"""A ratio over the last five minutes."""

from collections import deque
from typing import Final

WINDOW_S: Final = 300.0
BUCKETS: Final = 30
"""The window moves in steps of this part of it."""


class RatioWindow:
    """Parts of wholes over the last five minutes; `count` and the sums are as of the last `add`."""

    __slots__ = ("_buckets", "count", "part", "whole")

    def __init__(self) -> None:
        self.count = 0
        self.part = 0.0
        self.whole = 0.0
        self._buckets: deque[tuple[int, list[float]]] = deque()

    def add(self, part: float, whole: float, now_s: float) -> None:
        """Count one more; what is older than the window falls out."""
        number = _bucket(now_s)
        if not self._buckets or self._buckets[-1][0] != number:
            self._forget(number - BUCKETS)
            self._buckets.append((number, [0.0, 0.0, 0.0]))
        sums = self._buckets[-1][1]
        for at, value in enumerate((1.0, part, whole)):
            sums[at] += value
        self.count += 1
        self.part += part
        self.whole += whole

    def ratio(self, now_s: float) -> float | None:
        """The parts over the wholes as of now; `None` without any. Changes nothing: any thread may ask."""
        first = _bucket(now_s) - BUCKETS
        kept = [sums for number, sums in self._buckets.copy() if number > first]
        whole = sum(sums[2] for sums in kept)
        return sum(sums[1] for sums in kept) / whole if whole else None

    def _forget(self, last: int) -> None:
        """Drop the buckets up to number `last`; sums are taken anew, so that rounding never adds up."""
        while self._buckets and self._buckets[0][0] <= last:
            self._buckets.popleft()
        kept = [sums for _, sums in self._buckets]
        self.count = int(sum(sums[0] for sums in kept))
        self.part = sum(sums[1] for sums in kept)
        self.whole = sum(sums[2] for sums in kept)


def _bucket(now_s: float) -> int:
    return int(now_s * BUCKETS / WINDOW_S)
