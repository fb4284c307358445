"""Nodes that come and go while requests run."""

import itertools
import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from routing_fleet import MODEL, booked, decided, make_node, make_request, make_router, new_prompt

from extproc.config import KvCache
from extproc.openai.errors import ApiError, ErrorCode
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing.node import NO_SLOT, EngineReport, Node
from extproc.routing.router import Decision

OTHER = "other"


class ComingAndGoing(RuleBasedStateMachine):
    """Whatever happens: counts are exact, no decision names a node that left, no slot has two nodes."""

    @initialize()
    def begin(self) -> None:
        self.numbers = itertools.count()
        self.now_s = 0.0
        self.router = make_router(make_node("first"), make_node("second", OTHER))
        self.running: list[Decision] = []
        self.leaving: list[Node] = []
        self.most = 0
        """Slots in use at a time."""

    @rule(
        models=st.sampled_from([(MODEL,), (OTHER,), (MODEL, OTHER)]),
        hardware=st.sampled_from(["a6000", "h100-80g"]),
    )
    def comes(self, models: tuple[str, ...], hardware: str) -> None:
        node = make_node(f"node-{next(self.numbers)}", *models, hardware=hardware)
        assert not self.router.set_nodes([*self.router.nodes.values(), node])

    @precondition(lambda self: len(self.router.nodes) > 1)
    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.router.nodes)))
        (left,) = self.router.set_nodes(node for node in self.router.nodes.values() if node.id != gone)
        assert left.id == gone
        self.leaving.append(left)

    @rule(data=st.data())
    def is_another(self, data: st.DataObject) -> None:
        """Another engine gets the id."""
        name = data.draw(st.sampled_from(sorted(self.router.nodes)))
        fresh = make_node(name, *self.router.nodes[name].config.models)
        nodes = [fresh if node.id == name else node for node in self.router.nodes.values()]
        (left,) = self.router.set_nodes(nodes)
        assert left.slot != fresh.slot
        self.leaving.append(left)

    @rule(number=st.integers(0, 5), model=st.sampled_from([MODEL, OTHER]))
    def asks(self, number: int, model: str) -> None:
        serving = [node for node in self.router.nodes.values() if model in node.config.serves]
        request = new_prompt(number, tokens=100, model=model)
        if not serving:
            with pytest.raises(ApiError) as refused:
                self.router.decide(request, self.now_s)
            assert refused.value.code is ErrorCode.MODEL_NOT_FOUND
            return
        decision = decided(self.router, request, self.now_s)
        for named in (decision.node, *decision.fallbacks):
            assert any(named is node for node in serving)
        self.running.append(decision)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fails(self, data: st.DataObject) -> None:
        """Envoy goes on to the fallback, whether it has left or not."""
        decision = data.draw(st.sampled_from(self.running))
        request = make_request(model=decision.receipt.model)
        self.router.attempt_failed(decision, decision.booking.node.id, request, self.now_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        decision = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        assert decision.booking.release(self.now_s)
        self.now_s += 0.1

    @rule()
    def releases(self) -> None:
        """Nodes that no running request names."""
        named = [node for one in self.running for node in (one.node, *one.fallbacks)]
        for node in list(self.leaving):
            if not any(node is one for one in named):
                self.leaving = [one for one in self.leaving if one is not node]
                self.router.roster.release(node)
                assert node.slot == NO_SLOT

    @invariant()
    def counts_are_exact(self) -> None:
        nodes = [*self.router.nodes.values(), *self.leaving]
        for node in nodes:
            count = sum(one.booking.node is node for one in self.running)
            assert booked(self.router, node)[0] == node.in_flight == count
        assert sum(load.requests for load in self.router.loads.on) == len(self.running)

    @invariant()
    def slots_are_apart_and_few(self) -> None:
        slots = [node.slot for node in (*self.router.nodes.values(), *self.leaving)]
        assert len(set(slots)) == len(slots)
        assert min(slots) >= 0
        self.most = max(self.most, len(slots))
        assert self.router.loads.size == self.most

    @invariant()
    def the_index_knows_nobody_else(self) -> None:
        slots = {node.slot for node in (*self.router.nodes.values(), *self.leaving)}
        held = 0
        for shard in self.router.caches.index._shards:
            for mask in shard.values():
                held |= mask
        assert {bit for bit in range(held.bit_length()) if held >> bit & 1} <= slots


TestComingAndGoing = ComingAndGoing.TestCase
TestComingAndGoing.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_slot_is_given_out_again_without_what_its_last_node_left() -> None:
    a, b = make_node("a"), make_node("b")
    router = make_router(a, b, policy="prefix-aware")
    request = new_prompt(1, affinity="b")
    decision = decided(router, request)
    for _ in range(20):
        router.first_token(decision, 100.0)
    slot = b.slot
    assert router.pace.prefill[slot] > 1.0
    assert router.explain(request, 0.0).matched_bytes is not None
    router.set_nodes([a])
    decision.booking.release(1.0)
    router.roster.release(b)
    c = make_node("c")
    router.set_nodes([a, c])
    assert c.slot == slot
    assert router.pace.prefill[slot] == 1.0
    assert router.explain(new_prompt(1, affinity="c"), 2.0).matched_bytes is None
    assert router.loads.picks[slot] == 0.0


def test_a_node_that_is_told_again_keeps_what_is_known_of_it() -> None:
    a = make_node("a")
    router = make_router(a)
    first = decided(router, new_prompt(1))
    router.set_nodes([make_node("b"), a])
    assert list(router.nodes) == ["b", "a"], "in the order in which they are told"
    assert a.in_flight == 1
    assert router.explain(new_prompt(1), 0.0).nodes[0] is a
    assert first.booking.release(0.0)


def test_a_weight_that_changes_counts_at_once() -> None:
    a, b = make_node("a"), make_node("b")
    router = make_router(a, b)
    b.config = b.config.model_copy(update={"weight": 0.0})
    router.set_nodes([a, b])
    assert {decided(router, new_prompt(number)).node.id for number in range(10)} == {"a"}


def test_a_model_that_comes_back_is_known_still() -> None:
    a, b = make_node("a"), make_node("b", OTHER)
    router = make_router(a, b)
    decision = decided(router)
    for _ in range(500):
        router.answered(decision, MODEL, 1000, 2000, 1.0)
    learned = decided(router).receipt.output_tokens
    router.set_nodes([b])
    with pytest.raises(ApiError, match="does not exist"):
        router.decide(make_request(), 0.0)
    router.set_nodes([b, make_node("c")])
    assert decided(router).receipt.output_tokens == learned > 1000


def test_what_an_engine_told_of_its_memory_outlives_a_change() -> None:
    a = make_node("a")
    a.report = EngineReport(0.0, kv_capacity_tokens=5000)
    router = make_router(a)
    router.set_nodes([a, make_node("b")])
    assert router._lanes[MODEL].room_tokens[a.slot] == 5000


def test_a_request_that_was_under_way_may_still_go_on_to_a_node_that_left() -> None:
    router = make_router(make_node("a"), make_node("b"))
    request = new_prompt(1)
    decision = decided(router, request)
    (fallback,) = decision.fallbacks
    router.set_nodes([decision.node])
    assert router.attempt_failed(decision, decision.node.id, request, 1.0)
    assert decision.booking.node is fallback
    assert fallback.in_flight == 1
    decision.booking.release(2.0)
    router.roster.release(fallback)


def test_settings_hold_from_the_next_request_on() -> None:
    router = make_router(make_node("a"))
    first = decided(router)
    router.configure(1, KvCache(policy="lru"))
    assert router.decide(make_request(), 0.0) is None, "at its cap"
    router.configure(None, KvCache(policy="lru"))
    assert decided(router).receipt.policy == "lru"
    assert first.receipt.policy == "prefix-aware"


def test_pins_end_when_they_are_no_longer_wanted() -> None:
    a = make_node("a")
    router = make_router(a)
    messages = [{"role": "system", "content": "s" * 4000}, {"role": "user", "content": "hello"}]
    decided(router, chat(messages))
    assert router.caches.index.pinned_bytes(a.slot) > 0
    router.configure(None, KvCache(pin_system_prompts=False))
    assert router.caches.index.pinned_bytes(a.slot) == 0


def chat(messages: list[dict[str, str]]) -> RoutingRequest:
    return parse(Api.CHAT_COMPLETIONS, json.dumps({"model": MODEL, "messages": messages}).encode())
