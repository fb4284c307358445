"""What is booked on every node, one array slot a node, so that all costs come out of one pass."""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

WINDOW_PICKS: Final = 256
"""Picks that tell the nodes' rate of arrivals and how busy they are with prefill."""
LEAST_WINDOW_S: Final = 1.0
"""A few picks at the same moment tell no rate."""
QUEUE_WEIGHT: Final = 0.5
BUSIEST: Final = 0.9
"""Past this share of time at prefill, the queueing estimate grows no more."""
_RATIO_SHARE: Final = 32
_RATIO_S: Final = 0.1
"""The queueing estimate is taken anew after such a part of the picks that it comes from, or so long."""


class Work(msgspec.Struct, frozen=True, gc=False):
    """What a request brings to a node: tokens, and predicted seconds of prefill."""

    prompt_tokens: float
    output_tokens: float
    prefill_s: float

    @property
    def context_tokens(self) -> float:
        """The prompt and half the answer: what decoding reads on average."""
        return self.prompt_tokens + self.output_tokens * 0.5


@dataclass(slots=True)
class _Prefill:
    """The prefill booked on one node since it was last without requests."""

    booked_s: float = 0.0
    """All of it, done or not: what was booked after a request is behind it."""
    live_s: float = 0.0
    """That of the requests in flight: the wait is never longer."""
    since_s: float = 0.0
    """When a pick last found no prefill to wait for."""


class Loads:
    """The bookings of all nodes, as sums. Slots are given out by `add`, and never move until `remove`."""

    def __init__(self) -> None:
        self.size = 0
        """Slots, with those that are free."""
        self.in_flight: Floats = np.zeros(0)
        self.foreign: Floats = np.zeros(0)
        """Requests that others sent, as the engines report them."""
        self.any_foreign = False
        self.tokens: Floats = np.zeros(0)
        """Prompts and answers of the requests in flight."""
        self.context_tokens: Floats = np.zeros(0)
        """The same of what decoding reads on average."""
        self.busy_until_s: Floats = np.zeros(0)
        """When the prefill work booked on a node is predicted to be done."""
        self.picks: Floats = np.zeros(0)
        """How many of the last picks went there."""
        self.picks_prefill_s: Floats = np.zeros(0)
        """And the prefill that these brought."""
        self._free: list[int] = []
        self._prefills: list[_Prefill] = []
        self._last_picks: deque[tuple[float, int, float]] = deque()
        self._ratio: Floats = np.zeros(0)
        self._ratio_until_s = -math.inf
        self._ratio_picks_left = 0

    def add(self) -> int:
        """A slot for one more node: the lowest that is free."""
        if self._free:
            return heapq.heappop(self._free)
        self.size += 1
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, np.append(value, 0.0))
        self._prefills.append(_Prefill())
        return self.size - 1

    def remove(self, slot: int) -> None:
        """The slot is free: nothing is booked there."""
        assert not self.in_flight[slot]
        self.set_foreign(slot, 0)
        self._last_picks = deque(pick for pick in self._last_picks if pick[1] != slot)
        self._ratio_picks_left = 0
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value[slot] = 0.0
        heapq.heappush(self._free, slot)

    def set_foreign(self, slot: int, requests: int) -> None:
        """A node's engine has told how many requests of others it has."""
        if self.foreign[slot] != requests:
            self.foreign[slot] = requests
            self.any_foreign = bool(self.foreign.any())

    def queue_ratio(self, now_s: float) -> Floats:
        """Seconds that later requests wait, for each second of prefill and second that it takes to be done.

        A node without picks may expect its share of them all the same.
        """
        if self._ratio_picks_left <= 0 or now_s > self._ratio_until_s:
            picks = self._last_picks
            self._ratio_picks_left, self._ratio_until_s = len(picks) // _RATIO_SHARE, now_s + _RATIO_S
            window_s = max(now_s - picks[0][0], LEAST_WINDOW_S) if picks else LEAST_WINDOW_S
            share = len(picks) / (self.size - len(self._free))
            rate = np.maximum(self.picks, share) * (QUEUE_WEIGHT / window_s)
            self._ratio = rate / (1.0 - np.minimum(self.picks_prefill_s / window_s, BUSIEST))
        return self._ratio

    def charge(self, slot: int, work: Work, now_s: float) -> float:
        """Book work; gives the mark by which `free` and `settle` find its prefill again."""
        self.in_flight[slot] += 1
        self.tokens[slot] += work.prompt_tokens + work.output_tokens
        self.context_tokens[slot] += work.context_tokens
        prefill, until_s = self._prefills[slot], float(self.busy_until_s[slot])
        if until_s <= now_s:
            prefill.since_s = until_s = now_s
        self.busy_until_s[slot] = until_s + work.prefill_s
        prefill.booked_s += work.prefill_s
        prefill.live_s += work.prefill_s
        self._note_pick(slot, work.prefill_s, now_s)
        return prefill.booked_s

    def free(self, slot: int, work: Work, mark_s: float, now_s: float) -> None:
        """Unbook a request; what is predicted to be left of its prefill falls away."""
        left = float(self.in_flight[slot]) - 1
        self.in_flight[slot] = left
        if not left:  # exactly zero, so that rounding never adds up over millions of requests
            self.tokens[slot] = self.context_tokens[slot] = 0.0
            self._prefills[slot] = _Prefill()
            self.busy_until_s[slot] = min(float(self.busy_until_s[slot]), now_s)
            return
        self.tokens[slot] -= work.prompt_tokens + work.output_tokens
        self.context_tokens[slot] -= work.context_tokens
        prefill, until_s = self._prefills[slot], float(self.busy_until_s[slot])
        prefill.live_s = max(prefill.live_s - work.prefill_s, 0.0)
        left_s = until_s - max(prefill.booked_s - mark_s, 0.0) - now_s
        left_s = min(max(left_s, 0.0), work.prefill_s)
        prefill.booked_s -= left_s
        self.busy_until_s[slot] = min(until_s - left_s, now_s + prefill.live_s)

    def settle(self, slot: int, mark_s: float, done_s: float, now_s: float) -> None:
        """A prefill was done at `done_s`, not when it was predicted: those behind it move along.

        News from before the node last ran dry tells nothing of what is booked now.
        """
        prefill = self._prefills[slot]
        if done_s >= prefill.since_s:
            until_s = done_s + max(prefill.booked_s - mark_s, 0.0)
            self.busy_until_s[slot] = min(until_s, now_s + prefill.live_s)

    def _note_pick(self, slot: int, prefill_s: float, now_s: float) -> None:
        if len(self._last_picks) == WINDOW_PICKS:
            _, old, seconds = self._last_picks.popleft()
            self.picks[old] -= 1
            self.picks_prefill_s[old] = max(0.0, float(self.picks_prefill_s[old]) - seconds)
        self._ratio_picks_left -= 1
        self._last_picks.append((now_s, slot, prefill_s))
        self.picks[slot] += 1
        self.picks_prefill_s[slot] += prefill_s
