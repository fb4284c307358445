"""Whether what nodes hold of a prompt counts: always, never, or while enough of the prompts are held."""

import logging
from collections import deque
from typing import Final

from extproc.config import CachePolicy

logger = logging.getLogger(__name__)

WINDOW_S: Final = 300.0
BUCKETS: Final = 30
"""The window moves in steps of this part of it."""
ON_RATIO: Final = 0.40
OFF_RATIO: Final = 0.35
ENOUGH_REQUESTS: Final = 20
"""Requests in the window before it tells anything."""


class Policy:
    """The configured policy, and with `adaptive` the one in force.

    What decides is the share of prompt tokens that the best candidate held already, whichever node was
    chosen: scattering destroys the very hits that would end it.
    """

    def __init__(self, configured: CachePolicy) -> None:
        self.configured = configured
        self.counts_matches = configured is CachePolicy.PREFIX_AWARE
        self.adapts = configured is CachePolicy.ADAPTIVE
        self._window = _Window()

    @property
    def in_force(self) -> CachePolicy:
        """What requests are routed by now: `lru` or `prefix-aware`."""
        return CachePolicy.PREFIX_AWARE if self.counts_matches else CachePolicy.LRU

    def note(self, held_tokens: float, prompt_tokens: float, now_s: float) -> None:
        """A request of which the best candidate holds so much; may change the policy in force."""
        if not self.adapts:
            return
        window = self._window
        window.add(held_tokens, prompt_tokens, now_s)
        if window.requests < ENOUGH_REQUESTS:
            return
        ratio = window.held_tokens / window.prompt_tokens
        if ratio < OFF_RATIO if self.counts_matches else ratio > ON_RATIO:
            self.counts_matches = not self.counts_matches
            logger.info(
                "the KV cache policy is %s now: of the prompt tokens of five minutes %.0f %% were cached",
                self.in_force,
                ratio * 100,
            )


class _Window:
    """Sums over the last five minutes."""

    def __init__(self) -> None:
        self.requests = 0
        self.held_tokens = 0.0
        self.prompt_tokens = 0.0
        self._buckets: deque[tuple[int, list[float]]] = deque()

    def add(self, held_tokens: float, prompt_tokens: float, now_s: float) -> None:
        number = int(now_s * BUCKETS / WINDOW_S)
        if not self._buckets or self._buckets[-1][0] != number:
            self._forget(number - BUCKETS)
            self._buckets.append((number, [0.0, 0.0, 0.0]))
        sums = self._buckets[-1][1]
        for at, value in enumerate((1.0, held_tokens, prompt_tokens)):
            sums[at] += value
        self.requests += 1
        self.held_tokens += held_tokens
        self.prompt_tokens += prompt_tokens

    def _forget(self, last: int) -> None:
        """Drop the buckets up to number `last`; sums are taken anew, so that rounding never adds up."""
        while self._buckets and self._buckets[0][0] <= last:
            self._buckets.popleft()
        kept = [sums for _, sums in self._buckets]
        self.requests = int(sum(sums[0] for sums in kept))
        self.held_tokens = sum(sums[1] for sums in kept)
        self.prompt_tokens = sum(sums[2] for sums in kept)
