"""The prefill leg on a real connection: what goes out, and what is made of what comes back."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from exchanges import MODEL, Bench, body_message, chat_body, headers_message, routed

from extproc.config import NodeConfig
from extproc.exchange import Exchange
from extproc.prefill import Prefiller
from extproc.routing.node import Node
from extproc.routing.outcome import Attempt, Failure
from extproc.routing.router import Router

KEY = "a-key-of-the-node"
PARAMETERS = {"do_remote_prefill": True, "remote_port": 5601}
ANSWER = {"usage": {"prompt_tokens": 9000, "completion_tokens": 1}, "kv_transfer_params": PARAMETERS}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Judge:
    """What was told of the node."""

    served: list[str] = field(default_factory=list)
    failed: list[Attempt] = field(default_factory=list)

    def leg_served(self, key: str, node: Node) -> None:
        self.served.append(node.id)

    def leg_failed(self, attempt: Attempt) -> None:
        self.failed.append(attempt)


@dataclass
class Legs:
    """Two nodes, the first of which prefills and is real; `over` is set when the decode leg may go."""

    bench: Bench
    judge: Judge
    prefiller: Prefiller
    got: list[tuple[str, str | None, Any]]

    async def held(self, timeout_s: float = 30.0) -> tuple[Exchange, asyncio.Event]:
        """An exchange whose leg has begun."""
        exchange = self.bench.exchange(timeout_s)
        exchange._start_leg = self.prefiller.begin
        exchange.receive(headers_message(), 0.0)
        body = chat_body(messages=[{"role": "user", "content": "x" * 40_000}], stream=True, model="public")
        exchange.receive(body_message(body), 0.0)
        assert exchange.is_held
        over = asyncio.Event()
        exchange.wake = over.set
        return exchange, over

    async def done(self, timeout_s: float = 30.0) -> tuple[Exchange, dict[str, str], Any]:
        """The same, when its decode leg goes: the headers and the body."""
        exchange, over = await self.held(timeout_s)
        async with asyncio.timeout(10):
            await over.wait()
        values, body = routed(exchange.resume(0.0))
        return exchange, values, None if body is None else json.loads(body)


@contextlib.asynccontextmanager
async def legs(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Legs]:
    got: list[tuple[str, str | None, Any]] = []

    async def take(request: web.Request) -> web.StreamResponse:
        got.append((request.path, request.headers.get("authorization"), await request.json()))
        return await answer(request)

    app = web.Application()
    app.router.add_post("/{path:.*}", take)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("NODE_KEY", KEY)
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/base"
    settings = {"endpoint": endpoint, "api_key_env": "NODE_KEY", "model_aliases": {"public": MODEL}}
    bench, judge = Bench(("p", "d"), settings=settings), Judge()
    bench.router = bench.admission.router = Router(bench.nodes.values(), splits=True)
    prefiller = Prefiller(bench.nodes.values(), bench.telemetry, judge, lambda: 0.0)
    await prefiller.start()
    try:
        yield Legs(bench, judge, prefiller, got)
    finally:
        await prefiller.stop()
        await prefiller.stop()
        await runner.cleanup()


async def good(_: web.Request) -> web.StreamResponse:
    return web.json_response(ANSWER)


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


async def breaks(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def answers(status: int, text: str = "{}") -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    return answer


async def test_the_node_gets_its_key_its_path_its_model_name_and_one_token_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with legs(good, monkeypatch) as one:
        exchange, values, body = await one.done()
        [(path, authorization, asked)] = one.got
    assert (path, authorization) == ("/base/v1/chat/completions", f"Bearer {KEY}")
    assert (asked["model"], asked["max_tokens"], asked["stream"]) == (MODEL, 1, False)
    assert body["kv_transfer_params"] == PARAMETERS
    assert body["stream"] is True
    assert values["x-inferact-cluster"] == "d"
    assert (one.judge.served, one.judge.failed) == (["p"], [])
    assert one.bench.in_flight == {"d": 1}
    assert one.bench.metrics("inferact_prompt_tokens_total")["p", "unknown"] == 9000
    exchange.end(1.0)
    assert one.bench.is_idle(100.0)


FAILURES = [
    (answers(500), Failure.ENGINE_DEATH, "500", "engine_death"),
    (answers(500, '{"error": "CUDA out of memory"}'), Failure.OUT_OF_MEMORY, "500", "out_of_memory"),
    (answers(429), Failure.OVERLOADED, "429", "overloaded"),
    (answers(502), Failure.ERROR, "502", "error"),
    (breaks, Failure.LOST, "upstream_connection_termination", "lost"),
    (hangs, Failure.TIMED_OUT, "upstream_request_timeout", "timed_out"),
    (answers(400), None, "", "refused"),
    (answers(404), None, "", "refused"),
    (answers(200), None, "", "no_parameters"),
    (answers(200, "no JSON"), None, "", "no_parameters"),
]


@pytest.mark.parametrize(("answer", "failure", "reason", "counted"), FAILURES, ids=lambda one: str(one)[:20])
async def test_what_fails_is_judged_counted_and_followed_by_the_whole_request(
    answer: Answer,
    failure: Failure | None,
    reason: str,
    counted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with legs(answer, monkeypatch) as one:
        exchange, values, body = await one.done(timeout_s=1.0 if answer is hangs else 30.0)
    assert "kv_transfer_params" not in body
    assert values["x-inferact-cluster"] == "d"
    assert [(attempt.failure, attempt.reason) for attempt in one.judge.failed] == (
        [(failure, reason)] if failure else []
    ), "a prompt that is refused is no fault of the node's"
    assert one.bench.metrics("inferact_prefill_leg_failures_total") == {("p", counted): 1}
    assert one.bench.metrics("inferact_prefill_fallbacks_total") == {(): 1}
    exchange.end(1.0)
    assert one.bench.is_idle(100.0)


async def test_a_node_that_is_gone_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with legs(good, monkeypatch) as one:
        node = one.bench.nodes["p"]
        node.config = NodeConfig.model_validate(
            {**node.config.model_dump(), "endpoint": "http://127.0.0.1:9"}
        )
        one.prefiller.set_nodes(one.bench.nodes.values())
        await one.done()
    assert [attempt.failure for attempt in one.judge.failed] == [Failure.UNREACHED]


async def test_who_leaves_ends_the_connection_to_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def waits(_: web.Request) -> web.StreamResponse:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError

    async with legs(waits, monkeypatch) as one:
        exchange, _ = await one.held()
        async with asyncio.timeout(10):
            while not one.got:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            exchange.end(1.0)
            await ended.wait()
        assert one.bench.is_idle(100.0)
        assert (one.judge.served, one.judge.failed) == ([], []), "it did nothing wrong"


async def test_what_asks_for_its_prompt_back_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async with legs(good, monkeypatch) as one:
        exchange = one.bench.exchange()
        exchange._start_leg = one.prefiller.begin
        exchange.receive(headers_message(), 0.0)
        body = chat_body(messages=[{"role": "user", "content": "x" * 40_000}], prompt_logprobs=1)
        exchange.receive(body_message(body), 0.0)
        over = asyncio.Event()
        exchange.wake = over.set
        await over.wait()
        assert routed(exchange.resume(0.0))[1] is None
        assert one.got == []
