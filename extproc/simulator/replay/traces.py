"""Requests of real traffic: who asked when, how long prompts and answers were, which prefixes they shared."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

UNIT_TOKENS = 512
"""Tokens of one prefix unit; the last unit of a prompt may be shorter."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `units` name its prompt's blocks of 512 tokens: equal ids, equal prompts up to there."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    units: tuple[int, ...]
    id: int = 0
    """Its number in the trace."""
    model: str = ""
    """The model asked for; empty where the trace does not tell."""


class TraceError(ValueError):
    """A trace that cannot be read: one line that names file, line and fault."""


class Part(StrEnum):
    """Which half of a trace: constants are chosen on one and judged on the other."""

    FIRST = "first"
    SECOND = "second"
    ALL = "all"


def part_of(requests: Sequence[TraceRequest], part: Part) -> list[TraceRequest]:
    """A half of the requests by number, its clock set to 0 at its start."""
    middle = len(requests) // 2
    halves = {Part.FIRST: requests[:middle], Part.SECOND: requests[middle:], Part.ALL: requests}
    chosen = halves[part]
    start_s = chosen[0].arrival_s if chosen else 0.0
    return [replace(request, arrival_s=request.arrival_s - start_s) for request in chosen]


def scaled(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests `factor` times as fast, in the same order."""
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]


def rate(requests: Sequence[TraceRequest]) -> float:
    """Requests a second, from the first arrival to the last. Raises `TraceError`: no time between."""
    seconds = requests[-1].arrival_s - requests[0].arrival_s
    if seconds <= 0:
        raise TraceError("all requests arrive at the same time.")
    return len(requests) / seconds


def shares_prefixes(requests: Sequence[TraceRequest]) -> bool:
    """Whether any prompt begins as an earlier one does."""
    return len({request.units[0] for request in requests}) < len(requests)


def tick_s(requests: Sequence[TraceRequest]) -> float:
    """The shortest time between two arrivals at different times: how coarse the clock is at most."""
    ticks = sorted({request.arrival_s for request in requests})
    return min((after - before for before, after in pairwise(ticks)), default=0.0)


def in_order(requests: Sequence[TraceRequest], seed: int = 0, spread_s: float = 0.0) -> list[TraceRequest]:
    """The requests by time of arrival and numbered, on a clock that starts with the first.

    Each comes up to `spread_s` later, by `seed`: where a clock ticks, requests do not come all at once.
    """
    rng = random.Random(f"{seed} arrivals")
    start_s = min(request.arrival_s for request in requests)
    later = [
        replace(request, arrival_s=request.arrival_s - start_s + rng.uniform(0, spread_s))
        for request in requests
    ]
    later.sort(key=lambda request: request.arrival_s)
    return [replace(request, id=number) for number, request in enumerate(later)]
