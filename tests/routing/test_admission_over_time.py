"""The queue under anything that can happen, in any order: nobody is lost, none is served twice."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from routing_fleet import NOTHING, booked, make_node, make_request

from extproc.openai.errors import ApiError, ErrorCode
from extproc.routing.admission import Admission
from extproc.routing.node import Health, Node
from extproc.routing.router import Decision, Router
from extproc.routing.waiting import Waiter


@dataclass(slots=True, eq=False)
class Client:
    """A request in the life of the queue, and what happened to it."""

    number: int
    priority: int
    queue: tuple[str, str | None]
    size_bytes: int
    outcome: Decision | Waiter | None = None
    wakes: int = 0
    left: bool = False
    moved: bool = False

    def wake(self) -> None:
        self.wakes += 1

    @property
    def rank(self) -> tuple[int, int]:
        return -self.priority, self.number

    @property
    def decision(self) -> Decision | None:
        outcome = self.outcome.outcome if isinstance(self.outcome, Waiter) else self.outcome
        return outcome if isinstance(outcome, Decision) else None

    @property
    def waits(self) -> bool:
        return isinstance(self.outcome, Waiter) and self.outcome.outcome is None and not self.left

    @property
    def runs(self) -> bool:
        return self.decision is not None and not self.decision.booking.released


class QueueOverTime(RuleBasedStateMachine):
    """Requests come, leave, fail over and end, nodes go and come back: at random."""

    CAP = 2
    MAX_WAITING = 6
    MAX_BYTES = 100

    def __init__(self) -> None:
        super().__init__()
        self.nodes = {
            "a": make_node("a", "m"),
            "b": make_node("b", "m", "k", hardware="h100-80g"),
            "c": make_node("c", "k", weight=0.0),
        }
        self.router = Router(self.nodes.values(), self.CAP, random.Random(1))
        self.admission = Admission(self.router, self.MAX_WAITING, self.MAX_BYTES)
        self.clients: list[Client] = []

    def some(self, which: Callable[[Client], bool]) -> list[Client]:
        return [client for client in self.clients if which(client)]

    def any_of(self, clients: list[Client], data: st.DataObject) -> Client:
        return clients[data.draw(st.integers(0, len(clients) - 1), label="client")]

    def freed(self) -> None:
        """Serve the queue, and check that nobody was passed over."""
        before = self.some(lambda client: client.waits)
        self.admission.freed(0.0)
        for queue in {client.queue for client in before}:
            mine = [client for client in before if client.queue == queue]
            waiting = [client for client in mine if client.waits]
            for gone in (client for client in mine if not client.waits):
                first, oldest = gone.rank, gone.number
                assert all(first < other.rank for other in waiting) or all(
                    oldest < other.number for other in waiting
                )

    @rule(
        model=st.sampled_from("mk"),
        affinity=st.none() | st.sampled_from("abc"),
        priority=st.integers(0, 10),
        size_bytes=st.integers(1, 40),
    )
    def submit(self, model: str, affinity: str | None, priority: int, size_bytes: int) -> None:
        client = Client(len(self.clients), priority, (model, affinity), size_bytes)
        request = make_request(model, affinity=affinity, priority=priority)
        waiting, waiting_bytes = self.admission.waiting, self.admission.waiting_bytes
        try:
            client.outcome = self.admission.submit(request, size_bytes, 0.0, client.wake)
        except ApiError as error:
            if error.code is ErrorCode.QUEUE_FULL:
                assert waiting == self.MAX_WAITING or waiting_bytes + size_bytes > self.MAX_BYTES
                assert self.admission.waiting == waiting, "nobody was turned away in vain"
            return
        self.clients.append(client)

    @precondition(lambda self: self.some(lambda client: client.waits))
    @rule(data=st.data(), twice=st.booleans())
    def leave(self, data: st.DataObject, twice: bool) -> None:
        client = self.any_of(self.some(lambda client: client.waits), data)
        assert isinstance(client.outcome, Waiter)
        client.left = True
        for _ in range(1 + twice):
            self.admission.leave(client.outcome)

    @precondition(lambda self: self.some(lambda client: client.runs))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        decision = self.any_of(self.some(lambda client: client.runs), data).decision
        assert decision is not None
        assert decision.booking.release(0.0)
        assert not decision.booking.release(0.0)
        self.freed()

    @precondition(lambda self: self.some(lambda client: client.runs))
    @rule(data=st.data())
    def attempt_fails(self, data: st.DataObject) -> None:
        client = self.any_of(self.some(lambda client: client.runs), data)
        assert client.decision is not None
        model, affinity = client.queue
        request = make_request(model, affinity=affinity)
        if self.router.attempt_failed(client.decision, self.node_of(client).id, request, 0.0):
            client.moved = True
            self.freed()

    @rule(name=st.sampled_from("abc"), drained=st.booleans())
    def drain_or_restore(self, name: str, drained: bool) -> None:
        self.nodes[name].drained = drained
        self.freed()

    @rule(name=st.sampled_from("abc"), health=st.sampled_from(Health))
    def change_health(self, name: str, health: Health) -> None:
        self.nodes[name].health = health
        self.router.health_changed(self.nodes[name], 0.0)
        self.freed()

    @invariant()
    def counters_are_exact(self) -> None:
        waiting = self.some(lambda client: client.waits)
        assert self.admission.waiting == len(waiting) <= self.MAX_WAITING
        assert self.admission.waiting_bytes == sum(client.size_bytes for client in waiting) <= self.MAX_BYTES
        for node in self.nodes.values():
            mine = [client for client in self.clients if client.runs and self.node_of(client) is node]
            assert node.in_flight == len(mine)
            assert mine or booked(self.router, node) == NOTHING

    @invariant()
    def no_node_is_over_its_cap_but_by_requests_that_failed_over(self) -> None:
        for node in self.nodes.values():
            mine = [client for client in self.clients if client.runs and self.node_of(client) is node]
            assert sum(not client.moved for client in mine) <= self.CAP

    @invariant()
    def each_is_woken_once_and_only_with_an_outcome(self) -> None:
        for client in self.clients:
            if isinstance(client.outcome, Waiter):
                assert client.wakes == (client.outcome.outcome is not None)
                assert not (client.left and client.wakes)
            else:
                assert client.wakes == 0

    @invariant()
    def nobody_waits_for_a_node_that_is_free(self) -> None:
        for client in self.some(lambda client: client.waits):
            model, affinity = client.queue
            decision = self.router.decide(make_request(model, affinity=affinity), 0.0)
            assert decision is None

    def node_of(self, client: Client) -> Node:
        assert client.decision is not None
        return client.decision.booking.node

    def teardown(self) -> None:
        """Everyone who neither left nor ended gets a node, and in the end nothing is left."""
        for node in self.nodes.values():
            node.drained, node.health = False, Health.HEALTHY
        self.freed()
        while running := self.some(lambda client: client.runs):
            assert running[0].decision is not None
            running[0].decision.booking.release(0.0)
            self.freed()
        assert not self.some(lambda client: client.waits)
        assert (self.admission.waiting, self.admission.waiting_bytes) == (0, 0)
        assert [node.in_flight for node in self.nodes.values()] == [0, 0, 0]


TestQueueOverTime = QueueOverTime.TestCase
TestQueueOverTime.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
