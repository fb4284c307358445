"""Requests that wait for a slot: who may go at once, who waits, who is turned away, and who goes next."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from extproc.openai.errors import ApiError, ErrorCode
from extproc.openai.request import RoutingRequest
from extproc.routing.node import Node
from extproc.routing.patience import Patience
from extproc.routing.router import Decision, Router
from extproc.routing.waiting import Key, Queue, Waiter

OLDEST_EVERY: Final = 8
"""Of so many that are served, one is the oldest that can go, whatever its priority: so none starves."""
SERVED_KEPT: Final = 64
"""Departures that tell how fast the queue moves: the last ones since it was empty."""
LONGEST_RETRY_S: Final = 60
"""The most that `Retry-After` says: much can change in a minute."""


@dataclass(slots=True, frozen=True)
class Batches:
    """`strategy: static`: so many go together to an idle node, or fewer once one has waited `max_wait_s`."""

    size: int
    max_wait_s: float


class Admission:
    """Decides at once where a node is free, else queues within its bounds.

    Queues are kept apart by what they wait for, so that no waiter blocks one that could go. Without
    `batches`, each goes the moment that a node has a free slot.
    """

    def __init__(
        self, router: Router, max_waiting: int, max_waiting_bytes: int, batches: Batches | None = None
    ) -> None:
        self.router = router
        self.max_waiting = max_waiting
        self.max_waiting_bytes = max_waiting_bytes
        self.batches = batches
        self.patience = Patience()
        self.waiting = 0
        self.waiting_bytes = 0
        self._order = 0
        self._served = 0
        self._queues: dict[Key, Queue] = {}
        self._served_s: deque[float] = deque(maxlen=SERVED_KEPT)

    def submit(
        self, request: RoutingRequest, size_bytes: int, now_s: float, wake: Callable[[], None]
    ) -> Decision | Waiter:
        """A decision, or a place in the queue.

        Raises `ApiError` when no node can ever take the request, or the queue is full of others that are as
        important.
        """
        if self.batches is None and not self._queues:
            decision = self.router.decide(request, now_s)
            if decision is not None:
                return decision
        self.router.check(request)
        blocks = self.router.blocks_of(request)
        key = (request.model, request.hints.node_affinity, self.router.is_large(request, blocks))
        if self.batches is None and self._queues and key not in self._queues:  # else others are first
            decision = self.router.decide(request, now_s, blocks)
            if decision is not None:
                return decision
        self._make_room(request.hints.priority, size_bytes, now_s)
        if not self.waiting:
            self._served_s.clear()
        self._order += 1
        waiter = Waiter(request, blocks, key, size_bytes, now_s, self._order, _nobody)
        self._queues.setdefault(key, Queue()).add(waiter)
        self.waiting += 1
        self.waiting_bytes += size_bytes
        if self.batches is not None:
            self.freed(now_s)
        waiter.wake = wake
        if isinstance(waiter.outcome, ApiError):
            raise waiter.outcome
        return waiter.outcome or waiter

    def due_s(self, waiter: Waiter) -> float:
        """When `freed` must be called though nothing is: a batch that is not full goes at that time."""
        return math.inf if self.batches is None else waiter.since_s + self.batches.max_wait_s

    def waiting_by_priority(self) -> Counter[int]:
        """How many wait at each priority. May be called beside the event loop: it iterates over copies."""
        queues = [list(queue.from_last()) for queue in list(self._queues.values())]
        return Counter(waiter.request.hints.priority for queue in queues for waiter in queue)

    def leave(self, waiter: Waiter) -> None:
        """The client went away, or its time is up; harmless for a waiter that was served."""
        if waiter.outcome is None and not waiter.gone:
            waiter.gone = True
            self._remove(waiter)

    def freed(self, now_s: float) -> None:
        """A slot is free or the fleet has changed: serve the waiters that can go now, in their order."""
        serve = self._serve_one if self.batches is None else self._serve_batch
        queues = list(self._queues.values())
        while queues:
            queues.sort(key=self._turn)
            while queues and not serve(queues[-1], now_s):
                queues.pop()
            if queues and not queues[-1]:
                queues.pop()

    def retry_after_s(self, now_s: float) -> int:
        """When those who wait now will have been served, at the pace of the last departures."""
        served_s = self._served_s
        if len(served_s) < 2 or now_s <= served_s[0]:
            return 1
        rate = len(served_s) / (now_s - served_s[0])
        return min(max(1, math.ceil(self.waiting / rate)), LONGEST_RETRY_S)

    @property
    def _is_turn_of_oldest(self) -> bool:
        return self._served % OLDEST_EVERY == OLDEST_EVERY - 1

    def _next(self, queue: Queue) -> Waiter:
        return queue.oldest if self._is_turn_of_oldest else queue.first

    def _turn(self, queue: Queue) -> tuple[int, int]:
        """The queue for which this is the greatest is served next."""
        return (0, -queue.oldest.order) if self._is_turn_of_oldest else queue.first.rank

    def _serve_one(self, queue: Queue, now_s: float) -> bool:
        """Whether the next one went; if not, nor can those behind it."""
        return self._try(self._next(queue), now_s, None)

    def _serve_batch(self, queue: Queue, now_s: float) -> bool:
        """Whether a batch went, to one node that had nothing to do."""
        assert self.batches is not None
        if len(queue) < self.batches.size and now_s < self.due_s(queue.oldest):
            return False
        first = self._next(queue)
        if not self._try(first, now_s, _is_idle):
            return False
        if isinstance(first.outcome, Decision):
            node = first.outcome.node
            for _ in range(min(self.batches.size - 1, len(queue))):
                if not self._try(self._next(queue), now_s, lambda other: other is node):
                    break
        return True

    def _try(self, waiter: Waiter, now_s: float, pick: Callable[[Node], bool] | None) -> bool:
        """Give a waiter its outcome, if there is one."""
        outcome: Decision | ApiError | None
        try:
            outcome = self.router.decide(waiter.request, now_s, waiter.blocks, pick)
        except ApiError as error:
            outcome = error
        if outcome is None:
            return False
        self._served_s.append(now_s)
        self._settle(waiter, outcome)
        return True

    def _make_room(self, priority: int, size_bytes: int, now_s: float) -> None:
        """Turn away the latest of the lowest priority, as far as that is lower. Raises `ApiError`."""
        places, room_bytes = self.max_waiting - self.waiting, self.max_waiting_bytes - self.waiting_bytes
        if places >= 1 and room_bytes >= size_bytes:
            return
        victims = []
        for waiter in heapq.merge(*(queue.from_last() for queue in self._queues.values()), key=_rank):
            if waiter.request.hints.priority >= priority:
                break
            victims.append(waiter)
            places, room_bytes = places + 1, room_bytes + waiter.size_bytes
            if places >= 1 and room_bytes >= size_bytes:
                break
        full = ApiError(
            ErrorCode.QUEUE_FULL,
            "Every node is busy and the queue is full.",
            retry_after_s=self.retry_after_s(now_s),
        )
        if places < 1 or room_bytes < size_bytes:
            raise full
        for waiter in victims:
            self._settle(waiter, full)

    def _settle(self, waiter: Waiter, outcome: Decision | ApiError) -> None:
        self._served += isinstance(outcome, Decision)
        self._remove(waiter)
        waiter.outcome = outcome
        waiter.wake()

    def _remove(self, waiter: Waiter) -> None:
        queue = self._queues[waiter.key]
        queue.remove(waiter)
        if not queue:
            del self._queues[waiter.key]
        self.waiting -= 1
        self.waiting_bytes -= waiter.size_bytes


def _rank(waiter: Waiter) -> tuple[int, int]:
    return waiter.rank


def _is_idle(node: Node) -> bool:
    return not node.in_flight


def _nobody() -> None:
    """The one who waits is told by the return value."""
