"""How long a request may wait so that its answer can still come in time.

Under lasting overload a queue serves those who have waited almost as long as they may: without this, answers
would begin that nobody gets, and the whole fleet would work for nothing.
"""

from collections import deque
from typing import Final

ANSWERS_KEPT: Final = 64
"""Answers a model that tell how long the next ones take."""
SURE_PCT: Final = 90
"""So many of them are whole in time after the longest wait."""
STREAM_RATIO: Final = 0.8
"""A stream may wait for this part of its time: the rest is for its beginning, on up to three nodes."""
LEAST_RATIO: Final = 0.5
"""A request may wait for this part of its time in any case."""


class Patience:
    """What answers have taken lately, from the pick to their end. Streams have none that would matter."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}

    def answered(self, model: str, seconds: float) -> None:
        """An answer took so long."""
        self._seconds.setdefault(model, deque(maxlen=ANSWERS_KEPT)).append(seconds)

    def longest_s(self, model: str, timeout_s: float) -> float:
        """How long a request may wait whose answer must be there after `timeout_s`."""
        kept = sorted(self._seconds.get(model, ()))
        if not kept:
            return timeout_s
        sure_s = kept[(SURE_PCT * len(kept) - 1) // 100]
        return max(timeout_s - sure_s, timeout_s * LEAST_RATIO)
