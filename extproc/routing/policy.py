"""Whether what nodes hold of a prompt counts: always, never, or while enough of the prompts are held."""

import logging
from typing import Final

from extproc.config import CachePolicy
from extproc.routing.window import RatioWindow

logger = logging.getLogger(__name__)

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
        self._window = RatioWindow()

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
        if window.count < ENOUGH_REQUESTS:
            return
        ratio = window.part / window.whole
        if ratio < OFF_RATIO if self.counts_matches else ratio > ON_RATIO:
            self.counts_matches = not self.counts_matches
            logger.info(
                "the KV cache policy is %s now: of the prompt tokens of five minutes %.0f %% were cached",
                self.in_force,
                ratio * 100,
            )
