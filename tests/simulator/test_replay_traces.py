"""What can be done with the requests of a trace: halves, rates, arrivals between the ticks of a clock."""

import pytest
from replay_support import request, sharing

from extproc.simulator.replay.traces import (
    Part,
    TraceError,
    in_order,
    part_of,
    rate,
    scaled,
    shares_prefixes,
    tick_s,
)


def test_the_tick_of_a_clock_is_the_shortest_time_between_arrivals() -> None:
    assert tick_s([request(i, arrival_s=at_s) for i, at_s in enumerate((9.0, 0.0, 3.0, 3.0))]) == 3.0
    assert tick_s([request(1), request(2)]) == 0.0


def test_arrivals_are_spread_by_so_much() -> None:
    requests = in_order([request(i, arrival_s=5.0 + 3.0 * (i // 20)) for i in range(60)], 0, 3.0)
    for number, one in enumerate(requests):
        start_s = 3.0 * (number // 20)
        assert start_s <= one.arrival_s < start_s + 3.0
    assert len({one.arrival_s for one in requests}) == 60
    assert [one.id for one in requests] == list(range(60))


def test_the_same_seed_spreads_alike_and_another_does_not() -> None:
    requests = [request(i, arrival_s=3.0 * i) for i in range(9)]
    assert in_order(requests, 1, 3.0) == in_order(requests, 1, 3.0) != in_order(requests, 2, 3.0)


def test_requests_in_any_order_are_put_in_order_of_arrival() -> None:
    by_end = [
        request(1, 300, arrival_s=107.5),
        request(2, 100, arrival_s=7.5),
        request(3, 200, arrival_s=8.5),
    ]
    ordered = in_order(by_end)
    assert [one.prompt_tokens for one in ordered] == [100, 200, 300]
    assert [(one.id, one.arrival_s) for one in ordered] == [(0, 0.0), (1, 1.0), (2, 100.0)]


def test_a_shared_beginning_is_a_shared_prefix() -> None:
    assert shares_prefixes([sharing(1, 7, 8), sharing(2, 7, 9)])
    assert not shares_prefixes([sharing(1, 7, 8), sharing(2, 9, 8)])


def test_a_trace_is_halved_by_requests_each_half_from_zero() -> None:
    requests = [request(i, arrival_s=float(i)) for i in range(4)]
    first, second = part_of(requests, Part.FIRST), part_of(requests, Part.SECOND)
    assert [one.id for one in first] == [0, 1]
    assert [(one.id, one.arrival_s) for one in second] == [(2, 0.0), (3, 1.0)]
    assert part_of(requests, Part.ALL) == requests


def test_scaling_sends_the_same_requests_faster() -> None:
    requests = [request(i, arrival_s=float(i)) for i in range(4)]
    faster = scaled(requests, 2.0)
    assert [one.arrival_s for one in faster] == [0.0, 0.5, 1.0, 1.5]
    assert rate(faster) == 2 * rate(requests)


def test_requests_that_all_arrive_at_once_have_no_rate() -> None:
    with pytest.raises(TraceError, match="at the same time"):
        rate([request(1), request(2)])
