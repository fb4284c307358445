"""The engine of a replay against cases worked out by hand, and against the engine that takes every step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_support import CARD, SHAPE, Told, fleet, request, sharing

from extproc.simulator.batch import Batch, Generation
from extproc.simulator.blocks import BlockCache
from extproc.simulator.replay.cache import UnitCache
from extproc.simulator.replay.engine import MAX_RUNNING, STEP_TOKENS, Engine, Job
from extproc.simulator.replay.loop import Outcome, replay
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceRequest
from extproc.simulator.roofline import StepLoad, step_s

# The card of these tests does 50 TFLOP/s, reads 0.75 TB/s of weights and 0.6 TB/s of KV; a step adds 2 ms.
PREFILL_1000_S = 0.002 + (1000 * 2 * 8e9 + 4 * 32 * 4096 * 1000 * 500) / 50e12


def decode_s(*contexts: int) -> float:
    """A decode step of requests with so many tokens: weights, KV and the host's work."""
    return 0.002 + 16e9 / 0.75e12 + sum(contexts) * 131072 / 0.6e12


def run(*requests: TraceRequest, kv_capacity_tokens: int = 400_000) -> Outcome:
    return replay(requests, fleet(1, kv_capacity_tokens=kv_capacity_tokens), Told())


def test_a_request_alone_waits_for_its_prefill_and_then_for_each_token() -> None:
    (job,) = run(request(1, 1000, 10, arrival_s=5.0)).jobs
    assert job.ttft_s == pytest.approx(PREFILL_1000_S)
    assert job.latency_s == pytest.approx(PREFILL_1000_S + sum(decode_s(1000 + i) for i in range(9)))


def test_the_hidden_speed_is_what_counts() -> None:
    slow = replace(CARD, compute_tflops=CARD.compute_tflops * 0.7)
    (job,) = replay([request(1, 1000)], fleet(1, slow), Told()).jobs
    assert job.ttft_s - 0.002 == pytest.approx((PREFILL_1000_S - 0.002) / 0.7)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    (job,) = run(request(1, STEP_TOKENS + 100, 1)).jobs
    first, second = StepLoad(), StepLoad()
    first.add(STEP_TOKENS, 0)
    second.add(100, STEP_TOKENS)
    assert job.ttft_s == pytest.approx(step_s(CARD, SHAPE, first) + step_s(CARD, SHAPE, second))
    assert job.latency_s == job.ttft_s


def test_two_requests_share_the_steps_of_decoding() -> None:
    busy = request(0, 1000, 1)  # while its step lasts, the two arrive, to begin together
    _, first, second = run(busy, request(1, 800, 10, 0.1), request(2, 800, 10, 0.1)).jobs
    assert first.ttft_s == second.ttft_s
    decoding_s = first.latency_s - first.ttft_s
    assert decoding_s == pytest.approx(sum(decode_s(800 + i, 800 + i) for i in range(9)))
    assert decoding_s < 1.2 * sum(decode_s(800 + i) for i in range(9))


def test_a_newcomer_joins_when_the_step_under_way_ends() -> None:
    steps_s = [decode_s(1000 + i) for i in range(5)]
    arrival_s = PREFILL_1000_S + sum(steps_s[:4]) + steps_s[4] / 2
    _, second = run(request(1, 1000, 50), request(2, 1000, 1, arrival_s)).jobs
    load = StepLoad()
    load.add(1, 1005)
    load.add(1000, 0)
    assert second.first_token_s == pytest.approx(PREFILL_1000_S + sum(steps_s) + step_s(CARD, SHAPE, load))


def test_a_cached_prefix_shortens_the_prefill() -> None:
    outcome = run(sharing(1, 7, 8, 9), sharing(2, 7, 8, 5, arrival_s=100.0))
    first, second = outcome.jobs
    assert (first.cached_tokens, second.cached_tokens) == (0, 1024)
    load = StepLoad()
    load.add(512, 1024)
    assert second.ttft_s == pytest.approx(step_s(CARD, SHAPE, load))


def test_a_prompt_that_is_cached_whole_still_computes_its_last_unit() -> None:
    _, second = run(sharing(1, 7, 8), sharing(2, 7, 8, arrival_s=100.0)).jobs
    assert second.cached_tokens == 512


def test_only_an_unbroken_prefix_counts() -> None:
    _, second = run(sharing(1, 7, 8, 9), sharing(2, 6, 8, 9, 5, arrival_s=100.0)).jobs
    assert second.cached_tokens == 0


def test_a_request_waits_while_the_kv_memory_is_full() -> None:
    first, second = run(request(1, 1000, 50), request(2, 1000, 50), kv_capacity_tokens=1500).jobs
    assert second.first_token_s == pytest.approx(first.finished_s + PREFILL_1000_S)


def test_the_least_recently_used_prefix_makes_room() -> None:
    jobs = run(
        sharing(1, 1, 11),
        sharing(2, 2, 12, arrival_s=10.0),
        sharing(3, 1, 13, arrival_s=20.0),  # uses unit 1 again; 2 is the oldest now
        sharing(4, 4, 14, 15, 16, arrival_s=30.0),
        sharing(5, 1, 17, arrival_s=40.0),
        sharing(6, 2, 18, arrival_s=50.0),
        kv_capacity_tokens=6 * UNIT_TOKENS,
    ).jobs
    assert [job.cached_tokens for job in jobs] == [0, 0, 512, 0, 512, 0]


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    cache = UnitCache(4 * UNIT_TOKENS)
    assert cache.hold([], 3 * UNIT_TOKENS)
    cache.publish([1, 2, 3])
    cache.release([1, 2, 3], 0)
    assert cache.hold([], 2 * UNIT_TOKENS)
    assert cache.match([1, 2, 3]) == 2


def test_no_more_run_at_once_than_the_engine_takes() -> None:
    node = fleet(1).engines[0]
    for number in range(MAX_RUNNING + 3):
        node.submit(Job(request(number, 2, 500), 0), 0.0)
    node.advance()
    metrics = node.metrics(node.next_s)
    assert (metrics.running, metrics.waiting) == (MAX_RUNNING, 3)


def test_a_request_larger_than_the_memory_is_not_taken() -> None:
    node = Engine(CARD, SHAPE, 1000)
    with pytest.raises(ValueError, match="request 1 needs more KV memory"):
        node.submit(Job(request(1, 1000, 1), 0), 0.0)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 5000),  # prompt
        st.integers(1, 400),  # output
        st.floats(0, 8),  # seconds since the one before
    ),
    min_size=1,
    max_size=25,
)


def step_by_step(requests: list[TraceRequest], profile_tflops: float) -> list[tuple[float, float]]:
    """First and last token of each request from the engine that takes every step by itself."""
    profile = replace(CARD, compute_tflops=profile_tflops)
    cache = BlockCache(1_000_000)
    batch = Batch(cache, lambda load: step_s(profile, SHAPE, load), MAX_RUNNING, STEP_TOKENS)
    times: dict[Generation, list[float]] = {}
    arriving = list(requests)
    while arriving or batch.next_at_s is not None:
        if arriving and (batch.next_at_s is None or arriving[0].arrival_s < batch.next_at_s):
            one = arriving.pop(0)
            generation = Generation(one.prompt_tokens, one.output_tokens, [])
            times[generation] = []
            batch.submit(generation, one.arrival_s)
            continue
        now_s = batch.next_at_s
        assert now_s is not None
        for generation in batch.advance(now_s):
            times[generation].append(now_s)
    return [(seen[0], seen[-1]) for seen in times.values()]


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from([3.0, 100.0]))
def test_whole_runs_of_steps_take_as_long_as_their_steps_one_by_one(
    drawn: list[tuple[int, int, float]], tflops: float
) -> None:
    requests, now_s = [], 0.0
    for number, (prompt, output, gap_s) in enumerate(drawn):
        now_s += gap_s
        requests.append(request(number, prompt, output, now_s))
    jobs = replay(requests, fleet(1, replace(CARD, compute_tflops=tflops)), Told()).jobs
    for job, (first_s, last_s) in zip(jobs, step_by_step(requests, tflops), strict=True):
        assert job.first_token_s == pytest.approx(first_s, abs=1e-6)
        assert job.finished_s == pytest.approx(last_s, abs=1e-6)


def test_a_run_in_which_arithmetic_overtakes_memory_is_exact_too() -> None:
    one = request(1, 29_000, 3000)  # at 3 TFLOP/s the roofs cross near 30,500 tokens of context
    (job,) = replay([one], fleet(1, replace(CARD, compute_tflops=3.0)), Told()).jobs
    ((first_s, last_s),) = step_by_step([one], 3.0)
    assert job.first_token_s == pytest.approx(first_s, abs=1e-6)
    assert job.finished_s == pytest.approx(last_s, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=6), st.integers(1, 511), st.integers(1, 60), st.floats(0, 1)
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(3700, 9000),
)
def test_whatever_comes_everything_is_answered_and_all_memory_given_back(
    drawn: list[tuple[list[int], int, int, float]], capacity: int
) -> None:
    requests, now_s = [], 0.0
    for number, (path, rest, output, gap_s) in enumerate(drawn):
        now_s += gap_s
        # A unit is known by all that came before it, as a chained hash is.
        chain = [hash(tuple(path[: end + 1])) for end in range(len(path))]
        units = [*chain, 10_000_000 + number]
        requests.append(request(number, len(path) * UNIT_TOKENS + rest, output, now_s, units))
    node = fleet(1, kv_capacity_tokens=capacity)
    told = Told()
    jobs = replay(requests, node, told).jobs
    for job in jobs:
        assert 0 <= job.cached_tokens < job.request.prompt_tokens
        assert job.request.arrival_s < job.first_token_s <= job.finished_s
        assert told.first_tokens[job.request.id] == job.first_token_s
        assert told.ends[job.request.id] == (job.finished_s, job.cached_tokens)
    metrics = node.engines[0].metrics(now_s)
    assert (metrics.running, metrics.waiting, metrics.kv_used_ratio) == (0, 0, 0.0)
    assert metrics.prompt_tokens == sum(one.prompt_tokens for one in requests)
    assert metrics.cached_tokens == sum(job.cached_tokens for job in jobs)
