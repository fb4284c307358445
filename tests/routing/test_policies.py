"""Where requests go because of what nodes hold of their prompts, policy by policy."""

import logging
from collections import Counter

import pytest
from routing_fleet import WORK, decided, make_node, make_request, make_router, new_prompt

from extproc.config import CachePolicy
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing.loads import Work
from extproc.routing.node import EngineReport, Health, Node
from extproc.routing.policy import ENOUGH_REQUESTS, Policy
from extproc.routing.router import Decision, Router
from extproc.routing.window import WINDOW_S

ROOM = 500_000
"""KV capacity of an engine that reports it, in tokens."""


def fleet(count: int, policy: str = "prefix-aware", **cache: object) -> Router:
    """Equal nodes."""
    return make_router(*(make_node(f"n{number}") for number in range(count)), policy=policy, **cache)


def send(router: Router, request: RoutingRequest, now_s: float = 0.0) -> Decision:
    """A request that is over at once."""
    decision = decided(router, request, now_s)
    decision.booking.release(now_s)
    return decision


def chat(system: str, user: str, hint: str | None = None) -> RoutingRequest:
    hints = b'{"kv_prefix_hint": "%s"}' % hint.encode() if hint else b"{}"
    body = (
        b'{"model": "meta-llama/Llama-3-8B-Instruct", "max_tokens": 1, "x-inferact": %s, "messages": '
        b'[{"role": "system", "content": "%s"}, {"role": "user", "content": "%s"}]}'
    )
    return parse(Api.CHAT_COMPLETIONS, body % (hints, system.encode(), user.encode()))


def tell(router: Router, node: Node, **report: float) -> None:
    """The node's engine reports."""
    node.take_report(EngineReport(**report), ours=node.in_flight)
    router.reported(node)


class TestPrefixAware:
    def test_sends_a_prompt_where_its_beginning_is(self) -> None:
        router = fleet(8)
        homes = {number: send(router, new_prompt(number)).node for number in range(40)}
        again = {number: send(router, new_prompt(number)).node for number in range(40)}
        assert again == homes
        assert len(set(map(id, homes.values()))) == 8

    def test_leaves_it_when_waiting_there_takes_longer_than_computing_it_anew(self) -> None:
        router = fleet(2)
        home = send(router, new_prompt(1)).node
        router.book(home, Work(1000.0, 100.0, 60.0), 0.0)
        assert decided(router, new_prompt(1)).node is not home

    def test_books_only_what_has_to_be_computed(self) -> None:
        router = fleet(1)
        first, second = (send(router, new_prompt(1)).booking.work for _ in range(2))
        assert second.prefill_s < first.prefill_s / 20
        assert second.prompt_tokens == first.prompt_tokens

    def test_keeps_a_burst_of_equal_new_prompts_on_at_most_two_nodes(self) -> None:
        router = fleet(8)
        picks = Counter(decided(router, new_prompt(7)).node.id for _ in range(100))
        assert len(picks) <= 2

    def test_spreads_different_new_prompts(self) -> None:
        router = fleet(8)
        for number in range(100):
            decided(router, new_prompt(number))
        waits_s = [load.busy_until_s for load in router.loads.on]
        assert max(waits_s) < 1.5 * sum(waits_s) / 8
        assert max(node.in_flight for node in router.nodes.values()) < 1.5 * 100 / 8

    def test_is_pulled_nowhere_by_a_beginning_that_all_prompts_share(self) -> None:
        router = fleet(8)
        for number in range(100):
            text = "You are a helpful assistant. ".ljust(600, "x") + f"{number:06} ".ljust(16_000, "y")
            decided(router, make_request(prompt=text, max_tokens=1))
        assert max(node.in_flight for node in router.nodes.values()) < 1.5 * 100 / 8

    def test_inserts_at_the_fallback_what_the_failed_node_did_not_get(self) -> None:
        router = fleet(2)
        request = new_prompt(1)
        decision = decided(router, request)
        failed, (following,) = decision.node, decision.fallbacks
        assert router.attempt_failed(decision, failed.id, request, 0.0)
        decision.booking.release(0.0)
        assert router.caches.index.blocks(failed.slot) == 0
        assert send(router, request).node is following

    def test_is_not_filled_with_prompts_that_no_node_can_hold(self) -> None:
        router = fleet(1)
        (node,) = router.nodes.values()
        tell(router, node, at_s=0.0, kv_capacity_tokens=10_000)
        send(router, new_prompt(1, tokens=1_000))
        before = router.caches.index.blocks(node.slot)
        send(router, new_prompt(2, tokens=20_000))
        assert router.caches.index.blocks(node.slot) == before > 0


class TestLru:
    def test_does_not_look_at_what_nodes_hold(self) -> None:
        router = fleet(8, "lru")
        picks = Counter(send(router, new_prompt(1)).node.id for _ in range(200))
        assert len(picks) == 8

    def test_keeps_the_index_all_the_same(self) -> None:
        router = fleet(1, "lru")
        assert [send(router, new_prompt(1)).matched_bytes > 0 for _ in range(2)] == [False, True]


class TestAdaptive:
    def test_begins_as_lru_and_goes_after_prefixes_once_enough_are_held(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        router = fleet(8, "adaptive")
        with caplog.at_level(logging.INFO):
            before = Counter(send(router, new_prompt(1)).node.id for _ in range(ENOUGH_REQUESTS - 1))
            assert router.policy.in_force is CachePolicy.LRU
            send(router, new_prompt(1))
        assert router.policy.in_force is CachePolicy.PREFIX_AWARE
        assert "prefix-aware" in caplog.text
        after = Counter(send(router, new_prompt(2)).node.id for _ in range(50))
        assert len(before) > 2 >= len(after)

    def test_counts_what_the_best_candidate_held_even_if_another_was_chosen(self) -> None:
        router = fleet(8, "adaptive")
        for _ in range(ENOUGH_REQUESTS):
            send(router, new_prompt(1))
        assert router.policy.in_force is CachePolicy.PREFIX_AWARE

    def test_stays_lru_while_prompts_are_new(self) -> None:
        router = fleet(8, "adaptive")
        for number in range(100):
            send(router, new_prompt(number))
        assert router.policy.in_force is CachePolicy.LRU

    def test_switches_over_40_percent_and_back_only_under_35(self) -> None:
        policy = Policy(CachePolicy.ADAPTIVE)

        def after(held_pct: float, now_s: float) -> CachePolicy:
            for _ in range(ENOUGH_REQUESTS):
                policy.note(held_pct, 100.0, now_s)
            return policy.in_force

        steps = [(39.0, "lru"), (41.0, "prefix-aware"), (36.0, "prefix-aware"), (34.0, "lru"), (39.0, "lru")]
        for number, (held_pct, expected) in enumerate(steps):
            assert after(held_pct, number * (WINDOW_S + 60.0)) == expected

    def test_forgets_what_is_older_than_five_minutes(self) -> None:
        policy = Policy(CachePolicy.ADAPTIVE)
        for now_s in range(600):
            policy.note(100.0, 100.0, float(now_s))
        for now_s in range(600, 600 + 180):
            policy.note(0.0, 100.0, float(now_s))
        assert policy.in_force is CachePolicy.PREFIX_AWARE, "two of five minutes were held"
        for now_s in range(780, 840):
            policy.note(0.0, 100.0, float(now_s))
        assert policy.in_force is CachePolicy.LRU

    @pytest.mark.parametrize("configured", [CachePolicy.LRU, CachePolicy.PREFIX_AWARE])
    def test_is_the_only_one_that_changes(self, configured: CachePolicy) -> None:
        policy = Policy(configured)
        for held in (0.0, 100.0):
            for now_s in range(400):
                policy.note(held, 100.0, now_s)
            assert policy.in_force is configured


class TestWhatANodeHolds:
    def test_is_gone_when_it_goes_offline(self) -> None:
        router = fleet(1)
        node = send(router, new_prompt(1)).node
        node.health = Health.OFFLINE
        router.health_changed(node, 0.0)
        node.health = Health.HEALTHY
        router.health_changed(node, 0.0)
        assert send(router, new_prompt(1)).matched_bytes == 0

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({"started_unix_s": 1e9}, {"started_unix_s": 1e9 + 60}),
            ({"prefix_queries": 9}, {"prefix_queries": 1}),
        ],
        ids=["it says so", "its counters fell"],
    )
    def test_is_gone_when_its_engine_started_anew(
        self, before: dict[str, float], after: dict[str, float]
    ) -> None:
        router = fleet(1)
        node = send(router, new_prompt(1)).node
        tell(router, node, at_s=0.0, **before)
        tell(router, node, at_s=1.0, **before)
        assert send(router, new_prompt(1), 1.0).matched_bytes > 0
        tell(router, node, at_s=2.0, **after)
        assert send(router, new_prompt(1), 2.0).matched_bytes == 0

    def test_is_bounded_by_what_its_engine_reports(self) -> None:
        router = fleet(1)
        (node,) = router.nodes.values()
        tell(router, node, at_s=0.0, kv_capacity_tokens=10_000)
        for number in range(10):
            send(router, new_prompt(number))
        assert 0 < router.caches.index.used_bytes(node.slot) <= 40_000

    def test_is_bounded_by_its_memory_until_then(self) -> None:
        router = make_router(make_node("small", hardware="rtx-4090"))
        (node,) = router.nodes.values()
        for number in range(20):
            send(router, new_prompt(number))
        assert 0 < router.caches.index.used_bytes(node.slot) < 20 * 16_000

    def test_keeps_system_prompts_if_they_are_pinned(self) -> None:
        matched = []
        for pins in (True, False):
            router = fleet(1, pin_system_prompts=pins)
            (node,) = router.nodes.values()
            tell(router, node, at_s=0.0, kv_capacity_tokens=10_000)
            send(router, chat("s" * 4000, "hi"))
            for number in range(10):
                send(router, new_prompt(number))
            matched.append(send(router, chat("s" * 4000, "hi again")).matched_bytes > 0)
        assert matched == [True, False]

    @pytest.mark.parametrize("count", [3, 8, 9, 70])
    def test_is_told_node_by_node_however_many_hold_it(self, count: int) -> None:
        router = fleet(count)
        prompt, longer = make_request(prompt="x" * 2000), make_request(prompt="x" * 4000)
        nodes = list(router.nodes.values())
        blocks = decided(router, longer).blocks
        for node in nodes:
            router.caches.insert(node, decided(router, prompt).blocks)
        for node in nodes[::2]:
            router.caches.insert(node, blocks)
        matched = router.caches.matched_bytes(longer, blocks)
        assert matched is not None
        assert set(matched[1::2]) <= {1536.0, 3584.0}
        assert set(matched[::2]) == {3584.0}


class TestAHint:
    def test_counts_what_the_engine_reported_where_hashing_finds_less(self) -> None:
        router = fleet(2)
        request = chat("s" * 8000, "hi", hint="support")
        decision = send(router, request)
        router.caches.index.clear_node(decision.node.slot)
        assert send(fleet(2), request).matched_bytes == 0
        router.caches.hints.report(request.model, "support", decision.blocks, decision.node.slot, 8000)
        again = send(router, chat("s" * 8000, "and this", hint="support"))
        assert again.node is decision.node
        assert again.matched_bytes == 8000


class TestANodeOverTheEvictionThreshold:
    def test_gets_no_new_prefixes_until_it_recovers(self) -> None:
        router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
        fast, slow = router.nodes.values()
        tell(router, fast, at_s=0.0, kv_used_ratio=0.95)
        assert send(router, new_prompt(1)).node is slow
        tell(router, fast, at_s=1.0, kv_used_ratio=0.5)
        assert send(router, new_prompt(2), 1.0).node is fast

    def test_still_gets_prompts_that_it_holds(self) -> None:
        router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
        fast, _ = router.nodes.values()
        assert send(router, new_prompt(1)).node is fast
        tell(router, fast, at_s=0.0, kv_used_ratio=0.95)
        assert send(router, new_prompt(1)).node is fast

    def test_is_used_when_all_are(self) -> None:
        router = fleet(2)
        for node in router.nodes.values():
            tell(router, node, at_s=0.0, kv_used_ratio=0.95)
        send(router, new_prompt(1))

    def test_is_still_better_than_a_full_one(self) -> None:
        crowded, full = make_node("crowded"), make_node("full")
        router = make_router(crowded, full, cap=1)
        tell(router, crowded, at_s=0.0, kv_used_ratio=0.95)
        router.book(full, WORK, 0.0)
        assert send(router, new_prompt(1)).node is crowded

    def test_counts_only_while_its_report_is_fresh(self) -> None:
        router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
        fast, _ = router.nodes.values()
        tell(router, fast, at_s=0.0, kv_used_ratio=0.95)
        assert send(router, new_prompt(1), 60.0).node is fast

    def test_loses_its_oldest_prompts_until_it_is_under_it(self) -> None:
        router = fleet(1, eviction_threshold_pct=50)
        (node,) = router.nodes.values()
        tell(router, node, at_s=0.0, kv_capacity_tokens=20_000, kv_used_ratio=0.1)
        for number in range(4):
            send(router, new_prompt(number))
        tell(router, node, at_s=1.0, kv_capacity_tokens=20_000, kv_used_ratio=0.6)
        assert router.caches.index.used_bytes(node.slot) <= 40_000
        assert send(router, new_prompt(3), 1.0).matched_bytes > 0
        assert send(router, new_prompt(0), 1.0).matched_bytes == 0


class TestKvRoom:
    def test_leaves_out_nodes_that_could_never_hold_the_request(self) -> None:
        router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
        fast, slow = router.nodes.values()
        tell(router, fast, at_s=0.0, kv_capacity_tokens=3_000)
        tell(router, slow, at_s=0.0, kv_capacity_tokens=ROOM)
        decision = send(router, new_prompt(1))
        assert (decision.node, decision.fallbacks) == (slow, ())
        assert send(router, new_prompt(2, tokens=2_000)).node is fast

    def test_counts_the_answer_that_was_asked_for(self) -> None:
        router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
        fast, slow = router.nodes.values()
        tell(router, fast, at_s=0.0, kv_capacity_tokens=10_000)
        assert send(router, new_prompt(1, max_tokens=7_000)).node is slow

    def test_refuses_nothing_where_no_node_could_hold_it(self) -> None:
        router = fleet(2)
        for node in router.nodes.values():
            tell(router, node, at_s=0.0, kv_capacity_tokens=100)
        send(router, new_prompt(1))
