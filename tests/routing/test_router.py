"""Where a request goes: candidates, costs, the pick, and the fallbacks."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from routing_fleet import (
    MODEL,
    NOTHING,
    SLOW_TO_FAST,
    WORK,
    booked,
    decided,
    make_node,
    make_request,
    make_router,
    new_prompt,
    refusal,
)

from extproc.hardware import PROFILES, Hardware
from extproc.openai.errors import ErrorCode
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing.loads import Work
from extproc.routing.node import REPORT_FRESH_S, EngineReport, Health
from extproc.routing.router import FALLBACKS, Router


def picks(router: Router, count: int, request: RoutingRequest | None = None) -> Counter[str]:
    """Which nodes `count` requests get, each over before the next comes."""
    counts: Counter[str] = Counter()
    for _ in range(count):
        decision = decided(router, request)
        counts[decision.node.id] += 1
        decision.booking.release(0.0)
    return counts


class TestCandidates:
    def test_are_the_nodes_that_serve_the_model(self) -> None:
        router = make_router(make_node("a", "other"), make_node("b", MODEL), make_node("c", "third"))
        assert picks(router, 20) == {"b": 20}

    def test_include_nodes_that_know_the_model_by_an_alias(self) -> None:
        router = make_router(make_node("a", "big", model_aliases={"gpt": "big"}))
        assert decided(router, make_request("gpt")).engine_model == "big"
        assert decided(router, make_request("big")).engine_model is None

    @pytest.mark.parametrize("health", [Health.HEALTHY, Health.DEGRADED])
    def test_include_every_node_that_is_not_offline(self, health: Health) -> None:
        router = make_router(make_node("a", health=health), make_node("b", health=Health.OFFLINE))
        assert picks(router, 20) == {"a": 20}

    def test_leave_out_drained_nodes_until_they_are_restored(self) -> None:
        drained = make_node("a", hardware="h100-80g")
        router = make_router(drained, make_node("b", hardware="a6000"))
        drained.drained = True
        assert picks(router, 20) == {"b": 20}
        drained.drained = False
        assert picks(router, 20) == {"a": 20}

    def test_that_nobody_serves_are_a_404_that_says_where_to_look(self) -> None:
        error = refusal(make_router(make_node("a")), make_request("unheard-of"))
        assert (error.code, error.param) == (ErrorCode.MODEL_NOT_FOUND, "model")
        assert "`unheard-of`" in error.message
        assert "/v1/models" in error.message

    def test_that_are_all_away_are_a_503_with_a_time_to_come_back(self) -> None:
        drained = make_node("a")
        drained.drained = True
        router = make_router(drained, make_node("b", health=Health.OFFLINE))
        error = refusal(router, make_request())
        assert (error.code, error.retry_after_s) == (ErrorCode.NO_AVAILABLE_NODE, 1)

    def test_show_a_clients_name_for_a_model_without_its_control_characters(self) -> None:
        error = refusal(make_router(make_node("a")), make_request("a\x1b[31m\n" + "b" * 500))
        assert error.message.isprintable()
        assert len(error.message) < 300


class TestAffinity:
    def test_pins_to_its_node_whatever_it_costs(self) -> None:
        router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
        assert picks(router, 20, make_request(affinity="slow")) == {"slow": 20}

    def test_names_no_fallbacks(self) -> None:
        router = make_router(make_node("a"), make_node("b"))
        assert decided(router, make_request(affinity="a")).fallbacks == ()

    def test_waits_for_its_node_and_takes_no_other(self) -> None:
        router = make_router(make_node("a"), make_node("b"), cap=1)
        decided(router, make_request(affinity="a"))
        assert router.decide(make_request(affinity="a"), 0.0) is None

    def test_reaches_a_node_of_weight_0(self) -> None:
        router = make_router(make_node("a"), make_node("spare", weight=0.0))
        assert decided(router, make_request(affinity="spare")).node.id == "spare"

    @pytest.mark.parametrize(
        ("affinity", "code"),
        [
            ("unheard-of", ErrorCode.INVALID_HINT),
            ("elsewhere", ErrorCode.INVALID_HINT),
            ("drained", ErrorCode.NODE_UNAVAILABLE),
            ("offline", ErrorCode.NODE_UNAVAILABLE),
        ],
    )
    def test_to_a_node_that_cannot_take_it_is_an_error_that_names_the_node(
        self, affinity: str, code: ErrorCode
    ) -> None:
        drained = make_node("drained")
        drained.drained = True
        offline = make_node("offline", health=Health.OFFLINE)
        router = make_router(make_node("good"), drained, offline, make_node("elsewhere", "other"))
        error = refusal(router, make_request(affinity=affinity))
        assert (error.code, error.param) == (code, "x-inferact.node_affinity")
        assert f"`{affinity}`" in error.message
        assert (error.retry_after_s is not None) is (code is ErrorCode.NODE_UNAVAILABLE)

    @pytest.mark.parametrize("affinity", ["a", "unheard-of"])
    def test_does_not_hide_that_nobody_serves_the_model(self, affinity: str) -> None:
        error = refusal(make_router(make_node("a")), make_request("unheard-of", affinity=affinity))
        assert error.code is ErrorCode.MODEL_NOT_FOUND


class TestAWeightOf0:
    def test_gets_nothing_while_another_node_is_left(self) -> None:
        router = make_router(
            make_node("a", hardware="a6000"), make_node("spare", weight=0, hardware="h100-80g")
        )
        decisions = [decided(router) for _ in range(50)]
        assert {decision.node.id for decision in decisions} == {"a"}

    def test_does_not_take_what_others_are_too_full_for(self) -> None:
        router = make_router(make_node("a"), make_node("spare", weight=0.0), cap=1)
        decided(router)
        assert router.decide(make_request(), 0.0) is None

    def test_takes_over_when_no_other_node_is_left(self) -> None:
        gone = make_node("a", health=Health.OFFLINE)
        spares = [make_node("spare-1", weight=0.0), make_node("spare-2", weight=0.0)]
        router = make_router(gone, *spares)
        for number in range(10):
            decided(router, new_prompt(number))
        assert {node.in_flight for node in spares} == {5}, "shared by load like any others"

    def test_is_the_last_of_the_fallbacks(self) -> None:
        router = make_router(
            make_node("a", hardware="h100-80g"),
            make_node("spare", weight=0, hardware="h100-80g"),
            make_node("b", hardware="a6000"),
        )
        decision = decided(router)
        assert [node.id for node in (decision.node, *decision.fallbacks)] == ["a", "b", "spare"]


class TestCost:
    @pytest.mark.parametrize(("slow", "fast"), list(pairwise(SLOW_TO_FAST)))
    def test_prefers_the_hardware_that_is_done_first(self, slow: str, fast: str) -> None:
        router = make_router(make_node("slow", hardware=slow), make_node("fast", hardware=fast))
        assert picks(router, 20) == {"fast": 20}

    def test_gives_faster_hardware_at_least_its_share_of_prefill_but_not_all(self) -> None:
        h100, a100 = make_node("h100", hardware="h100-80g"), make_node("a100", hardware="a100-80g")
        router = make_router(h100, a100)
        for number in range(50):
            decided(router, new_prompt(number))
        proportion = PROFILES[Hardware.H100_80G].compute_tflops / PROFILES[Hardware.A100_80G].compute_tflops
        assert h100.in_flight > a100.in_flight * proportion > 0

    def test_leaves_decoding_to_the_faster_memory_until_its_batch_makes_it_slow(self) -> None:
        h100, rtx_4090 = make_node("h100", hardware="h100-80g"), make_node("4090", hardware="rtx-4090")
        router = make_router(h100, rtx_4090)
        for _ in range(400):
            decided(router, make_request(prompt="x" * 400, max_tokens=256))
        assert h100.in_flight > 3 * rtx_4090.in_flight > 0

    def test_takes_booked_load_into_account(self) -> None:
        fast, slow = make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000")
        router = make_router(fast, slow)
        booking = router.book(fast, Work(1000.0, 100.0, 60.0), 0.0)
        assert picks(router, 10) == {"slow": 10}
        booking.release(0.0)
        assert picks(router, 10) == {"fast": 10}

    def test_counts_what_others_sent_to_the_engine(self) -> None:
        shared, ours = make_node("shared"), make_node("ours")
        router = make_router(shared, ours)
        shared.take_report(EngineReport(at_s=0.0, running=50), ours=0)
        router.reported(shared)
        assert picks(router, 20) == {"ours": 20}

    def test_does_not_count_what_others_sent_once_the_report_is_old(self) -> None:
        shared, ours = make_node("shared"), make_node("ours", weight=0.9)
        router = make_router(shared, ours)
        shared.take_report(EngineReport(at_s=0.0, running=500), ours=0)
        router.reported(shared)
        assert decided(router, now_s=REPORT_FRESH_S).node is ours
        assert decided(router, now_s=REPORT_FRESH_S + 0.1).node is shared

    def test_does_not_count_what_has_ended_since_the_engine_was_asked(self) -> None:
        freed, loaded = make_node("freed"), make_node("loaded")
        router = make_router(freed, loaded)
        bookings = [router.book(freed, WORK, 0.0) for _ in range(5)]
        freed.take_report(EngineReport(at_s=0.0, running=5), ours=freed.in_flight)
        router.reported(freed)
        for booking in bookings:
            booking.release(0.0)
        router.book(loaded, WORK, 0.0)
        assert picks(router, 20) == {"freed": 20}

    def test_is_divided_by_the_weight(self) -> None:
        half, full = make_node("half", weight=0.5), make_node("full")
        router = make_router(half, full)
        for number in range(90):
            decided(router, new_prompt(number))
        assert full.in_flight == pytest.approx(60, abs=5)

    def test_knows_an_aliased_model_by_its_size(self) -> None:
        router = make_router(make_node("a", "llama-70b", "llama-8b", model_aliases={"gpt": "llama-70b"}))
        works = [
            decided(router, make_request(name)).booking.work for name in ("gpt", "llama-70b", "llama-8b")
        ]
        assert works[0] == works[1] != works[2]

    def test_grows_with_the_prompt_and_with_the_answer(self) -> None:
        router = make_router(make_node("a"))
        works = [
            decided(router, make_request(prompt=prompt, max_tokens=limit)).booking.work
            for prompt, limit in (("x", 8), ("x" * 10_000, 8), ("y", 64))
        ]
        assert works[1].prefill_s > works[0].prefill_s
        assert works[2].output_tokens > works[0].output_tokens


class TestTies:
    def test_are_broken_at_random(self) -> None:
        router = make_router(*(make_node(name) for name in "abc"))
        counts = picks(router, 300)
        assert set(counts) == {"a", "b", "c"}
        assert min(counts.values()) > 60

    def test_are_costs_within_one_percent(self) -> None:
        router = make_router(make_node("a"), make_node("almost", weight=0.995))
        assert set(picks(router, 50)) == {"a", "almost"}

    def test_are_among_the_best_tier_only(self) -> None:
        router = make_router(make_node("a"), make_node("b"), make_node("dearer", weight=0.98))
        assert set(picks(router, 100)) == {"a", "b"}

    def test_do_not_chain_from_one_tier_to_the_next(self) -> None:
        """Each within 1 % of the one before, the last not within 1 % of the first."""
        weights = {"a": 1.0, "b": 0.993, "c": 0.986}
        router = make_router(*(make_node(name, weight=weight) for name, weight in weights.items()))
        assert set(picks(router, 100)) == {"a", "b"}


class TestFallbacks:
    def test_are_the_next_cheapest_and_at_most_two(self) -> None:
        router = make_router(*(make_node(hardware, hardware=hardware) for hardware in SLOW_TO_FAST))
        decision = decided(router)
        assert decision.node.id == "h100-80g"
        assert [node.id for node in decision.fallbacks] == ["a100-80g", "a100-40g"]
        assert len(decision.fallbacks) == FALLBACKS

    def test_know_the_model_by_the_name_that_the_body_will_carry(self) -> None:
        aliased: dict[str, Any] = {"models": ["big"], "model_aliases": {"gpt": "big"}}
        router = make_router(
            make_node("a", hardware="h100-80g", **aliased),
            make_node("b", "gpt", hardware="a100-80g"),
            make_node("c", hardware="a6000", **aliased),
        )
        decision = decided(router, make_request("gpt"))
        assert (decision.node.id, [node.id for node in decision.fallbacks]) == ("a", ["c"])

    def test_name_full_nodes_last(self) -> None:
        """Over the cap is better than lost: else a failing node would take a full fleet's whole queue."""
        full = make_node("full", hardware="h100-80g")
        router = make_router(make_node("a"), full, make_node("slow", hardware="a6000"), cap=1)
        router.book(full, WORK, 0.0)
        assert [node.id for node in decided(router).fallbacks] == ["slow", "full"]

    def test_are_not_booked(self) -> None:
        router = make_router(make_node("a", hardware="h100-80g"), make_node("b"))
        (fallback,) = decided(router).fallbacks
        assert booked(router, fallback) == NOTHING


class TestTheCap:
    def test_leaves_a_request_without_a_decision_when_every_candidate_is_full(self) -> None:
        router = make_router(make_node("a"), make_node("b"), cap=2)
        decisions = [decided(router) for _ in range(4)]
        assert router.decide(make_request(), 0.0) is None
        assert {node.in_flight for node in router.nodes.values()} == {2}
        decisions[0].booking.release(0.0)
        assert decided(router).node is decisions[0].node

    def test_does_not_exist_unless_it_is_set(self) -> None:
        router = make_router(make_node("a"))
        for _ in range(500):
            decided(router)

    def test_sends_a_request_to_a_dearer_node_that_is_free(self) -> None:
        router = make_router(
            make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"), cap=1
        )
        assert [decided(router).node.id for _ in range(2)] == ["fast", "slow"]


class TestADecision:
    def test_is_booked_when_it_is_there(self) -> None:
        router = make_router(make_node("a"))
        request = make_request()
        decision = decided(router, request)
        work = decision.booking.work
        assert decision.booking.node is decision.node
        assert decision.node.in_flight == 1
        tokens, half = work.prompt_tokens + work.output_tokens, work.output_tokens / 2
        assert booked(router, decision.node) == (1, tokens, tokens - half, work.prefill_s)

    def test_moves_its_booking_along_the_fallbacks(self) -> None:
        router = make_router(*(make_node(hardware, hardware=hardware) for hardware in SLOW_TO_FAST[-3:]))
        request = make_request()
        decision = decided(router, request)
        for failed, following in [("h100-80g", "a100-80g"), ("a100-80g", "a100-40g")]:
            assert router.attempt_failed(decision, failed, request, 0.0) is True
            in_flight = {node.id: node.in_flight for node in router.nodes.values() if node.in_flight}
            assert in_flight == {following: 1}
        alone = decided(make_router(make_node("x", hardware="a100-40g")), request)
        assert decision.booking.work == alone.booking.work

    @pytest.mark.parametrize("failed", ["b", "c", "unheard-of", ""])
    def test_keeps_its_booking_when_a_node_fails_that_does_not_have_the_request(self, failed: str) -> None:
        names = {"a": "h100-80g", "b": "a100-80g", "c": "a100-40g"}
        router = make_router(*(make_node(name, hardware=hardware) for name, hardware in names.items()))
        request = make_request()
        decision = decided(router, request)
        assert router.attempt_failed(decision, failed, request, 0.0) is False
        assert decision.booking.node.id == "a"

    def test_keeps_its_booking_on_the_last_node_and_on_repeated_news(self) -> None:
        router = make_router(make_node("a", hardware="h100-80g"), make_node("b"))
        request = make_request()
        decision = decided(router, request)
        moved = [router.attempt_failed(decision, name, request, 0.0) for name in ("a", "a", "b", "b")]
        assert moved == [True, False, False, False]
        assert decision.booking.node.id == "b"

    def test_moves_nothing_after_its_release(self) -> None:
        router = make_router(make_node("a", hardware="h100-80g"), make_node("b"))
        decision = decided(router)
        decision.booking.release(0.0)
        assert router.attempt_failed(decision, "a", make_request(), 0.0) is False
        assert {node.in_flight for node in router.nodes.values()} == {0}


def test_models_are_those_that_some_undrained_node_serves() -> None:
    drained = make_node("a", "one", "two")
    drained.drained = True
    offline = make_node("c", "four", health=Health.OFFLINE)
    router = make_router(drained, make_node("b", "two", model_aliases={"three": "two"}), offline)
    assert router.models() == ["four", "three", "two"]


class TestRequestsThatGenerateNothing:
    def body(self, **members: object) -> bytes:
        return json.dumps({"model": MODEL, **members}).encode()

    def test_need_no_prefill_for_their_tokens(self) -> None:
        router = make_router(make_node("gpu"))
        text = "x" * 1_000_000
        work = decided(router, parse(Api.TOKENIZE, self.body(prompt=text))).booking.work
        assert (work.prompt_tokens, work.output_tokens) == (1.0, 1.0)
        work = decided(router, parse(Api.EMBEDDINGS, self.body(input=text))).booking.work
        assert (work.prompt_tokens > 100_000, work.output_tokens) == (True, 1.0)

    def test_say_nothing_of_the_hit_rate_that_adaptive_goes_by(self) -> None:
        router = make_router(make_node("gpu"), policy="adaptive")
        for _ in range(40):
            decided(router, new_prompt(1))
            for _ in range(5):
                decided(router, parse(Api.EMBEDDINGS, self.body(input="x" * 20_000)))
        assert router.policy.counts_matches
