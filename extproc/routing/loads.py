"""What is booked on every node, one array slot a node, so that all costs come out of one pass."""

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

WINDOW_PICKS = 256
"""Picks that tell a node's rate of arrivals and how busy it is with prefill."""


@dataclass(slots=True, frozen=True)
class Work:
    """What a request brings to a node."""

    prompt_tokens: float
    output_tokens: float
    prefill_s: float


class Loads:
    """The bookings of all nodes, as sums. Slots are given out by `add` and never move."""

    def __init__(self) -> None:
        self.size = 0
        self.in_flight = np.zeros(0)
        self.foreign = np.zeros(0)
        """Requests that others sent, as the engines report them."""
        self.prompt_tokens = np.zeros(0)
        self.output_tokens = np.zeros(0)
        self.busy_until_s = np.zeros(0)
        """When the prefill work booked on a node is predicted to be done."""
        self.shift_s = np.zeros(0)
        """How far what really happened has moved `busy_until_s` so far."""
        self._picks: deque[tuple[float, int, float]] = deque()
        self._pick_count = np.zeros(0)
        self._pick_prefill_s = np.zeros(0)

    def add(self) -> int:
        """A slot for one more node."""
        self.size += 1
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, np.append(value, 0.0))
        return self.size - 1

    def wait_s(self, now_s: float) -> Floats:
        """Seconds until each node's booked prefill work is done; it runs down by itself."""
        return np.maximum(self.busy_until_s - now_s, 0.0)

    def arrivals(self, now_s: float) -> tuple[Floats, Floats]:
        """Picks a second, and the share of time that they keep the node at prefill (may pass 1)."""
        if len(self._picks) < 2:
            return np.zeros(self.size), np.zeros(self.size)
        window_s = max(now_s - self._picks[0][0], 1e-3)
        return self._pick_count / window_s, self._pick_prefill_s / window_s

    def charge(self, slot: int, work: Work, now_s: float) -> float:
        """Book work; gives the mark by which `done` and `drop` find it again."""
        self.in_flight[slot] += 1
        self.prompt_tokens[slot] += work.prompt_tokens
        self.output_tokens[slot] += work.output_tokens
        until_s = max(float(self.busy_until_s[slot]), now_s) + work.prefill_s
        self.busy_until_s[slot] = until_s
        self._note_pick(slot, work.prefill_s, now_s)
        return until_s - float(self.shift_s[slot])

    def free(self, slot: int, work: Work) -> None:
        """Unbook a request's place in the batch; its prefill is `settle`d apart."""
        left = self.in_flight[slot] - 1
        self.in_flight[slot] = left
        if left:
            self.prompt_tokens[slot] -= work.prompt_tokens
            self.output_tokens[slot] -= work.output_tokens
        else:  # exactly zero, so that rounding never adds up over millions of requests
            self.prompt_tokens[slot] = self.output_tokens[slot] = 0.0

    def settle(self, slot: int, mark_s: float, done_s: float) -> None:
        """A prefill was done at `done_s`, not when it was predicted: those behind it move along."""
        error_s = done_s - (mark_s + float(self.shift_s[slot]))
        self.shift_s[slot] += error_s
        self.busy_until_s[slot] += error_s

    def over(self, slot: int, mark_s: float, prefill_s: float, now_s: float, completed: bool) -> None:
        """A request is over before its prefill was predicted to be done.

        If it is `completed`, so is its prefill; else what was not done of it falls away.
        """
        left_s = mark_s + float(self.shift_s[slot]) - now_s
        if left_s > 0:
            saved_s = left_s if completed else min(left_s, prefill_s)
            self.settle(slot, mark_s, now_s + left_s - saved_s)

    def _note_pick(self, slot: int, prefill_s: float, now_s: float) -> None:
        if len(self._picks) == WINDOW_PICKS:
            _, old, seconds = self._picks.popleft()
            self._pick_count[old] -= 1
            self._pick_prefill_s[old] = max(0.0, self._pick_prefill_s[old] - seconds)
        self._picks.append((now_s, slot, prefill_s))
        self._pick_count[slot] += 1
        self._pick_prefill_s[slot] += prefill_s
