"""Receipts: what an operator learns of a decision."""

import pytest
from routing_fleet import MODEL, decided, make_node, make_request, make_router, new_prompt

from extproc.openai.errors import ApiError
from extproc.routing.cost import Term
from extproc.routing.node import EngineReport, Health
from extproc.routing.outcome import Ended, Outcome
from extproc.routing.receipts import CANDIDATES, RECEIPTS, Reason, Receipts
from extproc.routing.router import Router


def equal_nodes(count: int) -> Router:
    return make_router(*(make_node(f"gpu-{i}") for i in range(count)))


class TestReceipt:
    def test_begins_with_the_node_that_was_chosen_and_its_fallbacks(self) -> None:
        router = equal_nodes(4)
        decision = decided(router, new_prompt(1))
        nodes = [line.node for line in decision.receipt.candidates()]
        assert nodes[:3] == [decision.node, *decision.fallbacks]
        assert len(nodes) == 4
        assert decision.receipt.fallbacks == decision.fallbacks

    def test_names_fallbacks_that_know_the_model_by_the_same_name(self) -> None:
        router = make_router(
            make_node("fast", hardware="h100-80g", model_aliases={"m": "llama-8b"}),
            make_node("other", hardware="a100-80g", models=("m",)),
            make_node("slow", hardware="a6000", model_aliases={"m": "llama-8b"}),
        )
        request = make_request("m")
        for receipt in (router.explain(request, 0.0), decided(router, request).receipt):
            assert [line.node.id for line in receipt.candidates()] == ["fast", "other", "slow"]
            assert [node.id for node in receipt.fallbacks] == ["slow"]

    def test_has_terms_that_add_up_to_the_cost_by_which_the_nodes_are_in_order(self) -> None:
        router = make_router(
            make_node("fast", hardware="h100-80g"),
            make_node("halved", weight=0.5),
            make_node("slow", hardware="a6000"),
        )
        for number in range(5):
            decision = decided(router, new_prompt(number))
        lines = list(decision.receipt.candidates())
        assert [line.cost_s for line in lines] == sorted(line.cost_s for line in lines)
        for line in lines:
            assert sum(line.terms_s.values()) / line.node.config.weight == pytest.approx(line.cost_s)
            assert line.terms_s[Term.PREFILL] > 0.0
        assert decision.receipt.predicted_s == pytest.approx(
            lines[0].terms_s[Term.WAIT] + lines[0].terms_s[Term.PREFILL]
        )

    def test_tells_what_each_node_held_of_the_prompt(self) -> None:
        router = equal_nodes(2)
        first = decided(router, new_prompt(1, tokens=1000))
        again = decided(router, new_prompt(1, tokens=1000)).receipt
        matched = {line.node.id: line.matched_tokens for line in again.candidates()}
        assert matched.pop(first.node.id) == pytest.approx(again.prompt_tokens, rel=0.15)
        assert list(matched.values()) == [0]

    def test_counts_the_nodes_that_were_equally_good(self) -> None:
        router = equal_nodes(20)
        assert decided(router, new_prompt(1)).receipt.equals == 20
        assert len(list(decided(router, new_prompt(2)).receipt.candidates())) == CANDIDATES

    def test_says_why_a_node_was_no_candidate(self) -> None:
        router = make_router(
            *(make_node(name) for name in ("up", "drained", "offline", "small")),
            make_node("other", models=("m2",)),
        )
        router.nodes["drained"].drained = True
        router.nodes["offline"].health = Health.OFFLINE
        small = router.nodes["small"]
        small.take_report(EngineReport(0.0, kv_capacity_tokens=100), ours=0)
        router.reported(small)
        receipt = decided(router, new_prompt(1)).receipt
        assert {node.id: reason for node, reason in receipt.excluded} == {
            "drained": Reason.DRAINED,
            "offline": Reason.OFFLINE,
            "small": Reason.NO_ROOM,
        }
        assert [line.node.id for line in receipt.candidates()] == ["up"]

    def test_says_why_a_node_came_after_dearer_ones(self) -> None:
        router = make_router(
            make_node("busy", hardware="h100-80g"),
            make_node("spare", hardware="h100-80g", weight=0.0),
            make_node("slow", hardware="a6000"),
            cap=1,
        )
        decided(router, make_request(affinity="busy"))
        receipt = decided(router, new_prompt(1)).receipt
        assert {line.node.id: line.put_back for line in receipt.candidates()} == {
            "slow": (),
            "busy": (Reason.FULL,),
            "spare": (Reason.SPARE,),
        }

    def test_says_whether_the_client_named_the_node(self) -> None:
        router = equal_nodes(2)
        receipt = decided(router, make_request(affinity="gpu-1")).receipt
        assert receipt.pinned
        assert receipt.excluded == ()
        assert [line.node.id for line in receipt.candidates()] == ["gpu-1"]


class TestExplain:
    def test_tells_what_would_be_decided_and_changes_nothing(self) -> None:
        router = equal_nodes(3)
        request = new_prompt(1, **{"x-inferact": {"kv_prefix_hint": "hint"}})
        for _ in range(3):
            dry = router.explain(request, 0.0)
            assert (dry.equals, dry.waits) == (3, False)
        assert all(node.in_flight == 0 for node in router.nodes.values())
        assert (len(router.caches.index), len(router.caches.hints), len(router.receipts)) == (0, 0, 0)
        held = decided(router, request).node
        best = next(router.explain(request, 0.0).candidates())
        assert best.node is held
        assert best.matched_tokens > 0

    def test_tells_that_a_request_would_wait(self) -> None:
        router = make_router(make_node("gpu"), cap=1)
        decided(router, make_request())
        receipt = router.explain(make_request(), 0.0)
        assert receipt.waits
        assert [line.put_back for line in receipt.candidates()] == [(Reason.FULL,)]

    def test_refuses_what_a_decision_refuses(self) -> None:
        router = equal_nodes(1)
        with pytest.raises(ApiError):
            router.explain(make_request("unknown"), 0.0)


class TestReceipts:
    def test_are_found_by_either_id(self) -> None:
        router, receipts = equal_nodes(1), Receipts()
        receipt = decided(router, make_request()).receipt
        receipts.keep(receipt, "exchange", "request", 0.5)
        assert receipts.find("request") is receipts.find("exchange") is receipt
        assert (receipt.request_id, receipt.exchange_id, receipt.waited_s) == ("request", "exchange", 0.5)
        assert receipts.find("another") is None

    def test_of_requests_that_share_an_id_are_all_kept_and_the_latest_is_found(self) -> None:
        router, receipts = equal_nodes(1), Receipts()
        one, two = (decided(router, make_request()).receipt for _ in range(2))
        receipts.keep(one, "e1", "same", 0.0)
        receipts.keep(two, "e2", "same", 0.0)
        assert receipts.find("same") is two
        assert receipts.find("e1") is one
        assert receipts.latest(5) == [two, one]

    def test_are_bounded_and_the_oldest_go(self) -> None:
        router, receipts = equal_nodes(1), Receipts()
        for number in range(RECEIPTS + 10):
            receipts.keep(decided(router, make_request()).receipt, f"e{number}", f"r{number % 7}", 0.0)
        assert len(receipts) == RECEIPTS
        assert receipts.find("e9") is None
        assert receipts.find("e10") is not None
        assert all(receipts.find(f"r{number}") for number in range(7))

    def test_take_in_what_came_of_a_request(self) -> None:
        router, receipts = equal_nodes(1), Receipts()
        receipt = decided(router, make_request()).receipt
        receipts.keep(receipt, "exchange", "request", 0.0)
        outcome = Outcome(node_id="gpu-0", attempts=1, status=200, ended=Ended.COMPLETE, duration_s=1.0)
        receipts.happened("exchange", outcome)
        receipts.happened("unknown", outcome)
        assert receipt.outcome is outcome

    def test_keep_no_prompt(self) -> None:
        router = equal_nodes(1)
        receipt = decided(router, make_request(prompt="secret words " * 100)).receipt
        assert "secret" not in repr(receipt)
        assert receipt.model == MODEL
