"""The replay as a whole: what pickers are told and when, chance by seed, and how much a fleet can take."""

from itertools import pairwise

import pytest
from replay_support import CARD, Told, fleet, request

from bench.baselines import BASELINES
from extproc.hardware import Hardware
from extproc.simulator.replay.fleet import FLEETS, SPEEDS, make_fleet
from extproc.simulator.replay.loop import SCRAPE_S, Outcome, replay
from extproc.simulator.replay.saturation import LATE_RATIO, saturation_rate
from extproc.simulator.replay.traces import TraceError, TraceRequest, rate, scaled


def steady(
    count: int, gap_s: float, prompt_tokens: int = 3000, output_tokens: int = 50
) -> list[TraceRequest]:
    return [request(i, prompt_tokens, output_tokens, i * gap_s) for i in range(count)]


def test_every_node_is_scraped_once_a_second_and_never_told_of_the_future() -> None:
    told = Told(lambda one: one.id % 3)
    replay(steady(40, 0.25), fleet(3), told)
    for node in range(3):
        times = [metrics.at_s for of, metrics in told.reports if of == node]
        assert times[0] < SCRAPE_S
        gaps = [after - before for before, after in pairwise(times)]
        assert gaps == pytest.approx([SCRAPE_S] * len(gaps))


def test_metrics_are_up_to_a_second_old_when_a_request_comes() -> None:
    ages: list[float] = []

    class Aging(Told):
        def pick(self, request: TraceRequest, now_s: float) -> int:
            latest = {node: metrics.at_s for node, metrics in self.reports}
            ages.extend(now_s - at_s for at_s in latest.values())
            return 0

    replay(steady(40, 0.33), fleet(2), Aging())
    assert 0 <= min(ages) <= max(ages) <= SCRAPE_S
    assert max(ages) > SCRAPE_S / 2


def test_metrics_count_requests_and_kv_memory() -> None:
    told = Told()
    replay([request(i, 3000, 2000, 0.0) for i in range(3)], fleet(1, kv_capacity_tokens=11_000), told)
    metrics = next(metrics for _, metrics in told.reports)
    assert (metrics.running, metrics.waiting) == (2, 1)
    assert metrics.kv_used_ratio == pytest.approx(10_000 / 11_000)


def test_a_request_its_node_can_never_hold_is_refused_and_told_as_over() -> None:
    told = Told()
    refused, answered = replay(
        [request(1, 2000), request(2, 100, arrival_s=1.0)], fleet(1, kv_capacity_tokens=1000), told
    ).jobs
    assert (refused.refused, answered.refused) == (True, False)
    assert told.ends[1] == (0.0, 0)
    assert 1 not in told.first_tokens


def test_a_pick_that_is_no_node_is_an_error() -> None:
    with pytest.raises(ValueError, match="request 1 was sent to node 2 of 2"):
        replay([request(1)], fleet(2), Told(lambda one: 2))


def test_late_are_those_without_a_first_token_when_the_last_one_arrives() -> None:
    outcome = replay([request(i, 1000, 1, 0.1 * i) for i in range(4)], fleet(1, CARD), Told())
    # Prefills of 0.327 s each: at 0.3 s, when the last arrives, none is done.
    assert outcome.late_ratio == 1.0
    assert replay([request(i, 1000, 1, 1.0 * i) for i in range(4)], fleet(1), Told()).late_ratio == 0.25


def results(seed: int) -> list[tuple[int, float, float]]:
    made = make_fleet(FLEETS["mixed"], seed)
    outcome = replay(steady(200, 0.2), made, BASELINES["least-loaded"](made.nodes, seed), seed)
    return [(job.node, job.ttft_s, job.latency_s) for job in outcome.jobs]


def test_the_same_seed_gives_the_same_replay_and_another_does_not() -> None:
    assert results(1) == results(1)
    assert results(1) != results(2)


def test_hidden_speeds_stay_in_bounds_and_are_not_told() -> None:
    prompt = request(1, 2000, 1)
    ttfts = []
    for seed in range(20):
        made = make_fleet((Hardware.A100_80G,), seed)
        assert made.nodes == make_fleet((Hardware.A100_80G,), 0).nodes
        ttfts.append(replay([prompt], made, Told()).jobs[0].ttft_s)
    assert len(set(ttfts)) == 20
    assert max(ttfts) / min(ttfts) < SPEEDS[1] / SPEEDS[0]


def test_saturation_needs_enough_requests_to_tell() -> None:
    with pytest.raises(TraceError, match="at least 100 requests; this part of the trace has 99"):
        saturation_rate(steady(99, 1.0), (Hardware.A100_80G,), BASELINES["random"], 0)


def test_saturation_is_where_requests_begin_to_be_late() -> None:
    hardware = (Hardware.A100_80G,) * 2
    requests = steady(300, 1.0)
    saturation = saturation_rate(requests, hardware, BASELINES["least-loaded"], 0)

    def at(factor: float) -> Outcome:
        made = make_fleet(hardware, 0)
        faster = scaled(requests, factor * saturation / rate(requests))
        return replay(faster, made, BASELINES["least-loaded"](made.nodes, 0))

    assert at(0.97).late_ratio <= LATE_RATIO < at(1.05).late_ratio
