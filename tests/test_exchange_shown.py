"""Each request that goes to a node is shown to whoever learns prompts, as the node gets it."""

import json

from exchanges import TIMEOUT_S, Bench, Limits, body_message, chat_body, headers_message

from extproc.exchange import Exchange
from extproc.openai.request import RoutingRequest
from extproc.routing.router import Decision


def shown(bench: Bench, body: bytes) -> list[tuple[Decision, RoutingRequest, bytes]]:
    seen: list[tuple[Decision, RoutingRequest, bytes]] = []
    exchange = Exchange(
        bench.admission, bench.telemetry, Limits(TIMEOUT_S, 1 << 20), lambda *told: seen.append(told)
    )
    exchange.receive(headers_message(), 0.0)
    exchange.receive(body_message(body), 0.0)
    exchange.end(1.0)
    return seen


def test_the_body_comes_without_hints_and_with_its_salt() -> None:
    body = chat_body(cache_salt="s", **{"x-inferact": {"priority": 7}})
    [(decision, request, sent)] = shown(Bench(), body)
    assert decision.node.id == "a"
    assert bytes(request.prompt.cache_salt) == b'"s"'
    assert "x-inferact" not in json.loads(sent)


def test_a_model_has_the_name_that_the_engine_knows() -> None:
    bench = Bench(settings={"model_aliases": {"public": "engines"}})
    [(_, _, sent)] = shown(bench, chat_body(model="public"))
    assert json.loads(sent)["model"] == "engines"


def test_what_is_refused_is_not_shown() -> None:
    assert shown(Bench(), chat_body(model="unknown")) == []
