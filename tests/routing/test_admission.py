"""The queue: who waits, who goes next, and that nobody is lost or served twice."""

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from routing_fleet import make_node, make_request, make_router

from extproc.openai.errors import ApiError, ErrorCode
from extproc.routing.admission import Admission, Waiter
from extproc.routing.node import Health, Node
from extproc.routing.router import Decision, Router


def make_admission(
    *nodes: Node, cap: int | None = 1, max_waiting: int = 100, max_waiting_bytes: int = 10_000
) -> Admission:
    return Admission(make_router(*nodes, cap=cap), max_waiting, max_waiting_bytes)


def never() -> None:
    pytest.fail("woken without an outcome to come")


def go(admission: Admission, model: str = "m", size_bytes: int = 10, **members: object) -> Decision:
    """Submit a request that must go at once."""
    outcome = admission.submit(make_request(model, **members), size_bytes, 0.0, never)
    assert isinstance(outcome, Decision)
    return outcome


def wait(
    admission: Admission,
    model: str = "m",
    size_bytes: int = 10,
    wake: Callable[[], None] = lambda: None,
    now_s: float = 0.0,
    **members: object,
) -> Waiter:
    """Submit a request that must wait."""
    outcome = admission.submit(make_request(model, **members), size_bytes, now_s, wake)
    assert isinstance(outcome, Waiter)
    return outcome


def free(admission: Admission, *decisions: Decision) -> None:
    """Let requests end, all before the queue is served."""
    for decision in decisions:
        assert decision.booking.release()
    admission.freed(1.0)


def served(waiters: list[Waiter]) -> list[int]:
    """Which of the waiters have got a node."""
    return [number for number, waiter in enumerate(waiters) if isinstance(waiter.outcome, Decision)]


def order_of_service(admission: Admission, busy: Decision, waiters: list[Waiter]) -> list[int]:
    """In which order one slot goes from waiter to waiter."""
    order: list[int] = []
    while len(order) < len(waiters):
        free(admission, busy)
        (following,) = set(served(waiters)) - set(order)
        order.append(following)
        outcome = waiters[following].outcome
        assert isinstance(outcome, Decision)
        busy = outcome
    return order


class TestARequest:
    def test_goes_at_once_while_a_node_is_free(self) -> None:
        admission = make_admission(make_node("a", "m"), make_node("b", "m"))
        assert {go(admission).node.id, go(admission).node.id} == {"a", "b"}
        assert (admission.waiting, admission.waiting_bytes) == (0, 0)

    def test_waits_while_every_node_is_full(self) -> None:
        admission = make_admission(make_node("a", "m"))
        go(admission)
        waiter = wait(admission, size_bytes=70, now_s=12.0)
        assert (waiter.outcome, waiter.since_s) == (None, 12.0)
        assert (admission.waiting, admission.waiting_bytes) == (1, 70)

    def test_never_waits_without_a_cap(self) -> None:
        admission = make_admission(make_node("a", "m"), cap=None)
        for _ in range(100):
            go(admission)

    def test_that_no_node_can_ever_take_is_refused_at_once(self) -> None:
        admission = make_admission(make_node("a", "m", health=Health.OFFLINE))
        with pytest.raises(ApiError) as raised:
            go(admission)
        assert raised.value.code is ErrorCode.NO_AVAILABLE_NODE
        assert admission.waiting == 0

    def test_does_not_overtake_those_who_wait(self) -> None:
        """A node that became free before anyone told the queue is theirs."""
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        first = wait(admission)
        busy.booking.release()
        second = wait(admission, priority=5)
        admission.freed(1.0)
        assert (served([first, second]), admission.waiting) == ([0], 1)


class TestAWaiter:
    def test_is_woken_once_when_its_node_is_there(self) -> None:
        admission = make_admission(make_node("a", "m"))
        woken: list[str] = []
        busy = go(admission)
        waiter = wait(admission, wake=lambda: woken.append("up"))
        admission.freed(0.5)
        assert woken == []
        free(admission, busy)
        admission.freed(2.0)
        assert woken == ["up"]
        assert isinstance(waiter.outcome, Decision)
        assert waiter.outcome.node.in_flight == 1
        assert (admission.waiting, admission.waiting_bytes) == (0, 0)

    def test_sees_its_outcome_when_it_is_woken(self) -> None:
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        seen: list[object] = []
        waiter = wait(admission, wake=lambda: seen.append(waiter.outcome))
        free(admission, busy)
        assert seen == [waiter.outcome]
        assert isinstance(seen[0], Decision)

    def test_gets_the_error_when_every_node_is_gone(self) -> None:
        node = make_node("a", "m")
        admission = make_admission(node)
        go(admission)
        woken: list[int] = []
        waiters = [wait(admission, wake=lambda: woken.append(1)) for _ in range(3)]
        node.health = Health.OFFLINE
        admission.freed(1.0)
        for waiter in waiters:
            assert isinstance(waiter.outcome, ApiError)
            assert waiter.outcome.code is ErrorCode.NO_AVAILABLE_NODE
        assert len(woken) == 3
        assert (admission.waiting, admission.waiting_bytes, node.in_flight) == (0, 0, 1)

    def test_pinned_to_a_drained_node_gets_an_error_while_others_wait_on(self) -> None:
        drained = make_node("a", "m")
        admission = make_admission(drained, make_node("b", "m"))
        go(admission)
        go(admission)
        pinned, anywhere = wait(admission, affinity="a"), wait(admission)
        drained.drained = True
        admission.freed(1.0)
        assert isinstance(pinned.outcome, ApiError)
        assert pinned.outcome.code is ErrorCode.NODE_UNAVAILABLE
        assert (anywhere.outcome, admission.waiting) == (None, 1)

    def test_is_served_by_a_node_that_comes_back(self) -> None:
        back = make_node("a", "m")
        back.drained = True
        admission = make_admission(back, make_node("b", "m"))
        go(admission)
        waiter = wait(admission)
        back.drained = False
        admission.freed(1.0)
        assert isinstance(waiter.outcome, Decision)
        assert waiter.outcome.node is back


class TestTheOrder:
    def test_is_by_priority_then_by_age(self) -> None:
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        waiters = [wait(admission, priority=priority) for priority in (5, 0, 10, 5, 10)]
        assert order_of_service(admission, busy, waiters) == [2, 4, 0, 3, 1]

    def test_gives_priority_5_to_those_that_name_none(self) -> None:
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        waiters = [wait(admission, priority=4), wait(admission), wait(admission, priority=6)]
        assert order_of_service(admission, busy, waiters) == [2, 1, 0]

    def test_holds_between_models_and_affinities_that_share_a_node(self) -> None:
        admission = make_admission(make_node("a", "m", "k"))
        busy = go(admission)
        waiters = [
            wait(admission, "m", priority=5),
            wait(admission, "k", priority=9),
            wait(admission, "m", priority=7, affinity="a"),
            wait(admission, "k", priority=6),
        ]
        assert order_of_service(admission, busy, waiters) == [1, 2, 3, 0]

    def test_holds_when_several_slots_are_free_at_once(self) -> None:
        admission = make_admission(make_node("a", "m", "k"), cap=2)
        busy = [go(admission), go(admission)]
        waiters = [
            wait(admission, "m", priority=9),
            wait(admission, "m", priority=1),
            wait(admission, "k", priority=5),
        ]
        free(admission, *busy)
        assert served(waiters) == [0, 2]

    def test_serves_as_many_as_there_are_slots(self) -> None:
        admission = make_admission(make_node("a", "m"), make_node("b", "m"), cap=2)
        busy = [go(admission) for _ in range(4)]
        waiters = [wait(admission) for _ in range(5)]
        free(admission, *busy[:3])
        assert served(waiters) == [0, 1, 2]
        assert admission.waiting == 2

    def test_is_not_disturbed_by_those_who_leave(self) -> None:
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        waiters = [wait(admission, priority=priority) for priority in (9, 5, 7, 5, 9, 1)]
        for gone in (0, 3, 5):
            admission.leave(waiters[gone])
        staying = [waiters[number] for number in (1, 2, 4)]
        assert order_of_service(admission, busy, staying) == [2, 1, 0]


class TestQueues:
    def test_of_different_models_do_not_block_each_other(self) -> None:
        admission = make_admission(make_node("a", "m"), make_node("b", "k"))
        go(admission, "m")
        busy = go(admission, "k")
        waiters = [wait(admission, "m", priority=10), wait(admission, "k", priority=0)]
        free(admission, busy)
        assert served(waiters) == [1]

    def test_of_different_affinities_do_not_block_each_other(self) -> None:
        admission = make_admission(make_node("a", "m"), make_node("b", "m"))
        busy = {decision.node.id: decision for decision in (go(admission), go(admission))}
        waiters = [
            wait(admission, affinity="a", priority=10),
            wait(admission, priority=5),
            wait(admission, affinity="b", priority=0),
        ]
        free(admission, busy["b"])
        assert served(waiters) == [1], "anywhere goes before the pinned one: it has the better rank"
        outcome = waiters[1].outcome
        assert isinstance(outcome, Decision)
        free(admission, outcome)
        assert served(waiters) == [1, 2]

    def test_let_a_new_request_for_another_model_go_at_once(self) -> None:
        admission = make_admission(make_node("a", "m"), make_node("b", "k"))
        go(admission, "m")
        wait(admission, "m")
        go(admission, "k")


class TestTheBounds:
    def test_are_in_requests(self) -> None:
        admission = make_admission(make_node("a", "m"), max_waiting=2)
        go(admission)
        first = wait(admission)
        wait(admission)
        with pytest.raises(ApiError) as raised:
            wait(admission, priority=10)
        assert (raised.value.code, raised.value.retry_after_s) == (ErrorCode.QUEUE_FULL, 1)
        assert raised.value.code.status == 429
        admission.leave(first)
        wait(admission)

    def test_are_in_bytes(self) -> None:
        admission = make_admission(make_node("a", "m"), max_waiting_bytes=100)
        go(admission)
        wait(admission, size_bytes=60)
        with pytest.raises(ApiError) as raised:
            wait(admission, size_bytes=41)
        assert raised.value.code is ErrorCode.QUEUE_FULL
        wait(admission, size_bytes=40)
        assert admission.waiting_bytes == 100

    def test_count_all_queues_together(self) -> None:
        admission = make_admission(make_node("a", "m", "k"), max_waiting=1)
        go(admission)
        wait(admission, "m")
        with pytest.raises(ApiError):
            wait(admission, "k")

    def test_do_not_matter_while_a_node_is_free(self) -> None:
        admission = make_admission(
            make_node("a", "m"), make_node("b", "k"), max_waiting=1, max_waiting_bytes=10
        )
        go(admission, "m")
        wait(admission, "m", size_bytes=10)
        go(admission, "k", size_bytes=1_000_000)

    def test_leave_nothing_behind_for_a_request_that_was_refused(self) -> None:
        admission = make_admission(make_node("a", "m"), max_waiting=1)
        busy = go(admission)
        first = wait(admission)
        with pytest.raises(ApiError):
            wait(admission, affinity="a")
        free(admission, busy)
        outcome = first.outcome
        assert isinstance(outcome, Decision)
        free(admission, outcome)
        go(admission, affinity="a")


class TestLeaving:
    def test_is_possible_at_any_place_in_the_queue(self) -> None:
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        waiters = [wait(admission, size_bytes=size) for size in (1, 10, 100)]
        admission.leave(waiters[1])
        assert (admission.waiting, admission.waiting_bytes) == (2, 101)
        admission.leave(waiters[0])
        assert (admission.waiting, admission.waiting_bytes) == (1, 100)
        free(admission, busy)
        assert served(waiters) == [2]

    def test_twice_counts_once(self) -> None:
        admission = make_admission(make_node("a", "m"))
        go(admission)
        waiter = wait(admission)
        wait(admission)
        admission.leave(waiter)
        admission.leave(waiter)
        assert (admission.waiting, admission.waiting_bytes) == (1, 10)

    def test_after_being_served_changes_nothing(self) -> None:
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        waiters = [wait(admission), wait(admission)]
        free(admission, busy)
        outcome = waiters[0].outcome
        admission.leave(waiters[0])
        assert waiters[0].outcome is outcome
        assert (admission.waiting, admission.waiting_bytes) == (1, 10)

    def test_leaves_no_queue_in_the_way_of_the_next_request(self) -> None:
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        admission.leave(wait(admission))
        busy.booking.release()
        go(admission)

    def test_keeps_nothing_of_those_who_left_behind_one_who_stays(self) -> None:
        class Client:
            def wake(self) -> None:
                raise AssertionError("served after it left")

        admission = make_admission(make_node("a", "m"))
        go(admission)
        wait(admission, priority=10)
        clients = [Client() for _ in range(50)]
        gone = [wait(admission, priority=1, wake=client.wake) for client in clients]
        alive = weakref.WeakSet(clients)
        for waiter in gone:
            admission.leave(waiter)
        del clients, gone, waiter
        assert len(alive) == 0
        assert admission.waiting == 1


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
            waiting = [client.rank for client in mine if client.waits]
            gone = [client.rank for client in mine if not client.waits]
            assert not waiting or not gone or max(gone) < min(waiting)

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
        assert decision.booking.release()
        assert not decision.booking.release()
        self.freed()

    @precondition(lambda self: self.some(lambda client: client.runs))
    @rule(data=st.data())
    def attempt_fails(self, data: st.DataObject) -> None:
        client = self.any_of(self.some(lambda client: client.runs), data)
        assert client.decision is not None
        model, affinity = client.queue
        request = make_request(model, affinity=affinity)
        if client.decision.attempt_failed(client.decision.booking.node.id, request):
            client.moved = True
            self.freed()

    @rule(name=st.sampled_from("abc"), drained=st.booleans())
    def drain_or_restore(self, name: str, drained: bool) -> None:
        self.nodes[name].drained = drained
        self.freed()

    @rule(name=st.sampled_from("abc"), health=st.sampled_from(Health))
    def change_health(self, name: str, health: Health) -> None:
        self.nodes[name].health = health
        self.freed()

    @invariant()
    def counters_are_exact(self) -> None:
        waiting = self.some(lambda client: client.waits)
        assert self.admission.waiting == len(waiting) <= self.MAX_WAITING
        assert self.admission.waiting_bytes == sum(client.size_bytes for client in waiting) <= self.MAX_BYTES
        for node in self.nodes.values():
            mine = [client for client in self.clients if client.runs and self.node_of(client) is node]
            assert node.in_flight == len(mine)
            assert mine or node.booked_s == 0.0

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
            running[0].decision.booking.release()
            self.freed()
        assert not self.some(lambda client: client.waits)
        assert (self.admission.waiting, self.admission.waiting_bytes) == (0, 0)
        assert [node.in_flight for node in self.nodes.values()] == [0, 0, 0]


TestQueueOverTime = QueueOverTime.TestCase
TestQueueOverTime.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
