"""Nodes that are not trusted: on trial, at rest, or short of memory."""

import pytest
from routing_fleet import decided, make_node, make_request, make_router, new_prompt

from extproc.openai.errors import ApiError, ErrorCode
from extproc.routing.node import EngineReport, Health, Node
from extproc.routing.receipts import Reason
from extproc.routing.router import Router


def change(router: Router, node: Node, **state: object) -> None:
    for name, value in state.items():
        setattr(node, name, value)
    router.health_changed(node, 0.0)


class TestANodeOnTrial:
    def test_gets_no_more_requests_than_its_limit_while_others_have_room(self) -> None:
        router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
        change(router, router.nodes["fast"], limit=2)
        nodes = [decided(router, make_request()).node.id for _ in range(6)]
        assert (nodes.count("fast"), nodes.count("slow")) == (2, 4)

    def test_lets_requests_wait_where_it_is_alone(self) -> None:
        router = make_router(make_node("gpu"))
        change(router, router.nodes["gpu"], limit=1)
        first = decided(router, make_request())
        assert router.decide(make_request(), 0.0) is None
        first.booking.release(0.0)
        assert decided(router, make_request()).node.id == "gpu"

    def test_is_full_whichever_of_cap_and_limit_is_reached_first(self) -> None:
        router = make_router(make_node("gpu"), cap=1)
        change(router, router.nodes["gpu"], limit=5)
        decided(router, make_request())
        assert router.decide(make_request(), 0.0) is None

    def test_gets_all_again_when_it_has_none(self) -> None:
        router = make_router(make_node("gpu"))
        change(router, router.nodes["gpu"], limit=1)
        change(router, router.nodes["gpu"], limit=None)
        for _ in range(5):
            decided(router, make_request())


class TestANodeAtRest:
    def test_gets_nothing_while_another_serves(self) -> None:
        router = make_router(make_node("resting"), make_node("up"))
        change(router, router.nodes["resting"], health=Health.OFFLINE, resting=True)
        decision = decided(router, make_request())
        assert (decision.node.id, decision.fallbacks) == ("up", ())
        assert decision.receipt.excluded == ((router.nodes["resting"], Reason.OFFLINE),)

    def test_is_better_than_none(self) -> None:
        router = make_router(make_node("resting"), make_node("dead"))
        change(router, router.nodes["resting"], health=Health.OFFLINE, resting=True)
        change(router, router.nodes["dead"], health=Health.OFFLINE)
        assert decided(router, make_request()).node.id == "resting"
        change(router, router.nodes["resting"], drained=True)
        with pytest.raises(ApiError) as raised:
            router.decide(make_request(), 0.0)
        assert raised.value.code is ErrorCode.NO_AVAILABLE_NODE

    def test_keeps_its_cache_and_a_dead_one_loses_it(self) -> None:
        router = make_router(make_node("gpu"))
        node = router.nodes["gpu"]
        decided(router, new_prompt(1))
        change(router, node, health=Health.OFFLINE, resting=True)
        assert router.caches.index.blocks(node.slot) > 0
        change(router, node, resting=False)
        assert router.caches.index.blocks(node.slot) == 0


def test_a_node_that_ran_out_of_memory_gets_short_prompts() -> None:
    router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
    for node in router.nodes.values():
        node.take_report(EngineReport(0.0, kv_capacity_tokens=10_000), ours=0)
        router.reported(node)
    change(router, router.nodes["fast"], cautious=True)
    assert decided(router, new_prompt(1, tokens=5_000)).node.id == "slow"
    assert decided(router, new_prompt(2, tokens=1_000)).node.id == "fast"
    change(router, router.nodes["fast"], cautious=False)
    assert decided(router, new_prompt(3, tokens=5_000)).node.id == "fast"
