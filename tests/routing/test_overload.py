"""A fleet at twice its capacity for a minute: who waits, who is served, and what the queue costs."""

from statistics import fmean

import pytest

from bench.overload import NODES, SHARES, SLOTS, TIMEOUT_S, Outcome, Overload, capacity

SECONDS = 60.0
CAPPED, INFERRED, ENGINES = "max_batch_size", "no cap but what the engines show", "no queue"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    rate = 2.0 * capacity()
    kinds = {CAPPED: (SLOTS, False), INFERRED: (None, True), ENGINES: (None, False)}
    return {name: Overload(cap, reports, seed=1).run(rate, SECONDS) for name, (cap, reports) in kinds.items()}


@pytest.fixture(params=[CAPPED, INFERRED])
def outcome(request: pytest.FixtureRequest, outcomes: dict[str, Outcome]) -> Outcome:
    return outcomes[request.param]


def test_the_most_important_hardly_wait(outcome: Outcome) -> None:
    assert outcome.wait_s(10, 99) < 0.1 * outcome.wait_s(5, 99)
    assert outcome.wait_s(10, 99) < 0.5


def test_the_least_important_get_whole_answers_all_the_time(outcome: Outcome) -> None:
    """An eighth goes to the oldest, and they still have time for an answer though most wait in vain."""
    for start_s in (20.0, 40.0):
        ends = [one.ended_s for one in outcome.of(0) if one.is_served]
        assert sum(start_s <= end_s < start_s + 20.0 for end_s in ends) > outcome.throughput * 20.0 * 0.1


def test_of_those_that_get_a_node_few_are_cut(outcome: Outcome) -> None:
    cut = [one for one in outcome.clients if one.decision and one.ended_s == one.arrived_s + TIMEOUT_S]
    assert len(cut) < 0.02 * len(outcome.clients)


def test_nobody_waits_longer_than_the_timeout(outcome: Outcome) -> None:
    assert max(outcome.wait_s(priority, 100) for priority in SHARES) <= TIMEOUT_S


def test_each_priority_is_first_come_first_served_but_for_the_oldest(outcome: Outcome) -> None:
    for priority in SHARES:
        went = [one.left_queue_s for one in outcome.of(priority) if one.decision]
        assert went == sorted(went)


def test_engines_keep_hardly_anyone_waiting(outcomes: dict[str, Outcome]) -> None:
    assert max(outcomes[CAPPED].engine_waiting) < 2
    assert fmean(outcomes[INFERRED].engine_waiting) < 3


def test_the_queue_costs_no_throughput(outcome: Outcome, outcomes: dict[str, Outcome]) -> None:
    without = outcomes[ENGINES]
    assert max(without.engine_waiting) > 50 * NODES, "else the engines were not overloaded"
    assert outcome.throughput > 0.97 * without.throughput
