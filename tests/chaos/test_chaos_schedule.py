"""The schedule of a run: the same for the same seed, and fair to what is tested."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from chaos_run import FLEET
from chaos_schedule import (
    LONGEST_BYTES,
    RECOVERY_S,
    SHORTEST_BYTES,
    UNSOUND,
    Event,
    Kind,
    plan_asks,
    plan_bursts,
    plan_events,
)

MODELS = sorted({model for node in FLEET for model in node.models})
SEEDS = range(8)


def of_nodes(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.node and event.kind is not Kind.DRAIN_AND_CRASH]


def blackouts(events: Sequence[Event]) -> set[float]:
    """When all nodes of a model are killed."""
    kills = Counter(event.at_s for event in events if event.kind is Kind.KILL)
    return {at_s for at_s, count in kills.items() if count > 1}


def test_a_seed_makes_the_same_schedule_again_and_another_makes_another() -> None:
    assert plan_events(1, 300, FLEET) == plan_events(1, 300, FLEET) != plan_events(2, 300, FLEET)
    assert plan_asks(1, 7, 300, MODELS) == plan_asks(1, 7, 300, MODELS)
    assert plan_asks(1, 7, 300, MODELS) != plan_asks(1, 8, 300, MODELS)
    assert plan_asks(1, 7, 300, MODELS) != plan_asks(2, 7, 300, MODELS)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_fault_is_over_when_the_run_ends(seed: int) -> None:
    events = plan_events(seed, 60, FLEET)
    assert events == sorted(events, key=lambda event: event.at_s)
    assert all(0 < event.at_s < event.until_s <= 60 for event in events)


@pytest.mark.parametrize("seed", SEEDS)
def test_five_minutes_see_every_kind_of_fault(seed: int) -> None:
    kinds = {event.kind for event in plan_events(seed, 300, FLEET)}
    assert kinds == set(Kind) - {Kind.STALL}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_has_one_fault_at_a_time_and_rest_after_it(seed: int) -> None:
    for node in FLEET:
        mine = [event for event in plan_events(seed, 300, FLEET) if event.node == node.id]
        for first, second in pairwise(mine):
            assert second.at_s >= first.until_s + RECOVERY_S


@pytest.mark.parametrize("seed", SEEDS)
def test_two_nodes_are_at_fault_at_most_but_in_a_blackout(seed: int) -> None:
    events = plan_events(seed, 300, FLEET)
    dark = blackouts(events)
    assert len(dark) == 4
    for event in of_nodes(events):
        at_once = [other for other in of_nodes(events) if other.at_s <= event.at_s < other.until_s]
        assert len(at_once) <= (4 if event.at_s in dark else 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_blackout_takes_all_nodes_of_one_model_and_two_of_each_other(seed: int) -> None:
    events = plan_events(seed, 300, FLEET)
    for at_s in blackouts(events):
        killed = {event.node for event in events if event.at_s == at_s}
        left = sorted(
            sum(model in node.models for node in FLEET if node.id not in killed) for model in MODELS
        )
        assert left == [0, 2, 2]


def test_every_kind_that_may_refuse_a_request_is_one_of_a_node() -> None:
    events = [event for seed in SEEDS for event in plan_events(seed, 300, FLEET)]
    assert all(event.node for event in events if event.kind in UNSOUND)


def test_clients_ask_in_order_within_the_run_and_join_bursts() -> None:
    bursts = set(plan_bursts(3, 120))
    plans = [plan_asks(3, client, 120, MODELS) for client in range(50)]
    for asks in plans:
        assert [ask.at_s for ask in asks] == sorted(ask.at_s for ask in asks)
        assert all(0 <= ask.at_s < 120 for ask in asks)
    joined = Counter(ask.at_s for asks in plans for ask in asks if ask.at_s in bursts)
    assert set(joined) == bursts
    assert min(joined.values()) > 3


def test_requests_are_of_every_sort_and_have_ids_of_their_own() -> None:
    asks = [ask for client in range(100) for ask in plan_asks(4, client, 120, MODELS)]
    assert len({ask.id for ask in asks}) == len(asks)
    assert {ask.model for ask in asks} == set(MODELS)
    assert {(ask.api, ask.stream) for ask in asks} == {(ask.api, s) for ask in asks for s in (True, False)}
    assert all(SHORTEST_BYTES <= ask.prompt_bytes <= LONGEST_BYTES for ask in asks)
    assert max(ask.prompt_bytes for ask in asks) > LONGEST_BYTES / 2
    leaving = sum(ask.leaves_after_s is not None for ask in asks)
    assert 0.05 < leaving / len(asks) < 0.15
