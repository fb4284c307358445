"""Exchanges of split requests: the prompt goes ahead, Envoy is held meanwhile, and nothing is lost."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from exchanges import (
    MODEL,
    TIMEOUT_S,
    Bench,
    body_message,
    chat_body,
    headers_message,
    refused,
    reply_of,
    routed,
)

from extproc.exchange import LEG_SHARE, Exchange, PrefillLeg, Transfer
from extproc.openai.request import Api
from extproc.replies import HOLD_MARGIN_S
from extproc.routing.outcome import LegFailure
from extproc.routing.router import Router

PARAMETERS = Transfer(b'"kv_transfer_params":{"remote_port":5601}', once=True)
ROOM = Transfer(b'"bootstrap_room":7', once=False)


@dataclass
class Split(Bench):
    """A node that prefills and two that decode, and the legs that were begun."""

    names: tuple[str, ...] = ("p", "d", "e")
    legs: list[PrefillLeg] = field(default_factory=list)
    cancelled: list[PrefillLeg] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.router = Router(self.nodes.values(), self.cap, splits=True)
        self.admission.router = self.router

    def start(self, leg: PrefillLeg, exchange: Exchange) -> Any:
        self.legs.append(leg)
        return lambda: self.cancelled.append(leg)

    def exchange(self, timeout_s: float = TIMEOUT_S) -> Exchange:
        made = super().exchange(timeout_s)
        made._start_leg = self.start
        return made

    def held(self, now_s: float = 0.0, **members: Any) -> Exchange:
        """An exchange whose prefill leg runs."""
        exchange = self.sent(now_s, **long(**members))
        assert exchange.is_held
        assert len(self.legs) == 1
        return exchange


def long(**members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x" * 40_000}], **members}


def held_s(reply: bytes) -> float:
    """For how long Envoy is told to wait."""
    message = reply_of(reply)
    assert message.WhichOneof("response") is None
    return message.override_message_timeout.ToMilliseconds() / 1000


def test_the_prompt_goes_ahead_and_envoy_waits_as_long_as_the_request_may_take() -> None:
    bench = Split()
    exchange = bench.exchange()
    exchange.receive(headers_message(), 0.0)
    body = chat_body(**long(**{"x-inferact": {"priority": 7}}))
    reply = exchange.receive(body_message(body), 0.0)
    assert held_s(reply) == TIMEOUT_S + HOLD_MARGIN_S
    [leg] = bench.legs
    assert (leg.key, leg.node.id, leg.path) == (exchange.id, "p", Api.CHAT_COMPLETIONS)
    assert leg.timeout_s == TIMEOUT_S * LEG_SHARE
    assert json.loads(leg.body) == {"model": MODEL, **long()}, "without the client's hints"
    assert exchange.resume(1.0) is None


def test_then_the_decode_node_gets_the_body_with_the_parameters() -> None:
    bench = Split()
    exchange = bench.held()
    woken: list[bool] = []
    exchange.wake = lambda: woken.append(True)
    exchange.leg_over(2.0, None, 2.0)
    exchange.go_on(PARAMETERS)
    assert woken == [True]
    values, body = routed(exchange.resume(2.0))
    assert body is not None
    assert json.loads(body) == {"kv_transfer_params": {"remote_port": 5601}, "model": MODEL, **long()}
    assert values["content-length"] == str(len(body))
    assert values["x-inferact-cluster"] in ("d", "e")
    assert values["x-inferact-transfer"] == str(len(PARAMETERS.members) + 1)
    assert values["x-envoy-upstream-rq-timeout-ms"] == "28000", "what the leg took counts"
    assert not exchange.is_held


def test_parameters_that_any_node_may_use_are_not_kept_from_the_fallbacks() -> None:
    bench = Split()
    exchange = bench.held()
    exchange.go_on(ROOM)
    values, body = routed(exchange.resume(0.0))
    assert body is not None and b'"bootstrap_room":7' in body
    assert "x-inferact-transfer" not in values
    assert bench.in_flight["p"] == 1, "its leg runs beside the answer"
    exchange.leg_over(1.0, None, 1.0)
    assert "p" not in bench.in_flight


@pytest.mark.parametrize("failure", LegFailure)
def test_a_leg_that_failed_ends_in_a_whole_request(failure: LegFailure) -> None:
    bench = Split()
    exchange = bench.held()
    exchange.leg_over(2.0, failure, 2.0)
    exchange.go_on(None)
    values, body = routed(exchange.resume(2.0))
    assert body is None, "as the client sent it"
    assert "x-inferact-transfer" not in values
    assert values["x-inferact-cluster"] in ("d", "e")
    assert bench.metrics("inferact_prefill_fallbacks_total") == {(): 1}
    exchange.end(3.0)
    assert bench.is_idle(40.0)


def test_a_leg_of_which_nothing_is_heard_is_given_up_while_there_is_time_left() -> None:
    bench = Split()
    exchange = bench.held()
    assert exchange.resume(exchange.resume_s - 0.1) is None
    assert exchange.resume_s < TIMEOUT_S * 0.6
    values, _ = routed(exchange.resume(exchange.resume_s))
    assert int(values["x-envoy-upstream-rq-timeout-ms"]) > 1000 * TIMEOUT_S * 0.4
    assert bench.cancelled == bench.legs
    assert bench.in_flight == {values["x-inferact-cluster"]: 1}


@pytest.mark.parametrize("told", [False, True], ids=["while it runs", "when it is done"])
def test_a_client_that_leaves_cancels_the_leg_and_frees_both_nodes(told: bool) -> None:
    bench = Split()
    exchange = bench.held()
    assert sum(bench.in_flight.values()) == 2
    if told:
        exchange.leg_over(1.0, None, 1.0)
    exchange.end(1.0)
    assert bench.cancelled == bench.legs
    assert bench.in_flight == {}
    exchange.leg_over(2.0, None, 2.0)
    exchange.go_on(PARAMETERS)
    exchange.end(2.0)
    assert bench.is_idle(40.0)


def test_a_request_from_the_queue_prefills_under_the_same_hold() -> None:
    bench = Split(cap=1)
    short = [bench.running(), bench.running()]
    queued = bench.exchange()
    queued.receive(headers_message(), 0.0)
    reply = queued.receive(body_message(chat_body(**long())), 0.0)
    assert held_s(reply) == TIMEOUT_S + HOLD_MARGIN_S, "Envoy takes no second word"
    short[0].end(4.0)
    assert queued.resume(4.0) is None
    assert queued.is_held
    [leg] = bench.legs
    assert leg.timeout_s == (TIMEOUT_S - 4.0) * LEG_SHARE
    queued.leg_over(1.0, None, 5.0)
    queued.go_on(PARAMETERS)
    _, body = routed(queued.resume(5.0))
    assert body is not None and b"kv_transfer_params" in body
    receipt = bench.router.receipts.find(queued.id)
    assert receipt is not None
    assert receipt.waited_s == 4.0


def test_the_slot_of_a_prefill_node_is_for_the_next_when_the_leg_is_done() -> None:
    bench = Split(cap=1)
    exchange = bench.held()
    pinned = bench.queued(**{"x-inferact": {"node_affinity": "p"}})
    exchange.leg_over(1.0, None, 1.0)
    assert routed(pinned.resume(1.0))[0]["x-inferact-cluster"] == "p"


def test_each_node_gets_the_model_by_its_own_name() -> None:
    bench = Split(settings={"model_aliases": {"public": MODEL}})
    exchange = bench.exchange()
    exchange.receive(headers_message(), 0.0)
    exchange.receive(body_message(chat_body(**long(model="public"))), 0.0)
    assert json.loads(bench.legs[0].body)["model"] == MODEL
    exchange.go_on(PARAMETERS)
    _, body = routed(exchange.resume(0.0))
    assert body is not None and json.loads(body)["model"] == MODEL


def test_what_a_client_puts_there_never_arrives() -> None:
    bench = Split()
    forged = {"kv_transfer_params": {"remote_host": "evil"}, "bootstrap_room": 1, "bootstrap_host": "evil"}
    exchange = bench.held(**forged)
    assert b"evil" not in bench.legs[0].body
    exchange.go_on(PARAMETERS)
    _, body = routed(exchange.resume(0.0))
    assert body is not None and b"evil" not in body
    assert body.count(b"kv_transfer_params") == 1


def test_a_body_with_too_many_members_is_refused_before_anything_is_booked_for_long() -> None:
    bench = Split(settings={"model_aliases": {"public": MODEL}})
    exchange = bench.exchange()
    exchange.receive(headers_message(), 0.0)
    many = {f"m{at}": at for at in range(300)}
    reply = exchange.receive(body_message(chat_body(**long(model="public", **many))), 0.0)
    assert refused(reply)[1] == "invalid_request"
    exchange.end(0.0)
    assert bench.is_idle(40.0)


def test_a_node_is_needed_while_a_leg_runs_there() -> None:
    bench = Split()
    exchange = bench.held()
    assert exchange.decision is not None
    exchange.decision.fallbacks = ()
    assert exchange.names(bench.nodes["p"])
    exchange.leg_over(1.0, None, 1.0)
    assert not exchange.names(bench.nodes["p"])


def test_a_request_that_came_before_the_split_was_turned_on_stays_whole() -> None:
    bench = Split()
    exchange = bench.exchange()
    exchange._start_leg = None
    exchange.receive(headers_message(), 0.0)
    _, body = routed(exchange.receive(body_message(chat_body(**long())), 0.0))
    assert body is None
    assert sum(bench.in_flight.values()) == 1
    exchange.end(1.0)
    assert bench.is_idle(40.0)
