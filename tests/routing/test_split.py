"""Which requests are split, and over which nodes; what is booked for them."""

import random
from typing import Any

import pytest
from routing_fleet import MODEL, NOTHING, booked, decided, make_node, make_request, new_prompt, refusal

from extproc.config import Role
from extproc.openai.errors import ErrorCode
from extproc.openai.request import Api
from extproc.routing.feedback import prefilled
from extproc.routing.node import Health, Node
from extproc.routing.outcome import LegFailure
from extproc.routing.pace import ENOUGH
from extproc.routing.receipts import Reason
from extproc.routing.router import Decision, Router
from extproc.routing.split import FLOOR_TOKENS

PREFILL, DECODE = {"role": "prefill"}, {"role": "decode"}
SGLANG = {"backend": "sglang"}


class Pools:
    """Two nodes that prefill and two that decode, all alike."""

    def __init__(self, cap: int | None = None, **changes: dict[str, Any]) -> None:
        settings = {"p1": PREFILL, "p2": PREFILL, "d1": DECODE, "d2": DECODE}
        self.nodes = {
            name: make_node(name, **(role | changes.get("all", {}) | changes.get(name, {})))
            for name, role in settings.items()
        }
        self.router = Router(self.nodes.values(), cap, random.Random(1), splits=True)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def decided(self, number: int = 0, tokens: int = 8000, **members: Any) -> Decision:
        return decided(self.router, new_prompt(number, tokens, **members))

    def is_idle(self) -> bool:
        return all(booked(self.router, node, 3.0) == NOTHING for node in self.nodes.values())


def legs(decision: Decision) -> tuple[str | None, str]:
    return decision.prefill.node.id if decision.prefill else None, decision.node.id


def test_a_long_prompt_goes_to_one_pool_and_its_answer_to_the_other() -> None:
    prefill, decode = legs(Pools().decided())
    assert prefill in ("p1", "p2")
    assert decode in ("d1", "d2")


@pytest.mark.parametrize(("tokens", "splits"), [(FLOOR_TOKENS - 16, False), (FLOOR_TOKENS + 16, True)])
def test_short_prompts_stay_whole_on_the_nodes_that_decode(tokens: int, splits: bool) -> None:
    prefill, decode = legs(Pools().decided(tokens=tokens))
    assert (prefill is not None) is splits
    assert decode in ("d1", "d2")


def test_what_counts_is_what_the_decode_node_would_have_to_compute() -> None:
    pools = Pools()
    first = pools.decided()
    again = pools.decided()
    assert first.prefill is not None
    assert legs(again) == (None, first.node.id), "which holds the prompt by now"


def test_nothing_is_split_unless_it_is_asked_for() -> None:
    nodes = [make_node("p", **PREFILL), make_node("d", **DECODE)]
    router = Router(nodes, rng=random.Random(1))
    assert router.split is None
    chosen = {decided(router, new_prompt(at)).node.id for at in range(8)}
    assert chosen == {"p", "d"}, "roles mean nothing then"


@pytest.mark.parametrize(
    "members",
    [{"n": 2}, {"best_of": 2}, {"prompt": ["x" * 9000, "y" * 9000]}, {"affinity": "d1"}],
    ids=["two answers", "the best of two", "two prompts", "a node that the client named"],
)
def test_some_requests_stay_whole(members: dict[str, Any]) -> None:
    pools = Pools()
    members = {"prompt": "x" * 40_000, **members}
    assert decided(pools.router, make_request(**members)).prefill is None


@pytest.mark.parametrize("api", [Api.RESPONSES, Api.EMBEDDINGS])
def test_only_chat_and_completions_have_a_protocol(api: Api) -> None:
    from extproc.openai.request import parse

    body = b'{"model": "%s", "input": "%s"}' % (MODEL.encode(), b"x" * 40_000)
    assert decided(Pools().router, parse(api, body)).prefill is None


def test_a_slow_way_between_the_nodes_is_not_worth_it() -> None:
    """A small model prefills faster than a network carries its KV."""
    model = "tiny-1m"
    fast = {"hardware": "custom", "hardware_profile": {"memory_bandwidth_gbps": 9000, "vram_gb": 900}}
    nodes = [make_node("p", model, **fast, **PREFILL), make_node("d", model, **fast, **DECODE)]
    router = Router(nodes, rng=random.Random(1), splits=True)
    decision = decided(router, new_prompt(1, model=model))
    assert legs(decision) == (None, "d")


def test_nodes_that_never_prefill_are_not_taken_to_be_faster_at_it_than_those_that_do() -> None:
    pools = Pools()
    for number in range(4 * ENOUGH):
        decision = pools.decided(number)
        assert decision.prefill is not None
        prefilled(pools.router, decision, 4.0 * decision.prefill.predicted_s, None, 0.0)
        decision.booking.release(0.0)
    assert max(pools.router.pace.prefill) > 2.0
    assert pools.decided(10_000).prefill is not None


def test_a_prefill_pool_with_more_to_do_than_it_saves_is_left_out() -> None:
    pools = Pools()
    decisions = [pools.decided(number) for number in range(12)]
    whole = [decision for decision in decisions if decision.prefill is None]
    assert whole, "the decode nodes take over what would wait for long"
    assert decisions.index(whole[0]) >= 3
    assert {decision.node.id for decision in whole} <= {"d1", "d2"}


def test_the_more_answers_run_on_the_decode_nodes_the_longer_a_prompt_may_wait() -> None:
    pools = Pools()
    for number in range(80):
        decided(pools.router, make_request(prompt=f"short {number}", max_tokens=2000))
    decisions = [pools.decided(number) for number in range(12)]
    assert all(decision.prefill is not None for decision in decisions)


def test_the_prefill_node_is_the_one_that_holds_the_prefix() -> None:
    pools = Pools()
    shared = "shared " * 4000
    first = decided(pools.router, make_request(prompt=shared + "a" * 9000, max_tokens=1))
    second = decided(pools.router, make_request(prompt=shared + "b" * 90_000, max_tokens=1), 60.0)
    assert first.prefill is not None and second.prefill is not None
    assert second.prefill.node is first.prefill.node


def test_the_decode_node_is_the_one_with_less_to_decode() -> None:
    pools = Pools()
    for _ in range(20):
        decided(pools.router, make_request(affinity="d1", prompt="hi", max_tokens=2000))
    assert legs(pools.decided())[1] == "d2"


@pytest.mark.parametrize(
    "state",
    [{"drained": True}, {"health": Health.OFFLINE}],
    ids=["drained", "offline"],
)
def test_no_leg_goes_to_a_node_that_takes_no_traffic(state: dict[str, Any]) -> None:
    pools = Pools()
    for name, value in state.items():
        setattr(pools["p1"], name, value)
    assert legs(pools.decided(1))[0] == "p2"
    for name, value in state.items():
        setattr(pools["p2"], name, value)
    prefill, decode = legs(pools.decided(9))
    assert prefill is None
    assert decode in ("d1", "d2"), "whole"


def test_the_last_resort_of_whole_requests_are_the_nodes_that_prefill() -> None:
    pools = Pools()
    short = decided(pools.router, make_request())
    assert short.node.id in ("d1", "d2")
    assert short.fallbacks[0].id in ("d1", "d2")
    assert short.fallbacks[1].id in ("p1", "p2")
    for name in ("d1", "d2"):
        pools[name].drained = True
    last = pools.decided(5)
    assert last.node.id in ("p1", "p2")
    assert last.prefill is None
    assert Reason.PREFILLS in next(last.receipt.candidates()).put_back


def test_full_decode_nodes_make_requests_wait_and_not_go_to_the_other_pool() -> None:
    pools = Pools(cap=1)
    held = [decided(pools.router, make_request()) for _ in range(2)]
    assert {decision.node.id for decision in held} == {"d1", "d2"}
    assert pools.router.decide(make_request(), 0.0) is None
    assert pools.router.decide(new_prompt(1), 0.0) is None


def test_a_full_prefill_node_gets_no_leg() -> None:
    pools = Pools(cap=1)
    for name in ("p1", "p2"):
        decided(pools.router, make_request(affinity=name))
    assert pools.decided().prefill is None


def test_nodes_that_do_both_prefill_for_others_while_they_are_idle() -> None:
    nodes = [make_node("a", role="both"), make_node("b", role="both")]
    router = Router(nodes, rng=random.Random(1), splits=True)
    assert set(legs(decided(router, new_prompt(1)))) == {"a", "b"}
    assert decided(router, new_prompt(2)).prefill is None


class TestBookings:
    def test_each_leg_is_booked_where_it_runs_and_both_are_freed(self) -> None:
        pools = Pools()
        decision = pools.decided(max_tokens=100)
        leg = decision.prefill
        assert leg is not None
        requests, tokens, _, wait_s = booked(pools.router, leg.node)
        assert (requests, tokens) == (1, decision.booking.work.prompt_tokens + 1)
        assert wait_s == pytest.approx(leg.whole.prefill_s)
        requests, tokens, _, wait_s = booked(pools.router, decision.node)
        assert (requests, wait_s) == (1, 0.0)
        assert tokens == decision.booking.work.prompt_tokens + 100
        assert prefilled(pools.router, decision, 0.5, None, 1.0)
        assert booked(pools.router, leg.node, 1.0) == NOTHING
        assert not prefilled(pools.router, decision, 0.5, None, 1.0), "told once more"
        assert decision.booking.release(2.0)
        assert pools.is_idle()

    def test_after_a_leg_that_failed_the_decode_node_has_the_whole_work(self) -> None:
        pools = Pools()
        decision = pools.decided()
        leg = decision.prefill
        assert leg is not None
        prefilled(pools.router, decision, 0.5, LegFailure.LOST, 1.0)
        decision.booking.redo(leg.whole, 1.0)
        assert booked(pools.router, decision.node, 1.0)[3] == pytest.approx(leg.whole.prefill_s)
        assert pools.router.caches.matched_bytes(new_prompt(0, 8000), decision.blocks)[leg.node.slot] == 0  # type: ignore[index]
        decision.booking.release(2.0)
        assert pools.is_idle()

    def test_a_decode_node_that_fails_hands_the_whole_work_to_the_fallback(self) -> None:
        pools = Pools()
        request = new_prompt(0, 8000)
        decision = decided(pools.router, request)
        prefilled(pools.router, decision, 0.5, None, 1.0)
        assert pools.router.attempt_failed(decision, decision.node.id, request, 1.0)
        following = decision.fallbacks[0]
        assert decision.booking.node is following
        assert booked(pools.router, following, 1.0)[3] > 0
        decision.booking.release(2.0)
        assert pools.is_idle()

    def test_the_first_token_teaches_nothing_of_the_prefill_of_others(self) -> None:
        """Their prompt is still to be computed on the decode node when the split answer begins."""
        pools = Pools()
        own = decided(pools.router, make_request(affinity="d1", prompt="z" * 40_000, max_tokens=1))
        pools["d2"].drained = True
        decision = pools.decided(3, tokens=16_000)
        assert legs(decision)[1] == "d1"
        assert decision.prefill is not None
        before = booked(pools.router, own.node)
        decision.booking.begun(0.01, 0.01)
        assert booked(pools.router, own.node) == before

    def test_a_dry_run_books_nothing_and_shows_the_leg(self) -> None:
        pools = Pools()
        receipt = pools.router.explain(new_prompt(1), 0.0)
        assert receipt.prefill is not None
        assert receipt.prefill.node.id in ("p1", "p2")
        assert pools.is_idle()


class TestSglang:
    """Engines that are started for one half refuse whole requests."""

    def test_short_prompts_are_split_too(self) -> None:
        decision = decided(Pools(all=SGLANG).router, make_request())
        assert set(map(type, legs(decision))) == {str}
        assert {node.id for node in decision.fallbacks} <= {"d1", "d2"}

    def test_without_a_prefill_node_nothing_can_be_served(self) -> None:
        pools = Pools(all=SGLANG)
        for name in ("p1", "p2"):
            pools[name].drained = True
        assert refusal(pools.router, make_request()).code is ErrorCode.NO_AVAILABLE_NODE

    def test_without_a_decode_node_nothing_can_be_served(self) -> None:
        pools = Pools(all=SGLANG)
        for name in ("d1", "d2"):
            pools[name].drained = True
        assert refusal(pools.router, make_request()).code is ErrorCode.NO_AVAILABLE_NODE

    def test_while_the_prefill_nodes_are_full_requests_wait(self) -> None:
        pools = Pools(cap=2, all=SGLANG)
        pools["p2"].drained = True
        first = [decided(pools.router, make_request()) for _ in range(2)]
        assert pools.router.decide(make_request(), 0.0) is None
        assert prefilled(pools.router, first[0], 0.1, None, 0.1)
        assert decided(pools.router, make_request()).prefill is not None

    def test_a_prompt_that_no_prefill_node_has_room_for_is_for_the_engine_to_refuse(self) -> None:
        pools = Pools(all=SGLANG)
        assert decided(pools.router, new_prompt(1, tokens=2_000_000)).prefill is not None

    def test_a_long_prompt_may_go_from_an_ordinary_engine_to_the_halves(self) -> None:
        pools = Pools(all=SGLANG, p2={"role": "both"}, d1={"role": "both"}, d2={"hardware": "h100-80g"})
        for number in range(40):
            found = decided(pools.router, new_prompt(number, 9000))
            if found.prefill is not None:
                assert legs(found) == ("p1", "d2")
                assert {node.id for node in found.fallbacks} <= {"p2", "d1"}
            else:
                assert found.node.id in ("p2", "d1")

    def test_an_engine_for_both_halves_serves_where_the_halves_cannot(self) -> None:
        pools = Pools(all=SGLANG, p1={"role": "both"}, p2={"role": "both"})
        decision = decided(pools.router, make_request())
        if decision.prefill is None:
            assert decision.node.id in ("p1", "p2")
        for name in ("d1", "d2"):
            pools[name].drained = True
        assert legs(decided(pools.router, make_request())) in ((None, "p1"), (None, "p2"))

    def test_halves_of_different_protocols_are_no_pair(self) -> None:
        pools = Pools(d1=SGLANG, d2=SGLANG)
        pools["p1"].drained = pools["p2"].drained = True
        assert refusal(pools.router, make_request()).code is ErrorCode.NO_AVAILABLE_NODE


def test_roles_follow_a_change_of_the_nodes() -> None:
    nodes = [make_node(name) for name in "abc"]
    router = Router(nodes, rng=random.Random(1), splits=True)
    assert router.split is not None
    assert [router.split.role(node, MODEL) for node in nodes] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    fast = make_node("d", hardware="h100-80g")
    router.set_nodes([*nodes, fast])
    assert router.split.role(fast, MODEL) is Role.PREFILL
    assert router.split.role(nodes[0], MODEL) is Role.DECODE
