"""Each published policy, by its rule, in a scenario of a few requests."""

import math
from collections.abc import Iterable

import pytest
from replay_support import fleet, nodes, request, sharing

from bench.baselines import BASELINES
from bench.baselines.baseline import Baseline
from bench.baselines.dynamo import Dynamo
from bench.baselines.llmd import StickyUntilSaturated
from bench.baselines.lmetric import LMetric, LMetricQueued
from bench.baselines.preble import WINDOW_S, Preble
from bench.baselines.prefixes import PrefixIndex
from bench.baselines.sglang import CacheAware
from bench.baselines.simple import ConsistentHash, LeastLoaded, RandomPick, RoundRobin
from extproc.simulator.replay.loop import replay
from extproc.simulator.replay.traces import TraceRequest


def send(picker: Baseline, requests: Iterable[TraceRequest], now_s: float = 0.0) -> list[int]:
    return [picker.pick(one, now_s) for one in requests]


def complete(picker: Baseline, one: TraceRequest, now_s: float = 0.0) -> int:
    """Send a request and let it finish at once."""
    node = picker.pick(one, now_s)
    picker.first_token(one.id, now_s)
    picker.finished(one.id, now_s, 0)
    return node


@pytest.mark.parametrize("name", BASELINES)
def test_no_baseline_picks_a_node_that_could_never_hold_the_request(name: str) -> None:
    fleet = [*nodes(2, kv_capacity_tokens=1000), *nodes(1, kv_capacity_tokens=100_000)]
    picker = BASELINES[name](fleet, 0)
    for number in range(6):
        assert picker.pick(sharing(number, 1, 2, 3), 0.0) == 2


@pytest.mark.parametrize("name", BASELINES)
def test_a_request_that_no_node_could_hold_is_refused_and_the_others_are_answered(name: str) -> None:
    requests = [request(0), request(1, prompt_tokens=5000), request(2, output_tokens=5000), request(3)]
    outcome = replay(requests, small := fleet(2, kv_capacity_tokens=4000), BASELINES[name](small.nodes, 0))
    assert [job.refused for job in outcome.jobs] == [False, True, True, False]
    assert all(job.finished_s < math.inf for job in outcome.jobs if not job.refused)


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_repeats_itself_by_its_seed(name: str) -> None:
    def picks(seed: int) -> list[int]:
        picker = BASELINES[name](nodes(4), seed)
        return [picker.pick(sharing(i, i % 5, 10 + i % 7, 100 + i), float(i)) for i in range(60)]

    assert picks(3) == picks(3)


def test_random_picks_all_nodes_alike() -> None:
    picks = send(RandomPick(nodes(4), 0), (request(i) for i in range(400)))
    assert all(70 <= picks.count(node) <= 130 for node in range(4))


def test_round_robin_goes_around_and_passes_over_small_nodes() -> None:
    fleet = [*nodes(2), *nodes(1, kv_capacity_tokens=100), *nodes(1)]
    assert send(RoundRobin(fleet, 0), (request(i) for i in range(6))) == [0, 1, 3, 0, 1, 3]


def test_least_loaded_counts_requests_in_flight() -> None:
    picker = LeastLoaded(nodes(3), 0)
    picks = send(picker, (request(i) for i in range(3)))
    assert sorted(picks) == [0, 1, 2]
    picker.finished(1, 1.0, 0)
    assert picker.pick(request(9), 1.0) == picks[1]


def test_consistent_hash_sends_equal_beginnings_to_one_node() -> None:
    picker = ConsistentHash(nodes(4), 0)
    assert len(set(send(picker, (sharing(i, 5, 100 + i) for i in range(10))))) == 1
    picks = send(picker, (sharing(i, i) for i in range(10, 410)))
    assert all(picks.count(node) > 40 for node in range(4))


def test_consistent_hash_moves_only_the_keys_of_the_node_that_left() -> None:
    four = send(ConsistentHash(nodes(4), 0), (sharing(i, i) for i in range(200)))
    three = send(ConsistentHash(nodes(3), 0), (sharing(i, i) for i in range(200)))
    assert all(after == before for before, after in zip(four, three, strict=True) if before != 3)


def test_sglang_follows_a_match_of_over_three_tenths() -> None:
    picker = CacheAware(nodes(3), 0)
    home = complete(picker, sharing(1, 1, 2, 3, 4))
    assert complete(picker, sharing(2, 1, 2, 13, 14)) == home
    assert complete(picker, sharing(3, 1, 22, 23, 24)) != home  # a quarter: to the smallest tree


def test_sglang_sends_the_unknown_to_the_smallest_tree() -> None:
    picker = CacheAware(nodes(2), 0)
    assert [complete(picker, one) for one in (sharing(1, 1, 2, 3), sharing(2, 4), sharing(3, 5))] == [0, 1, 1]


def test_sglang_balances_when_loads_are_far_apart() -> None:
    picker = CacheAware(nodes(2), 0)
    same = [sharing(i, 1, 2) for i in range(66)]
    assert send(picker, same) == [0] * 65 + [1]


def test_llmd_sticks_to_eight_tenths_of_a_prefix() -> None:
    picker = StickyUntilSaturated(nodes(3), 0)
    home = picker.pick(sharing(1, 1, 2, 3, 4), 0.0)
    assert picker.pick(sharing(2, 1, 2, 3, 4, 5), 0.0) == home
    assert picker.pick(sharing(3, 1, 2, 3, 14, 15), 0.0) != home


def test_llmd_leaves_its_prefix_when_the_wait_is_over_eighteen_seconds_longer() -> None:
    picker = StickyUntilSaturated(nodes(2), 0)
    home = picker.pick(sharing(1, 1, 2, 3, 4), 0.0)
    other = 1 - home
    # A chunk of 8,192 tokens takes 1.06 s by the data sheet of the card: 18 s are some 139,000 tokens.
    picker.queued_tokens[home] = 135_000
    assert picker.pick(sharing(2, 1, 2, 3, 4), 0.0) == home
    picker.queued_tokens[home] = 145_000
    assert picker.pick(sharing(3, 1, 2, 3, 4), 0.0) == other


def test_llmd_counts_uncached_tokens_until_the_first_token() -> None:
    picker = StickyUntilSaturated(nodes(2), 0)
    first = picker.pick(request(1, 50_000), 0.0)
    assert picker.pick(request(2, 100), 0.0) == 1 - first
    assert picker.pick(request(3, 100), 0.0) == 1 - first
    picker.first_token(1, 1.0)
    assert picker.pick(request(4, 100), 1.0) == first


def test_lmetric_multiplies_new_prefill_tokens_by_the_batch() -> None:
    picker = LMetric(nodes(2), 0)
    home = picker.pick(sharing(1, 1, 2, 3, 4), 0.0)
    # home: 2 units * batch 2; the other: 4 units * batch 1
    assert [
        picker.uncached_tokens(sharing(2, 1, 2, 13, 14), home) * 2,
        picker.uncached_tokens(sharing(2, 1, 2, 13, 14), 1 - home) * 1,
    ] == [2048, 2048]
    assert picker.pick(sharing(3, 1, 2, 3, 14), 0.0) == home
    assert picker.pick(sharing(4, 1, 2, 23, 24), 0.0) != home


def test_lmetric_in_its_stronger_form_adds_the_queued_prefill() -> None:
    asked = sharing(3, 1, 2, 3, 14)
    for policy, stays in ((LMetric, True), (LMetricQueued, False)):
        picker = policy(nodes(2), 0)
        home = picker.pick(sharing(1, 1, 2, 3, 4), 0.0)
        assert (picker.pick(asked, 0.0) == home) is stays


def test_dynamo_adds_queued_prefill_and_the_blocks_in_use() -> None:
    picker = Dynamo(nodes(2), 0)
    home = picker.pick(sharing(1, 1, 2, 3, 4), 0.0)
    assert picker.pick(sharing(2, *range(11, 17)), 0.0) == 1 - home
    picker.first_token(2, 1.0)
    # Blocks queued and in use: 4 + 4 at home, 0 + 6 on the other; then 0 + 4 at home, 1 + 7 on the other.
    assert picker.pick(sharing(3, 21), 1.0) == 1 - home
    picker.first_token(1, 2.0)
    assert picker.pick(sharing(4, 31), 2.0) == home


def test_dynamo_counts_cached_blocks_as_no_prefill() -> None:
    picker = Dynamo(nodes(2), 0)
    home = picker.pick(sharing(1, 1, 2, 3, 4), 0.0)
    picker.first_token(1, 1.0)
    assert picker.pick(sharing(2, 1, 2, 3, 4, 5), 1.0) == home  # 1 new + 5 in use; elsewhere 5 + 5


def test_dynamo_counts_shared_blocks_once_and_until_the_answer_is_complete() -> None:
    picker = Dynamo(nodes(2), 0)
    home = picker.pick(sharing(1, *range(20)), 0.0)
    picker.first_token(1, 0.0)
    assert picker.pick(sharing(2, *range(20)), 0.0) == home  # 20 blocks in use there already
    picker.first_token(2, 0.0)
    assert picker.pick(sharing(3, 31, 32), 0.0) == 1 - home
    picker.first_token(3, 0.0)
    picker.finished(1, 1.0, 0)
    assert picker.pick(sharing(4, 41, 42), 1.0) == 1 - home
    picker.finished(2, 1.0, 0)
    assert picker.pick(sharing(5, 51, 52), 1.0) == home


def test_preble_exploits_a_prefix_of_more_than_half() -> None:
    picker = Preble(nodes(2), 0)
    home = complete(picker, sharing(1, 1, 2, 3, 4))
    # Loads too close to move requests off home, and far enough apart for exploring to leave it.
    picker._windows[home].prefill_s, picker._windows[1 - home].prefill_s = 1.4, 1.0
    assert picker.pick(sharing(2, 1, 2, 3, 14), 0.0) == home
    picker.finished(2, 0.0, 0)
    picker._windows[home].prefill_s = 1.4
    assert picker.pick(sharing(3, 1, 2, 23, 24), 0.0) == 1 - home  # half is not more than half


def test_preble_explores_by_the_load_of_the_last_three_minutes() -> None:
    picker = Preble(nodes(2), 0)
    heavy = complete(picker, request(1, 60_000))
    assert [complete(picker, request(i, 5000)) for i in range(2, 6)] == [1 - heavy] * 4
    later_s = WINDOW_S + 1
    picks = {complete(picker, request(i, 5000), later_s) for i in range(6, 8)}
    assert picks == {0, 1}


def test_preble_counts_the_answers_under_way_as_load() -> None:
    picker = Preble(nodes(2), 0)
    busy = picker.pick(request(1, 100), 0.0)  # 45 tokens at 0.15 s each are to come
    assert complete(picker, request(2, 20_000)) == 1 - busy  # some 3 s of prefill, and done
    assert picker.pick(request(3, 100), 0.0) == 1 - busy


def test_preble_moves_requests_off_a_node_with_half_more_load_than_the_least() -> None:
    picker = Preble(nodes(2), 0)
    home = complete(picker, sharing(1, 1, 2, 3, 4))
    complete(picker, sharing(2, 11, 12, 13, 14))
    assert picker.pick(sharing(3, 1, 2, 3, 5), 0.0) == home
    for number in range(4, 9):
        picker.pick(sharing(number, 1, 2, 3, 20 + number), 0.0)
    assert len({picker.pick(sharing(number, 1, 2, 3, 20 + number), 0.0) for number in range(9, 14)}) == 2


def test_preble_charges_for_prefixes_that_would_be_evicted() -> None:
    picker = Preble(nodes(2, kv_capacity_tokens=5 * 512), 0)
    used = complete(picker, sharing(1, 1, 2, 3, 4))
    other = complete(picker, sharing(2, 11))
    assert used != other
    picker._windows[other].prefill_s = picker._windows[used].prefill_s
    assert picker.pick(sharing(3, 21, 22, 23), 0.0) == other


def test_an_index_forgets_the_end_of_the_oldest_prompt_first() -> None:
    index = PrefixIndex([4])
    index.add([1, 2, 3], 0)
    index.add([7, 8], 0)
    assert (index.match([1, 2, 3], 0), index.match([7, 8], 0)) == (2, 2)
    assert index.victims(2, 0) == [2, 1]
