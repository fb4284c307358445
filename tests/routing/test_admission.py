"""The queue: who waits, who goes next, and that nobody is lost or served twice."""

import json
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from routing_fleet import make_node, make_request, make_router

from extproc.config import KvCache
from extproc.openai.errors import ApiError, ErrorCode
from extproc.openai.request import Api, parse
from extproc.routing.admission import LONGEST_RETRY_S, Admission
from extproc.routing.node import EngineReport, Health, Node
from extproc.routing.router import Decision
from extproc.routing.waiting import Waiter


def make_admission(
    *nodes: Node, cap: int | None = 1, max_waiting: int = 100, max_waiting_bytes: int = 10_000
) -> Admission:
    return Admission(make_router(*nodes, cap=cap), max_waiting, max_waiting_bytes)


def never() -> None:
    pytest.fail("woken without an outcome to come")


def go(admission: Admission, model: str = "m", size_bytes: int = 10, **members: Any) -> Decision:
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
    **members: Any,
) -> Waiter:
    """Submit a request that must wait."""
    outcome = admission.submit(make_request(model, **members), size_bytes, now_s, wake)
    assert isinstance(outcome, Waiter)
    return outcome


def free(admission: Admission, *decisions: Decision) -> None:
    """Let requests end, all before the queue is served."""
    for decision in decisions:
        assert decision.booking.release(0.0)
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
        busy.booking.release(0.0)
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

    def test_lets_the_oldest_go_every_eighth_time(self) -> None:
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        waiters = [wait(admission, priority=priority) for priority in [0, 0, *[9] * 20]]
        order = order_of_service(admission, busy, waiters)
        assert (order.index(0), order.index(1)) == (7, 15)
        assert [number for number in order if number > 1] == list(range(2, 22))


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
            wait(admission)
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

    def test_turn_away_the_latest_of_the_lowest_priority_for_a_higher_one(self) -> None:
        admission = make_admission(make_node("a", "m", "k"), max_waiting=4)
        busy = go(admission)
        waiters = [wait(admission, "mk"[i % 2], priority=priority) for i, priority in enumerate([3, 1, 1, 5])]
        important = wait(admission, priority=5)
        for number, waiter in enumerate(waiters):
            assert isinstance(waiter.outcome, ApiError) == (number == 2)
        shed = waiters[2].outcome
        assert isinstance(shed, ApiError)
        assert shed.code is ErrorCode.QUEUE_FULL
        assert (admission.waiting, admission.waiting_bytes) == (4, 40)
        assert order_of_service(admission, busy, [waiters[3], important, waiters[0], waiters[1]]) == [
            0,
            1,
            2,
            3,
        ]

    def test_turn_away_only_as_many_as_make_room(self) -> None:
        admission = make_admission(make_node("a", "m"), max_waiting_bytes=100)
        go(admission)
        waiters = [wait(admission, size_bytes=30, priority=priority) for priority in (1, 2, 3)]
        wait(admission, size_bytes=50, priority=3)
        assert [waiter.outcome is None for waiter in waiters] == [False, False, True]
        with pytest.raises(ApiError):
            wait(admission, size_bytes=101, priority=9)  # nor would turning all away make room

    def test_turn_nobody_away_for_one_that_does_not_fit_all_the_same(self) -> None:
        admission = make_admission(make_node("a", "m"), max_waiting_bytes=100)
        go(admission)
        low, high = wait(admission, size_bytes=30, priority=1), wait(admission, size_bytes=60, priority=5)
        with pytest.raises(ApiError):
            wait(admission, size_bytes=50, priority=4)
        assert low.outcome is high.outcome is None

    def test_say_when_to_come_back_by_the_pace_of_the_queue(self) -> None:
        admission = make_admission(make_node("a", "m"), max_waiting=20)
        busy = go(admission)
        waiters = deque(wait(admission) for _ in range(20))
        assert admission.retry_after_s(0.0) == 1
        for step in range(10):  # one in two seconds
            busy.booking.release(0.0)
            admission.freed(2.0 * step)
            outcome = waiters.popleft().outcome
            assert isinstance(outcome, Decision)
            busy = outcome
            waiters.append(wait(admission))
        with pytest.raises(ApiError) as raised:
            admission.submit(make_request("m"), 10, 20.0, never)
        assert raised.value.retry_after_s == 40
        with pytest.raises(ApiError) as raised:
            admission.submit(make_request("m"), 10, 2_000.0, never)
        assert raised.value.retry_after_s == LONGEST_RETRY_S

    def test_know_no_pace_of_a_queue_that_has_just_begun(self) -> None:
        admission = make_admission(make_node("a", "m"))
        busy = go(admission)
        for _ in range(5):
            waiter = wait(admission)
            free(admission, busy)
            assert isinstance(waiter.outcome, Decision)
            busy = waiter.outcome
        wait(admission, now_s=3_600.0)
        assert admission.retry_after_s(3_600.0) == 1

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
        busy.booking.release(0.0)
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


def test_a_prompt_that_only_seems_short_holds_nobody_up() -> None:
    """Images count what they are to the engine, not what their addresses take of the body."""
    router = make_router(make_node("big", "m", hardware="h100-80g"), make_node("small", "m"), cap=1)
    for node, tokens in ((router.nodes["big"], 1_000_000), (router.nodes["small"], 20_000)):
        node.take_report(EngineReport(0.0, kv_capacity_tokens=tokens), ours=0)
        router.reported(node)
    admission = Admission(router, 100, 10_000_000)
    busy = [go(admission, affinity=node) for node in ("big", "small")]
    content = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}] * 200
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "x-inferact": {"priority": 9}}
    images = admission.submit(parse(Api.CHAT_COMPLETIONS, json.dumps(body).encode()), 10, 0.0, lambda: None)
    ordinary = wait(admission)
    free(admission, busy[1])
    assert isinstance(images, Waiter)
    assert (images.outcome, served([ordinary])) == (None, [0])


def test_a_node_that_comes_serves_those_who_wait() -> None:
    busy = make_node("a", "m")
    admission = make_admission(busy)
    go(admission)
    waiter = wait(admission)
    fresh = make_node("b", "m")
    admission.router.set_nodes([busy, fresh])
    admission.freed(1.0)
    assert isinstance(waiter.outcome, Decision)
    assert waiter.outcome.node is fresh


def test_those_who_wait_for_a_model_that_is_gone_get_404_at_once() -> None:
    gone, other = make_node("a", "m"), make_node("b", "n")
    admission = make_admission(gone, other)
    go(admission)
    waiter = wait(admission)
    admission.router.set_nodes([other])
    admission.freed(1.0)
    assert isinstance(waiter.outcome, ApiError)
    assert waiter.outcome.code is ErrorCode.MODEL_NOT_FOUND
    assert admission.waiting == 0


def test_a_cap_that_is_raised_lets_those_go_who_wait() -> None:
    admission = make_admission(make_node("a", "m"))
    go(admission)
    waiters = [wait(admission) for _ in range(3)]
    admission.router.configure(3, KvCache())
    admission.freed(1.0)
    assert served(waiters) == [0, 1]
