"""The places of requests that wait: by priority, then by age."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from extproc.openai.errors import ApiError
from extproc.openai.request import RoutingRequest
from extproc.routing.blocks import PromptBlocks
from extproc.routing.router import Decision

Key: TypeAlias = tuple[str, str | None, bool]
"""Model, affinity, and whether it is large: whoever shares them waits for the same nodes."""
Rank: TypeAlias = tuple[int, int]
"""The greater one goes first; no two are equal."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the queue; `wake` is called once, when `outcome` is there."""

    request: RoutingRequest
    blocks: PromptBlocks
    key: Key
    size_bytes: int
    since_s: float
    order: int
    wake: Callable[[], None]
    outcome: Decision | ApiError | None = None
    gone: bool = False

    @property
    def rank(self) -> Rank:
        """By priority, then by age."""
        return self.request.hints.priority, -self.order


class Queue:
    """Those who wait for the same nodes."""

    def __init__(self) -> None:
        self._ranked: list[tuple[int, int, Waiter]] = []  # the first to go is the last
        self._by_age: OrderedDict[int, Waiter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ranked)

    @property
    def oldest(self) -> Waiter:
        """Who has waited longest."""
        return next(iter(self._by_age.values()))

    @property
    def first(self) -> Waiter:
        """The one of the greatest rank."""
        return self._ranked[-1][2]

    def from_last(self) -> Iterator[Waiter]:
        """All, the one of the lowest rank first."""
        return (waiter for _, _, waiter in self._ranked)

    def add(self, waiter: Waiter) -> None:
        """A place behind all of its priority."""
        insort(self._ranked, (*waiter.rank, waiter))
        self._by_age[waiter.order] = waiter

    def remove(self, waiter: Waiter) -> None:
        """It is served, or goes without."""
        del self._ranked[bisect_left(self._ranked, waiter.rank)]
        del self._by_age[waiter.order]
