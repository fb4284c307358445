"""The places of requests that wait: by priority, then by age, and none waits for ever."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from extproc.openai.errors import ApiError
from extproc.openai.request import RoutingRequest
from extproc.routing.router import Decision

OLDEST_EVERY: Final = 8
"""Of so many that are served, one is the oldest, whatever its priority."""

Key: TypeAlias = tuple[str, str | None]
"""Model and affinity: whoever shares them waits for the same nodes."""
Rank: TypeAlias = tuple[int, int]
"""The greater one goes first; no two are equal."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the queue; `wake` is called once, when `outcome` is there."""

    request: RoutingRequest
    size_bytes: int
    since_s: float
    order: int
    wake: Callable[[], None]
    outcome: Decision | ApiError | None = None
    gone: bool = False

    @property
    def key(self) -> Key:
        """The queue it waits in."""
        return key_of(self.request)

    @property
    def rank(self) -> Rank:
        """By priority, then by age."""
        return self.request.hints.priority, -self.order


def key_of(request: RoutingRequest) -> Key:
    """The queue that a request waits in."""
    return request.model, request.hints.node_affinity


class Queue:
    """Those who wait for the same nodes."""

    def __init__(self) -> None:
        self._ranked: list[tuple[int, int, Waiter]] = []  # the first to go is the last
        self._by_age: OrderedDict[int, Waiter] = OrderedDict()
        self._served = 0

    def __len__(self) -> int:
        return len(self._ranked)

    @property
    def oldest(self) -> Waiter:
        """Who has waited longest."""
        return next(iter(self._by_age.values()))

    @property
    def following(self) -> Waiter:
        """Who is to be served next."""
        if self._served % OLDEST_EVERY == OLDEST_EVERY - 1:
            return self.oldest
        return self._ranked[-1][2]

    def from_last(self) -> Iterator[Waiter]:
        """All, the one of the lowest rank first."""
        return (waiter for _, _, waiter in self._ranked)

    def add(self, waiter: Waiter) -> None:
        """A place behind all of its priority."""
        insort(self._ranked, (*waiter.rank, waiter))
        self._by_age[waiter.order] = waiter

    def remove(self, waiter: Waiter, served: bool) -> None:
        """It is `served`, or goes without."""
        del self._ranked[bisect_left(self._ranked, waiter.rank)]
        del self._by_age[waiter.order]
        self._served += served
