"""Bookings: a request's claim on a node, and what a node says of its load."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from routing_fleet import NOTHING, WORK, booked, make_node, make_router

from extproc.routing.loads import Work
from extproc.routing.node import LATENCIES_KEPT, REPORT_FRESH_S, Booking, EngineReport

SECONDS = st.floats(min_value=1e-6, max_value=1e6)


class TestABooking:
    def test_charges_its_node_at_once(self) -> None:
        router = make_router(node := make_node("a"))
        router.book(node, Work(100.0, 10.0, 1.5), 0.0)
        router.book(node, Work(200.0, 20.0, 2.0), 0.0)
        assert node.in_flight == 2
        assert booked(router, node) == (2, 330.0, 315.0, 3.5)

    def test_frees_its_node_exactly_once(self) -> None:
        router = make_router(node := make_node("a"))
        other, booking = router.book(node, WORK, 0.0), router.book(node, WORK, 0.0)
        assert booking.release(0.0) is True
        assert booking.release(0.0) is False
        assert node.in_flight == 1
        assert booked(router, node) == (1, 1100.0, 1050.0, WORK.prefill_s)
        assert not other.released

    def test_moves_with_its_request(self) -> None:
        failed, following = make_node("a"), make_node("b")
        router = make_router(failed, following)
        booking = router.book(failed, WORK, 0.0)
        assert booking.move(following, Work(1000.0, 100.0, 3.0), 0.0) is True
        assert (failed.in_flight, following.in_flight) == (0, 1)
        assert booked(router, failed) == NOTHING
        assert booked(router, following) == (1, 1100.0, 1050.0, 3.0)
        booking.release(0.0)
        assert booked(router, following) == NOTHING

    def test_stays_where_it_is_when_it_moves_to_its_own_node(self) -> None:
        router = make_router(node := make_node("a"))
        booking = router.book(node, WORK, 0.0)
        assert booking.move(node, Work(1.0, 1.0, 5.0), 0.0) is False
        assert booked(router, node) == (1, 1100.0, 1050.0, 1.0)

    def test_never_moves_after_its_release(self) -> None:
        failed, following = make_node("a"), make_node("b")
        router = make_router(failed, following)
        booking = router.book(failed, WORK, 0.0)
        booking.release(0.0)
        assert booking.move(following, WORK, 0.0) is False
        assert booked(router, following) == NOTHING

    def test_is_freed_on_the_node_it_was_taken_from_even_if_another_has_the_same_id(self) -> None:
        before, after = make_node("a"), make_node("a")
        booking = make_router(before).book(before, WORK, 0.0)
        make_router(after).book(after, WORK, 0.0)
        booking.release(0.0)
        assert (before.in_flight, after.in_flight) == (0, 1)

    @given(st.lists(SECONDS, min_size=1), st.randoms())
    def test_leaves_an_idle_node_with_exactly_nothing(
        self, seconds: list[float], order: random.Random
    ) -> None:
        router = make_router(node := make_node("a"))
        bookings = [router.book(node, Work(each / 3, each / 7, each), 0.0) for each in seconds]
        order.shuffle(bookings)
        for booking in bookings:
            booking.release(0.0)
        assert node.in_flight == 0
        assert booked(router, node) == NOTHING


class TestTheWait:
    """Prefill that is booked runs down by itself; what happened corrects it."""

    def test_runs_down_as_time_passes_and_never_below_nothing(self) -> None:
        router = make_router(node := make_node("a"))
        router.book(node, Work(100.0, 10.0, 4.0), 0.0)
        assert [booked(router, node, now_s)[3] for now_s in (0.0, 1.0, 4.0, 9.0)] == [4.0, 3.0, 0.0, 0.0]

    def test_of_a_node_that_ran_dry_begins_with_the_next_pick(self) -> None:
        router = make_router(node := make_node("a"))
        router.book(node, Work(100.0, 10.0, 4.0), 0.0)
        router.book(node, Work(100.0, 10.0, 2.0), 10.0)
        assert booked(router, node, 10.0)[3] == 2.0

    def test_follows_an_answer_that_began_late_or_early(self) -> None:
        router = make_router(node := make_node("a"))
        first, second = (router.book(node, Work(100.0, 10.0, 4.0), 0.0) for _ in range(2))
        first.begun(6.0, 6.0)
        assert booked(router, node, 6.0)[3] == 4.0
        second.begun(7.0, 7.0)
        assert booked(router, node, 7.0)[3] == 0.0

    def test_follows_the_first_word_of_an_answer_only(self) -> None:
        router = make_router(node := make_node("a"))
        first, second = (router.book(node, Work(100.0, 10.0, 4.0), 0.0) for _ in range(2))
        first.begun(6.0, 6.5)
        second.begun(7.0, 7.5)
        first.begun(6.0, 7.6)
        assert booked(router, node, 7.6)[3] == 0.0

    def test_is_not_moved_by_old_news(self) -> None:
        router = make_router(node := make_node("a"))
        early = router.book(node, Work(100.0, 10.0, 4.0), 0.0)
        router.book(node, Work(100.0, 10.0, 2.0), 10.0)
        early.begun(3.0, 10.5)
        assert booked(router, node, 10.5)[3] == 1.5

    def test_loses_what_a_request_that_went_away_had_left_of_its_own(self) -> None:
        router = make_router(node := make_node("a"))
        first, second = (router.book(node, Work(100.0, 10.0, 4.0), 0.0) for _ in range(2))
        second.release(1.0)
        assert booked(router, node, 1.0)[3] == 3.0
        router.book(node, Work(100.0, 10.0, 4.0), 1.0)
        first.release(2.0)
        assert booked(router, node, 2.0)[3] == 4.0


class BookingsOverTime(RuleBasedStateMachine):
    """However bookings come, move and go, the nodes' sums are those of the live ones."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.nodes = [make_node(name) for name in "abc"]
        self.router = make_router(*self.nodes)
        self.bookings: list[Booking] = []
        self.now_s = 0.0

    @rule(seconds=st.floats(0.0, 100.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(target=live, node=st.integers(0, 2), seconds=SECONDS)
    def book(self, node: int, seconds: float) -> Booking:
        booking = self.router.book(self.nodes[node], Work(seconds, seconds / 3, seconds), self.now_s)
        self.bookings.append(booking)
        return booking

    @rule(booking=live, node=st.integers(0, 2), seconds=SECONDS)
    def move(self, booking: Booking, node: int, seconds: float) -> None:
        booking.move(self.nodes[node], Work(seconds, seconds / 3, seconds), self.now_s)

    @rule(booking=live)
    def begun(self, booking: Booking) -> None:
        booking.begun(self.now_s, self.now_s)

    @rule(target=live, booking=consumes(live), again=st.booleans())
    def release(self, booking: Booking, again: bool) -> object:
        first = booking in self.bookings
        assert booking.release(self.now_s) is first
        if first:
            self.bookings.remove(booking)
        return booking if again else multiple()

    @invariant()
    def sums_are_exact(self) -> None:
        for node in self.nodes:
            mine = [booking.work for booking in self.bookings if booking.node is node]
            in_flight, tokens, _, wait_s = booked(self.router, node, self.now_s)
            assert node.in_flight == in_flight == len(mine)
            expected = sum(work.prompt_tokens + work.output_tokens for work in mine)
            assert tokens == pytest.approx(expected, rel=1e-6, abs=1e-6)
            assert 0.0 <= wait_s <= sum(work.prefill_s for work in mine) * (1 + 1e-6) + 1e-6
            assert mine or booked(self.router, node, self.now_s) == NOTHING


TestBookingsOverTime = BookingsOverTime.TestCase
TestBookingsOverTime.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


class TestForeignRequests:
    def test_are_what_the_engine_reported_beyond_ours_then(self) -> None:
        node = make_node("a")
        node.take_report(EngineReport(at_s=0.0, running=3, waiting=2), ours=1)
        assert node.foreign_requests(1.0) == 4

    def test_do_not_change_when_ours_end_or_begin_between_two_reports(self) -> None:
        node = make_node("a")
        router = make_router(node)
        bookings = [router.book(node, WORK, 0.0) for _ in range(3)]
        node.take_report(EngineReport(at_s=0.0, running=5), ours=node.in_flight)
        for booking in bookings:
            booking.release(0.0)
        assert node.foreign_requests(0.1) == 2, "those that ended were never foreign"
        router.book(node, WORK, 0.0)
        assert node.foreign_requests(0.2) == 2, "one that began hides none"

    def test_are_none_on_a_node_that_has_just_become_idle(self) -> None:
        node = make_node("a")
        booking = make_router(node).book(node, WORK, 0.0)
        node.take_report(EngineReport(at_s=0.0, running=1), ours=node.in_flight)
        booking.release(0.0)
        assert node.foreign_requests(0.1) == 0

    @given(st.integers(0, 100), st.integers(0, 100))
    def test_are_never_negative(self, running: int, ours: int) -> None:
        node = make_node("a")
        node.take_report(EngineReport(at_s=0.0, running=running), ours)
        assert node.foreign_requests(1.0) == max(0, running - ours)

    def test_are_unknown_and_so_none_without_a_fresh_report(self) -> None:
        node = make_node("a")
        assert node.foreign_requests(0.0) == 0
        node.take_report(EngineReport(at_s=0.0, waiting=7), ours=0)
        assert node.foreign_requests(0.0) == 0, "running requests are not known"
        node.take_report(EngineReport(at_s=0.0, running=7), ours=0)
        assert node.foreign_requests(REPORT_FRESH_S) == 7
        assert node.foreign_requests(REPORT_FRESH_S + 0.1) == 0


class TestTheP99Latency:
    def test_is_unknown_before_the_first_request(self) -> None:
        assert make_node("a").p99_latency_s() is None

    @given(st.lists(st.floats(0, 1e4), min_size=1, max_size=300))
    def test_is_the_smallest_latency_that_99_percent_do_not_exceed(self, latencies_s: list[float]) -> None:
        node = make_node("a")
        node.latencies_s.extend(latencies_s)
        rank = math.ceil(len(latencies_s) * 99 / 100)
        assert node.p99_latency_s() == sorted(latencies_s)[rank - 1]

    def test_leaves_out_the_slowest_of_a_hundred(self) -> None:
        node = make_node("a")
        node.latencies_s.extend([*([0.1] * 99), 60.0])
        assert node.p99_latency_s() == 0.1

    def test_forgets_the_oldest_latencies(self) -> None:
        node = make_node("a")
        node.latencies_s.extend([100.0, *([0.5] * LATENCIES_KEPT)])
        assert len(node.latencies_s) == LATENCIES_KEPT
        assert max(node.latencies_s) == 0.5
