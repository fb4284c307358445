"""`strategy: static`: requests go together, to a node that has nothing to do."""

import random

from routing_fleet import make_node, make_request

from extproc.routing.admission import Admission, Batches
from extproc.routing.node import Health, Node
from extproc.routing.router import Decision, Router
from extproc.routing.waiting import Waiter


class Fleet:
    """Nodes `a`, `b`, ... that take batches of four, and one more second of waiting at most."""

    SIZE = 4

    def __init__(self, nodes: int = 1, spares: int = 0) -> None:
        self.nodes = [make_node(name, "m") for name in "abc"[:nodes]]
        self.nodes += [make_node(name, "m", weight=0.0) for name in "xyz"[:spares]]
        router = Router(self.nodes, self.SIZE, random.Random(1))
        self.admission = Admission(router, 100, 10_000, Batches(self.SIZE, max_wait_s=1.0))
        self.sent: list[Decision | Waiter] = []

    def send(self, count: int, now_s: float = 0.0, priority: int = 5) -> None:
        for _ in range(count):
            request = make_request("m", priority=priority)
            self.sent.append(self.admission.submit(request, 10, now_s, lambda: None))

    @property
    def decisions(self) -> list[Decision | None]:
        outcomes = (sent.outcome if isinstance(sent, Waiter) else sent for sent in self.sent)
        return [outcome if isinstance(outcome, Decision) else None for outcome in outcomes]

    def running(self) -> list[int]:
        return [node.in_flight for node in self.nodes]

    def finish(self, node: Node, requests: int, now_s: float) -> None:
        mine = [one for one in self.decisions if one and one.node is node and not one.booking.released]
        for decision in mine[:requests]:
            decision.booking.release(now_s)
            self.admission.freed(now_s)


def test_a_full_batch_goes_at_once_and_together() -> None:
    fleet = Fleet()
    fleet.send(3)
    assert fleet.running() == [0]
    fleet.send(1)
    assert fleet.running() == [4]
    assert isinstance(fleet.sent[3], Decision)
    assert fleet.admission.waiting == 0


def test_the_next_batch_starts_when_the_running_one_is_done() -> None:
    fleet = Fleet()
    fleet.send(8)
    assert fleet.running() == [4]
    fleet.finish(fleet.nodes[0], 3, now_s=0.5)
    assert (fleet.running(), fleet.admission.waiting) == ([1], 4)
    fleet.finish(fleet.nodes[0], 1, now_s=0.6)
    assert (fleet.running(), fleet.admission.waiting) == ([4], 0)


def test_batches_go_to_nodes_that_are_idle() -> None:
    fleet = Fleet(nodes=3)
    fleet.send(12)
    assert fleet.running() == [4, 4, 4]
    for batch in (fleet.decisions[:4], fleet.decisions[4:8], fleet.decisions[8:]):
        assert len({decision.node.id for decision in batch if decision}) == 1


def test_with_64_waiting_a_node_sees_whole_batches_only() -> None:
    fleet = Fleet()
    fleet.send(64)
    for left in range(60, -1, -4):
        assert (fleet.running(), fleet.admission.waiting) == ([4], left)
        fleet.finish(fleet.nodes[0], 4, now_s=0.1)
    assert fleet.running() == [0]


def test_a_lone_request_leaves_once_it_has_waited_long_enough() -> None:
    fleet = Fleet()
    fleet.send(1, now_s=10.0)
    waiter = fleet.sent[0]
    assert isinstance(waiter, Waiter)
    assert fleet.admission.due_s(waiter) == 11.0
    fleet.admission.freed(10.9)
    assert fleet.running() == [0]
    fleet.admission.freed(11.0)
    assert fleet.running() == [1]


def test_one_whose_time_is_up_takes_along_whoever_waits() -> None:
    fleet = Fleet()
    fleet.send(1, now_s=0.0)
    fleet.send(2, now_s=0.9)
    fleet.admission.freed(1.0)
    assert fleet.running() == [3]


def test_one_whose_time_is_up_still_waits_for_an_idle_node() -> None:
    fleet = Fleet()
    fleet.send(5, now_s=0.0)
    fleet.admission.freed(5.0)
    assert fleet.running() == [4]
    fleet.finish(fleet.nodes[0], 4, now_s=6.0)
    assert fleet.running() == [1]


def test_the_more_important_are_in_the_batch() -> None:
    fleet = Fleet()
    fleet.send(4)
    fleet.send(4, priority=1)
    fleet.send(2, priority=9)
    fleet.finish(fleet.nodes[0], 4, now_s=0.1)
    went = [decision is not None for decision in fleet.decisions[4:]]
    assert went == [True, True, False, False, True, True]


def test_a_request_has_fallbacks_though_they_may_be_busy() -> None:
    fleet = Fleet(nodes=2)
    fleet.send(4)
    assert all(decision and len(decision.fallbacks) == 1 for decision in fleet.decisions)


def test_a_node_that_is_not_trusted_gets_smaller_batches() -> None:
    fleet = Fleet(nodes=2)
    for node in fleet.nodes:
        node.limit = 1
        fleet.admission.router.health_changed(node, 0.0)
    fleet.send(4)
    assert (sorted(fleet.running()), fleet.admission.waiting) == ([0, 1], 3)
    fleet.admission.freed(1.0)
    assert (fleet.running(), fleet.admission.waiting) == ([1, 1], 2)


def test_a_spare_gets_a_batch_only_when_no_other_node_is_left() -> None:
    fleet = Fleet(nodes=1, spares=1)
    fleet.send(8)
    fleet.finish(fleet.nodes[0], 1, now_s=0.1)
    assert (fleet.running(), fleet.admission.waiting) == ([3, 0], 4)
    fleet.nodes[0].health = Health.OFFLINE
    fleet.admission.freed(0.2)
    assert (fleet.running(), fleet.admission.waiting) == ([3, 4], 0)
