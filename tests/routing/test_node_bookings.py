"""Bookings: a request's claim on a node, and what a node says of its load."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from routing_fleet import make_node

from extproc.routing.node import LATENCIES_KEPT, REPORT_FRESH_S, Booking, EngineReport

SECONDS = st.floats(min_value=1e-6, max_value=1e6)


class TestABooking:
    def test_charges_its_node_at_once(self) -> None:
        node = make_node("a")
        node.book(1.5)
        node.book(2.0)
        assert (node.in_flight, node.booked_s) == (2, 3.5)

    def test_frees_its_node_exactly_once(self) -> None:
        node = make_node("a")
        other, booking = node.book(1.0), node.book(2.0)
        assert booking.release() is True
        assert booking.release() is False
        assert (node.in_flight, node.booked_s) == (1, 1.0)
        assert not other.released

    def test_moves_with_its_request(self) -> None:
        failed, following = make_node("a"), make_node("b")
        booking = failed.book(1.0)
        assert booking.move(following, 3.0) is True
        assert (failed.in_flight, failed.booked_s) == (0, 0.0)
        assert (following.in_flight, following.booked_s) == (1, 3.0)
        booking.release()
        assert (following.in_flight, following.booked_s) == (0, 0.0)

    def test_stays_where_it_is_when_it_moves_to_its_own_node(self) -> None:
        node = make_node("a")
        booking = node.book(1.0)
        assert booking.move(node, 5.0) is False
        assert (node.in_flight, node.booked_s) == (1, 1.0)

    def test_never_moves_after_its_release(self) -> None:
        failed, following = make_node("a"), make_node("b")
        booking = failed.book(1.0)
        booking.release()
        assert booking.move(following, 1.0) is False
        assert following.in_flight == 0

    def test_is_freed_on_the_node_it_was_taken_from_even_if_another_has_the_same_id(self) -> None:
        before, after = make_node("a"), make_node("a")
        booking = before.book(1.0)
        after.book(1.0)
        booking.release()
        assert (before.in_flight, after.in_flight) == (0, 1)

    @given(st.lists(SECONDS, min_size=1), st.randoms())
    def test_leaves_an_idle_node_at_exactly_zero_seconds(
        self, seconds: list[float], order: random.Random
    ) -> None:
        node = make_node("a")
        bookings = [node.book(each) for each in seconds]
        order.shuffle(bookings)
        for booking in bookings:
            booking.release()
        assert (node.in_flight, node.booked_s) == (0, 0.0)


class BookingsOverTime(RuleBasedStateMachine):
    """However bookings come, move and go, the nodes' sums are those of the live ones."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.nodes = [make_node(name) for name in "abc"]
        self.bookings: list[Booking] = []

    @rule(target=live, node=st.integers(0, 2), seconds=SECONDS)
    def book(self, node: int, seconds: float) -> Booking:
        booking = self.nodes[node].book(seconds)
        self.bookings.append(booking)
        return booking

    @rule(booking=live, node=st.integers(0, 2), seconds=SECONDS)
    def move(self, booking: Booking, node: int, seconds: float) -> None:
        booking.move(self.nodes[node], seconds)

    @rule(target=live, booking=consumes(live), again=st.booleans())
    def release(self, booking: Booking, again: bool) -> object:
        first = booking in self.bookings
        assert booking.release() is first
        if first:
            self.bookings.remove(booking)
        return booking if again else multiple()

    @invariant()
    def sums_are_exact(self) -> None:
        for node in self.nodes:
            mine = [booking.service_s for booking in self.bookings if booking.node is node]
            assert node.in_flight == len(mine)
            assert node.booked_s == pytest.approx(sum(mine), rel=1e-6, abs=1e-6)
            assert mine or node.booked_s == 0.0


TestBookingsOverTime = BookingsOverTime.TestCase
TestBookingsOverTime.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


class TestForeignRequests:
    def test_are_what_the_engine_reported_beyond_ours_then(self) -> None:
        node = make_node("a")
        node.take_report(EngineReport(at_s=0.0, running=3, waiting=2), ours=1)
        assert node.foreign_requests(1.0) == 4

    def test_do_not_change_when_ours_end_or_begin_between_two_reports(self) -> None:
        node = make_node("a")
        bookings = [node.book(1.0) for _ in range(3)]
        node.take_report(EngineReport(at_s=0.0, running=5), ours=node.in_flight)
        for booking in bookings:
            booking.release()
        assert node.foreign_requests(0.1) == 2, "those that ended were never foreign"
        node.book(1.0)
        assert node.foreign_requests(0.2) == 2, "one that began hides none"

    def test_are_none_on_a_node_that_has_just_become_idle(self) -> None:
        node = make_node("a")
        booking = node.book(1.0)
        node.take_report(EngineReport(at_s=0.0, running=1), ours=node.in_flight)
        booking.release()
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
