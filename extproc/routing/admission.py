"""Requests that wait for a slot: highest priority first, then oldest."""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from extproc.openai.errors import ApiError, ErrorCode
from extproc.openai.request import RoutingRequest
from extproc.routing.router import Decision, Router


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

    def __lt__(self, other: "Waiter") -> bool:
        return self._rank < other._rank

    @property
    def key(self) -> tuple[str, str | None]:
        """The queue it waits in."""
        return _queue_key(self.request)

    @property
    def _rank(self) -> tuple[int, int]:
        return (-self.request.hints.priority, self.order)


class Admission:
    """Decides at once where a node is free, else queues within its bounds.

    Queues are kept apart by model and affinity, so that no waiter blocks one that could go.
    """

    def __init__(self, router: Router, max_waiting: int, max_waiting_bytes: int) -> None:
        self.router = router
        self.max_waiting = max_waiting
        self.max_waiting_bytes = max_waiting_bytes
        self.waiting = 0
        self.waiting_bytes = 0
        self._order = 0
        self._queues: dict[tuple[str, str | None], list[Waiter]] = {}

    def submit(
        self, request: RoutingRequest, size_bytes: int, now_s: float, wake: Callable[[], None]
    ) -> Decision | Waiter:
        """A decision, or a place in the queue.

        Raises `ApiError` when no node can ever take the request, or the queue is full.
        """
        key = _queue_key(request)
        if key not in self._queues:  # else others are first
            decision = self.router.decide(request, now_s)
            if decision is not None:
                return decision
        if self.waiting >= self.max_waiting or self.waiting_bytes + size_bytes > self.max_waiting_bytes:
            raise ApiError(ErrorCode.QUEUE_FULL, "Every node is busy and the queue is full.", retry_after_s=1)
        self._order += 1
        waiter = Waiter(request, size_bytes, now_s, self._order, wake)
        insort(self._queues.setdefault(key, []), waiter)
        self.waiting += 1
        self.waiting_bytes += size_bytes
        return waiter

    def waiting_by_priority(self) -> Counter[int]:
        """How many wait at each priority. May be called beside the event loop: it iterates over copies."""
        queues = list(self._queues.values())
        return Counter(waiter.request.hints.priority for queue in queues for waiter in list(queue))

    def leave(self, waiter: Waiter) -> None:
        """The client went away, or its time is up; harmless for a waiter that was served."""
        if waiter.outcome is None and not waiter.gone:
            waiter.gone = True
            self._remove(waiter)

    def freed(self, now_s: float) -> None:
        """A slot is free or the fleet has changed: serve the waiters that can go now, best rank first."""
        heads = [queue[0] for queue in self._queues.values()]
        heapq.heapify(heads)
        while heads:
            waiter = heapq.heappop(heads)
            outcome = self._try(waiter, now_s)
            if outcome is None:
                continue  # nor can those behind it
            self._remove(waiter)
            if queue := self._queues.get(waiter.key):
                heapq.heappush(heads, queue[0])
            waiter.outcome = outcome
            waiter.wake()

    def _try(self, waiter: Waiter, now_s: float) -> Decision | ApiError | None:
        try:
            return self.router.decide(waiter.request, now_s)
        except ApiError as error:
            return error

    def _remove(self, waiter: Waiter) -> None:
        queue = self._queues[waiter.key]
        del queue[bisect_left(queue, waiter)]
        if not queue:
            del self._queues[waiter.key]
        self.waiting -= 1
        self.waiting_bytes -= waiter.size_bytes


def _queue_key(request: RoutingRequest) -> tuple[str, str | None]:
    return (request.model, request.hints.node_affinity)
