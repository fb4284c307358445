"""What is booked on every node, and the table that the costs of all nodes come out of in one pass."""

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
LEAST_WINDOW_S: Final = 0.2
"""A few picks at the same moment tell no rate."""
QUEUE_WEIGHT: Final = 0.8
EXPECTED_SHARE: Final = 0.6
"""The part of an even share of the picks that a node may expect at least: one without picks will get some."""
BUSIEST: Final = 0.9
"""Past this share of time at prefill, the queueing estimate grows no more."""
_RATIO_SHARE: Final = 32
_RATIO_S: Final = 0.1
"""The queueing estimate is taken anew after such a part of the picks that it comes from, or so long."""

# The rows of `Loads.table`. A lane has a factor for each: the product is in seconds, or a share of the room.
ONE: Final = 0
"""The same on every node."""
BUSY_UNTIL: Final = 1
"""When the prefill work booked on a node is predicted to be done."""
TOKENS: Final = 2
"""Prompts and answers of the requests in flight."""
ROOM: Final = 3
"""1; the lane has what a token takes of the KV room."""
LINEAR: Final = 4
SQUARE: Final = 5
"""The pace of prefill; the lane has its seconds a token, and a token that another attends to."""
WEIGHTS: Final = 6
"""The pace of decoding; the lane has the seconds that a step takes to read the weights."""
CONTEXTS: Final = 7
"""That pace, by the tokens that a step reads; the lane has seconds for each. So it has for the next two."""
OWN_CONTEXT: Final = 8
"""That pace, by requests like the one that is weighed: 1, and of others' its share."""
OTHERS: Final = 9
"""That pace, by requests in flight."""
ROWS: Final = 10


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
class Load:
    """What is booked on one node."""

    requests: int = 0
    tokens: float = 0.0
    """Prompts and answers of the requests in flight."""
    context_tokens: float = 0.0
    """The same of what decoding reads on average."""
    foreign: int = 0
    """Requests that others sent, as the engine reports them. They are taken to be like ours."""
    busy_until_s: float = 0.0
    """When the prefill work booked there is predicted to be done."""
    prefill_s: float = 0.0
    """All prefill booked since the node was last without requests, done or not."""
    live_prefill_s: float = 0.0
    """That of the requests in flight: the wait is never longer."""
    since_s: float = 0.0
    """When a pick last found no prefill to wait for."""
    prefill_pace: float = 1.0
    decode_pace: float = 1.0


class Loads:
    """The bookings of all nodes. Slots are given out by `add`, and never move until `remove`."""

    def __init__(self) -> None:
        self.size = 0
        """Slots, with those that are free."""
        self.on: list[Load] = []
        """By slot."""
        self.table: Floats = np.zeros((ROWS, 0))
        """What costs are made of, a column a slot: kept as bookings change, for costs look at every node."""
        self.requests: Floats = np.zeros(0)
        """In flight, those of others with them."""
        self.weights: Floats = np.zeros(0)
        """What the nodes' costs are divided by."""
        self.picks: Floats = np.zeros(0)
        """How many of the last picks went there."""
        self.picks_prefill_s: Floats = np.zeros(0)
        """And the prefill that these brought."""
        self._free: list[int] = []
        self._last_picks: deque[tuple[float, int, float]] = deque()
        self._ratio: Floats = np.zeros(0)
        self._ratio_until_s = -math.inf
        self._ratio_picks_left = 0

    def add(self) -> int:
        """A slot for one more node: the lowest that is free."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot, self.size = self.size, self.size + 1
            self.on.append(Load())
            for name, value in vars(self).items():
                if isinstance(value, np.ndarray):
                    setattr(self, name, np.insert(value, slot, 0.0, axis=-1))
        self.table[(ONE, ROOM), slot] = self.weights[slot] = 1.0
        self._tabulate(slot)
        return slot

    def remove(self, slot: int) -> None:
        """The slot is free: nothing is booked there."""
        assert not self.on[slot].requests
        self.on[slot] = Load()
        self._last_picks = deque(pick for pick in self._last_picks if pick[1] != slot)
        self._ratio_picks_left = 0
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value[..., slot] = 0.0
        self.weights[slot] = 1.0
        heapq.heappush(self._free, slot)

    def set_foreign(self, slot: int, requests: int) -> None:
        """A node's engine has told how many requests of others it has."""
        load = self.on[slot]
        if load.foreign != requests:
            load.foreign = requests
            self._tabulate(slot)

    def set_pace(self, slot: int, prefill: float, decode: float) -> None:
        """A node is so many times slower than its data sheet."""
        load = self.on[slot]
        load.prefill_pace, load.decode_pace = prefill, decode
        self._tabulate(slot)

    def queue_ratio(self, now_s: float) -> Floats:
        """Seconds that later requests wait, for each second of prefill and second until it is done.

        A node's picks count by its weight, as its cost does: else one of half the weight would get more than
        half of what others get.
        """
        if self._ratio_picks_left <= 0 or now_s > self._ratio_until_s:
            picks = self._last_picks
            self._ratio_picks_left, self._ratio_until_s = len(picks) // _RATIO_SHARE, now_s + _RATIO_S
            window_s = max(now_s - picks[0][0], LEAST_WINDOW_S) if picks else LEAST_WINDOW_S
            share = len(picks) / (self.size - len(self._free))
            rate = np.maximum(self.picks / self.weights, EXPECTED_SHARE * share) * (QUEUE_WEIGHT / window_s)
            self._ratio = rate / (1.0 - np.minimum(self.picks_prefill_s / window_s, BUSIEST))
        return self._ratio

    def charge(self, slot: int, work: Work, now_s: float) -> float:
        """Book work; gives the mark by which `free` and `settle` find its prefill again."""
        load = self.on[slot]
        load.requests += 1
        load.tokens += work.prompt_tokens + work.output_tokens
        load.context_tokens += work.context_tokens
        if load.busy_until_s <= now_s:
            load.since_s = load.busy_until_s = now_s
        load.busy_until_s += work.prefill_s
        load.prefill_s += work.prefill_s
        load.live_prefill_s += work.prefill_s
        self._tabulate(slot)
        self._note_pick(slot, work.prefill_s, now_s)
        return load.prefill_s

    def free(self, slot: int, work: Work, mark_s: float, now_s: float) -> None:
        """Unbook a request; what is predicted to be left of its prefill falls away."""
        load = self.on[slot]
        load.requests -= 1
        if load.requests:
            load.tokens -= work.prompt_tokens + work.output_tokens
            load.context_tokens -= work.context_tokens
            load.live_prefill_s = max(load.live_prefill_s - work.prefill_s, 0.0)
            left_s = load.busy_until_s - max(load.prefill_s - mark_s, 0.0) - now_s
            left_s = min(max(left_s, 0.0), work.prefill_s)
            load.prefill_s -= left_s
            load.busy_until_s = min(load.busy_until_s - left_s, now_s + load.live_prefill_s)
        else:  # exactly zero, so that rounding never adds up over millions of requests
            load.tokens = load.context_tokens = load.prefill_s = load.live_prefill_s = load.since_s = 0.0
            load.busy_until_s = min(load.busy_until_s, now_s)
        self._tabulate(slot)

    def settle(self, slot: int, mark_s: float, done_s: float, now_s: float) -> None:
        """A prefill was done at `done_s`, not when it was predicted: those behind it move along.

        News from before the node last ran dry tells nothing of what is booked now.
        """
        load = self.on[slot]
        if done_s >= load.since_s:
            until_s = done_s + max(load.prefill_s - mark_s, 0.0)
            load.busy_until_s = min(until_s, now_s + load.live_prefill_s)
            self._tabulate(slot)

    def _tabulate(self, slot: int) -> None:
        """A node's load is another now."""
        load, table = self.on[slot], self.table
        prefill, decode, requests = load.prefill_pace, load.decode_pace, load.requests
        like = decode if not load.foreign else decode * (1.0 + load.foreign / (requests + 1.0))
        requests += load.foreign
        table[BUSY_UNTIL, slot] = load.busy_until_s
        table[TOKENS, slot] = load.tokens
        table[LINEAR, slot] = table[SQUARE, slot] = prefill
        table[WEIGHTS, slot] = decode
        table[CONTEXTS, slot] = like * load.context_tokens
        table[OWN_CONTEXT, slot] = like
        table[OTHERS, slot] = decode * requests
        self.requests[slot] = requests

    def _note_pick(self, slot: int, prefill_s: float, now_s: float) -> None:
        if len(self._last_picks) == WINDOW_PICKS:
            _, old, seconds = self._last_picks.popleft()
            self.picks[old] -= 1
            self.picks_prefill_s[old] = max(0.0, float(self.picks_prefill_s[old]) - seconds)
        self._ratio_picks_left -= 1
        self._last_picks.append((now_s, slot, prefill_s))
        self.picks[slot] += 1
        self.picks_prefill_s[slot] += prefill_s
