"""Our own router in a replay: the code that serves requests, under each policy."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from replay_support import fleet, node_config, nodes, request, sharing

from bench.policies import POLICIES
from extproc.config import CachePolicy, KvCache, Scheduler
from extproc.hardware import PROFILES, Hardware
from extproc.simulator.replay.fleet import make_fleet
from extproc.simulator.replay.loop import replay
from extproc.simulator.replay.picking import RefusedError
from extproc.simulator.replay.routers import ROUTERS, OwnRouter
from extproc.simulator.replay.traces import TraceRequest


def replayed(policy: str, requests: Sequence[TraceRequest]) -> list[int]:
    """Where the requests go on four equal nodes."""
    simulated = fleet(4, PROFILES[Hardware.A100_80G])
    return [job.node for job in replay(requests, simulated, ROUTERS[policy](simulated.nodes, 0)).jobs]


def test_every_policy_of_the_configuration_can_be_replayed() -> None:
    assert set(ROUTERS) == {policy.value for policy in CachePolicy} <= set(POLICIES)


@pytest.mark.parametrize("policy", ROUTERS)
def test_it_repeats_itself_by_its_seed(policy: str) -> None:
    def picks(seed: int) -> list[int]:
        picker = ROUTERS[policy](nodes(4), seed)
        return [picker.pick(sharing(i, i % 5, 10 + i % 7, 100 + i), float(i)) for i in range(60)]

    assert picks(3) == picks(3)


@pytest.mark.parametrize("policy", ROUTERS)
def test_it_spares_nodes_that_could_never_hold_a_request(policy: str) -> None:
    small = nodes(2, kv_capacity_tokens=1000, name="small")
    picker = ROUTERS[policy]([*small, *nodes(1, kv_capacity_tokens=100_000)], 0)
    assert {picker.pick(sharing(number, 1, 2, 3), 0.0) for number in range(6)} == {2}


@pytest.mark.parametrize("policy", ROUTERS)
def test_it_answers_every_request_and_has_nothing_booked_in_the_end(policy: str) -> None:
    simulated = fleet(4)
    picker = ROUTERS[policy](simulated.nodes, 0)
    requests = [sharing(i, i % 3, 10 + i, arrival_s=i * 0.05) for i in range(100)]
    outcome = replay(requests, simulated, picker)
    assert not any(job.refused for job in outcome.jobs)
    loads = picker.router.loads
    assert not any((load.requests, load.tokens, load.context_tokens) != (0, 0, 0) for load in loads.on)


def equal_requests(count: int) -> list[TraceRequest]:
    """Each asks the same, when the one before is answered."""
    return [sharing(i, *range(1, 7), arrival_s=i * 2.0) for i in range(count)]


def test_prefix_aware_goes_back_to_where_a_prompt_was_and_lru_does_not() -> None:
    assert len(set(replayed("prefix-aware", equal_requests(40)))) == 1
    assert len(set(replayed("lru", equal_requests(40)))) == 4


def test_adaptive_becomes_prefix_aware_by_itself() -> None:
    new = [sharing(i, *range(11, 17), arrival_s=i * 2.0) for i in range(30, 60)]
    picks = replayed("adaptive", equal_requests(30) + new)
    assert len(set(picks[:20])) == 4
    assert len(set(picks[30:])) == 1


def test_different_prompts_use_all_nodes() -> None:
    picker = ROUTERS["prefix-aware"](nodes(4), 0)
    picks = Counter(picker.pick(request(i), i * 0.01) for i in range(100))
    assert max(picks.values()) < 1.5 * 25


def capped(cap: int, **scheduler: int) -> OwnRouter:
    """Prefix-aware over two nodes that take so many requests at once."""
    return OwnRouter(nodes(2), 0, KvCache(), cap, Scheduler(**scheduler))


def test_over_the_cap_requests_wait_for_an_answer_and_go_first_come_first_served() -> None:
    picker = capped(1)
    picks = [picker.pick(request(i), 0.0) for i in range(4)]
    assert set(picks[:2]) == {0, 1} and picks[2:] == [None, None]
    assert picker.released() == []
    picker.finished(1, 1.0, 0)
    assert picker.released() == [(2, picks[1])]
    assert picker.released() == []
    picker.finished(2, 2.0, 0)
    assert picker.released() == [(3, picks[1])]


def test_past_the_queues_bound_requests_are_refused() -> None:
    picker = capped(1, max_queue=1)
    assert [picker.pick(request(i), 0.0) is None for i in range(3)] == [False, False, True]
    with pytest.raises(RefusedError):
        picker.pick(request(3), 0.0)


def test_a_cap_makes_a_replay_wait_and_loses_nobody() -> None:
    simulated = fleet(2)
    picker = OwnRouter(simulated.nodes, 0, KvCache(), 1)
    jobs = replay([request(i, arrival_s=0.01 * i) for i in range(20)], simulated, picker).jobs
    assert not any(job.refused for job in jobs)
    assert Counter(job.node for job in jobs) == {0: 10, 1: 10}
    for node in (0, 1):
        mine = [job for job in jobs if job.node == node]
        assert all(before.finished_s <= after.first_token_s for before, after in pairwise(mine))


def test_weights_steer_the_requests() -> None:
    configs = [node_config("a"), node_config("b", weight=0.05), node_config("spare", weight=0)]
    simulated = make_fleet(configs)
    picker = OwnRouter(simulated.nodes, 0, KvCache())
    jobs = replay([request(i, 3000, arrival_s=0.1 * i) for i in range(100)], simulated, picker).jobs
    sent = Counter(job.node for job in jobs)
    assert sent[0] > 2 * sent[1] > 0 == sent[2]


def test_each_request_goes_to_a_node_that_serves_its_model() -> None:
    made = make_fleet([node_config("a", models=["one"]), node_config("b", models=["two"])])
    picker = OwnRouter(made.nodes, 0, KvCache())
    asked = [replace(request(i), model=name) for i, name in enumerate(("two", "one", "two", ""))]
    assert [picker.pick(one, float(i)) for i, one in enumerate(asked)] == [1, 0, 1, 0]
