"""The replay as a whole: what pickers are told and when, chance by seed, and how much a fleet can take."""

from itertools import pairwise

import pytest
from replay_support import CARD, Told, fleet, node_config, request

from bench.baselines import BASELINES
from bench.fleets import FLEETS, nodes_on
from bench.saturation import saturation_rate
from extproc.hardware import PROFILES, Hardware
from extproc.simulator.replay.fleet import SPEEDS, FleetError, make_fleet
from extproc.simulator.replay.loop import LATE_RATIO, SCRAPE_S, Outcome, replay
from extproc.simulator.replay.picking import RefusedError
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


class OneAtATime(Told):
    """Lets one request at a time go to the only node; of those that come, the third is turned away."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[int] = []
        self.busy = False
        self.free = False

    def pick(self, request: TraceRequest, now_s: float) -> int | None:
        if request.id == 3:
            raise RefusedError
        if self.busy:
            self.queue.append(request.id)
            return None
        self.busy = True
        return 0

    def finished(self, request_id: int, now_s: float, cached_tokens: int) -> None:
        super().finished(request_id, now_s, cached_tokens)
        self.free = True

    def released(self) -> list[tuple[int, int]]:
        if not (self.free and self.queue):
            return []
        self.free = False
        return [(self.queue.pop(0), 0)]


def test_a_request_that_waits_begins_when_the_picker_lets_it_go() -> None:
    jobs = replay([request(i, 1000, 20) for i in (1, 2, 4)], fleet(1), OneAtATime()).jobs
    assert [job.node for job in jobs] == [0, 0, 0]
    alone_s = jobs[0].latency_s
    assert [job.latency_s for job in jobs] == pytest.approx([alone_s, 2 * alone_s, 3 * alone_s])
    assert jobs[1].ttft_s == pytest.approx(alone_s + jobs[0].ttft_s)


def test_a_request_that_is_refused_makes_room_for_those_that_wait() -> None:
    small = fleet(1, kv_capacity_tokens=1100)
    sizes = [(1, 1000), (2, 2000), (4, 2000), (5, 1000)]
    jobs = replay([request(i, tokens, 20) for i, tokens in sizes], small, OneAtATime()).jobs
    assert [job.refused for job in jobs] == [False, True, True, False]
    assert jobs[3].ttft_s > jobs[0].latency_s


def test_the_picker_may_turn_a_request_away() -> None:
    outcome = replay([request(i, arrival_s=10.0 * i) for i in (2, 3)], fleet(1), OneAtATime())
    assert [job.refused for job in outcome.jobs] == [False, True]
    assert outcome.late_ratio == 0.0
    assert len(outcome.pick_s) == 2


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
        made = make_fleet(nodes_on(Hardware.A100_80G), seed)
        assert made.nodes == make_fleet(nodes_on(Hardware.A100_80G), 0).nodes
        ttfts.append(replay([prompt], made, Told()).jobs[0].ttft_s)
    assert len(set(ttfts)) == 20
    assert max(ttfts) / min(ttfts) < SPEEDS[1] / SPEEDS[0]


def test_without_a_seed_nodes_are_as_fast_as_their_data_sheets() -> None:
    made = make_fleet(nodes_on(Hardware.A100_80G))
    (job,) = replay([request(1, 2000, 1)], made, Told()).jobs
    (same,) = replay([request(1, 2000, 1)], fleet(1, PROFILES[Hardware.A100_80G]), Told()).jobs
    assert job.ttft_s == same.ttft_s


def test_a_fleet_has_the_hardware_of_its_configuration() -> None:
    custom = {"memory_bandwidth_gbps": 900, "vram_gb": 48, "nvlink": False}
    made = make_fleet(
        [
            node_config("one"),
            node_config("four", gpu_count=4),
            node_config("own", Hardware.CUSTOM, hardware_profile=custom),
            node_config("alias", models=["small"], model_aliases={"small": "llama-1b"}),
        ]
    )
    one, four, own, alias = made.nodes
    assert [node.name for node in made.nodes] == ["one", "four", "own", "alias"]
    assert four.profile.vram_gb == 4 * one.profile.vram_gb
    assert four.kv_capacity_tokens > 4 * one.kv_capacity_tokens
    assert own.profile.memory_bandwidth_gbps == 900
    assert alias.shape.parameters == 1e9


def test_a_model_that_does_not_fit_is_named_with_its_node() -> None:
    with pytest.raises(FleetError, match="node `small`: `llama-70b` does not fit into its 24 GB"):
        make_fleet([node_config("small", Hardware.RTX_4090, models=["llama-70b"])])


def test_saturation_needs_enough_requests_to_tell() -> None:
    with pytest.raises(TraceError, match="at least 100 requests; this part of the trace has 99"):
        saturation_rate(steady(99, 1.0), nodes_on(Hardware.A100_80G), BASELINES["random"], 0)


def test_saturation_is_where_requests_begin_to_be_late() -> None:
    nodes = nodes_on(*[Hardware.A100_80G] * 2)
    requests = steady(300, 1.0)
    saturation = saturation_rate(requests, nodes, BASELINES["least-loaded"], 0)

    def at(factor: float) -> Outcome:
        made = make_fleet(nodes, 0)
        faster = scaled(requests, factor * saturation / rate(requests))
        return replay(faster, made, BASELINES["least-loaded"](made.nodes, 0))

    assert at(0.97).late_ratio <= LATE_RATIO < at(1.05).late_ratio
