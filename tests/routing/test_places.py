"""Among equals first come, first served, whatever happens on the way: nobody loses a place in the queue."""

import pytest
from routing_fleet import make_node, make_request, make_router

from extproc.openai.errors import ApiError
from extproc.routing.admission import Admission
from extproc.routing.node import Health
from extproc.routing.router import Decision
from extproc.routing.waiting import Waiter


class Queue:
    """Two nodes that take one request each, both busy, and five that wait."""

    def __init__(self) -> None:
        self.a, self.b = make_node("a", "m"), make_node("b", "m")
        self.router = make_router(self.a, self.b, cap=1)
        self.admission = Admission(self.router, 100, 10_000)
        self.request = make_request("m")
        self.running: list[Decision] = []
        self.waiting: list[Waiter] = []
        for _ in range(7):
            outcome = self.admission.submit(self.request, 10, 0.0, lambda: None)
            if isinstance(outcome, Decision):
                self.running.append(outcome)
            else:
                self.waiting.append(outcome)

    def served(self) -> list[bool]:
        return [isinstance(waiter.outcome, Decision) for waiter in self.waiting]


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_the_slot_of_an_attempt_that_failed_is_for_the_first(queue: Queue) -> None:
    """The request that failed has gone on to a node that is full: it waits no second time."""
    failed = queue.running[0]
    assert queue.router.attempt_failed(failed, failed.node.id, queue.request, 1.0)
    queue.admission.freed(1.0)
    assert queue.served() == [True, False, False, False, False]
    failed.booking.release(2.0)
    queue.admission.freed(2.0)
    assert queue.served() == [True, False, False, False, False], "that node still has the one of before"
    queue.running[1].booking.release(3.0)
    queue.admission.freed(3.0)
    assert queue.served() == [True, True, False, False, False]


def test_a_slot_that_its_client_did_not_live_to_see_is_for_the_next(queue: Queue) -> None:
    queue.running[0].booking.release(1.0)
    queue.admission.freed(1.0)
    outcome = queue.waiting[0].outcome
    assert isinstance(outcome, Decision)
    outcome.booking.release(1.0)
    queue.admission.freed(1.0)
    assert queue.served() == [True, True, False, False, False]


def test_a_release_that_comes_to_nothing_costs_no_place(queue: Queue) -> None:
    """The only free node goes away before anyone is told of it."""
    queue.a.drained = True
    for decision in queue.running:
        if decision.node is queue.a:
            decision.booking.release(1.0)
    queue.admission.freed(1.0)
    assert not any(queue.served())
    queue.a.drained = False
    queue.admission.freed(2.0)
    assert queue.served() == [True, False, False, False, False]


def test_an_error_takes_only_the_one_it_is_about(queue: Queue) -> None:
    pinned = queue.admission.submit(make_request("m", affinity="a"), 10, 0.0, lambda: None)
    assert isinstance(pinned, Waiter)
    queue.a.health = Health.OFFLINE
    queue.admission.freed(1.0)
    assert isinstance(pinned.outcome, ApiError)
    assert [waiter.outcome for waiter in queue.waiting] == [None] * 5


class Slot:
    """One slot of a node that serves two models, given from waiter to waiter."""

    def __init__(self) -> None:
        self.admission = Admission(make_router(make_node("a", "m", "k"), cap=1), 100, 10_000)
        busy = self.admission.submit(make_request("m"), 10, 0.0, lambda: None)
        assert isinstance(busy, Decision)
        self.busy = busy
        self.waiting: list[Waiter] = []

    def wait(self, model: str, priority: int) -> None:
        waiter = self.admission.submit(make_request(model, priority=priority), 10, 0.0, lambda: None)
        assert isinstance(waiter, Waiter)
        self.waiting.append(waiter)

    def serve(self) -> Waiter:
        self.busy.booking.release(1.0)
        self.admission.freed(1.0)
        (served,) = [waiter for waiter in self.waiting if waiter.outcome is not None]
        self.waiting.remove(served)
        assert isinstance(served.outcome, Decision)
        self.busy = served.outcome
        return served


def test_the_oldest_gets_its_turn_though_it_waits_for_another_model() -> None:
    slot = Slot()
    slot.wait("k", priority=0)
    for _ in range(20):
        slot.wait("m", priority=9)
    models = [slot.serve().request.model for _ in range(10)]
    assert models.count("k") == 1


def test_a_turn_of_the_oldest_does_not_hold_up_the_important_behind_it() -> None:
    slot = Slot()
    slot.wait("m", priority=0)
    for _ in range(20):
        slot.wait("m", priority=9)
        slot.wait("k", priority=5)
    served = [slot.serve().request.hints.priority for _ in range(21)]
    assert served.count(9) >= 18


def test_a_request_that_few_nodes_have_room_for_is_in_nobodys_way() -> None:
    small, large = make_node("small", "m", hardware="rtx-4090"), make_node("large", "m")
    router = make_router(small, large, cap=1)
    admission = Admission(router, 100, 1 << 30)
    running = {
        outcome.node.id: outcome
        for outcome in (admission.submit(make_request("m"), 10, 0.0, lambda: None) for _ in range(2))
        if isinstance(outcome, Decision)
    }
    long, short = make_request("m", prompt="x" * 400_000), make_request("m")
    first, second = (admission.submit(one, 10, 0.0, lambda: None) for one in (long, short))
    assert isinstance(first, Waiter)
    assert isinstance(second, Waiter)
    running["small"].booking.release(1.0)
    admission.freed(1.0)
    assert first.outcome is None
    assert isinstance(second.outcome, Decision)
    running["large"].booking.release(2.0)
    admission.freed(2.0)
    assert isinstance(first.outcome, Decision)
    assert first.outcome.node is large
