"""Real engines that are full, drained, killed, and come back: clients notice as little as can be."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from engine_processes import MODEL, MOST_RUNNING, Engines
from envoy_stack import Stack, until

from extproc.routing.node import Health
from extproc.routing.outcome import Ended

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

LONG = {"model": MODEL, "prompt": "for ever and ever", "max_tokens": 4000, "ignore_eos": True, "stream": True}
SEEN_S = 5.0
"""A node that is gone is offline by then."""
BACK_S = 45.0
"""One that is back is healthy by then: it had rest after what its last answers were."""
START_S = 240.0


@pytest.fixture(autouse=True)
def no_outcomes(stack: Stack) -> None:
    stack.outcomes.clear()


def health(stack: Stack, node_id: str) -> Health:
    return stack.service.router.nodes[node_id].health


@contextlib.asynccontextmanager
async def full(url: str) -> AsyncIterator[None]:
    """While others use all that an engine gives, its queue included: it refuses more."""
    async with contextlib.AsyncExitStack() as streams:
        limits = httpx.Limits(max_connections=None)
        http = httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, limits=limits)
        await streams.enter_async_context(http)

        async def begin() -> int:
            answer = await http.send(http.build_request("POST", "/v1/completions", json=LONG), stream=True)
            streams.push_async_callback(answer.aclose)
            return answer.status_code

        async with asyncio.timeout(20):
            while 503 not in await asyncio.gather(*(begin() for _ in range(MOST_RUNNING))):
                pass  # it looks at its queue now and then
        yield


async def test_what_a_full_engine_refuses_another_serves(stack: Stack, engines: Engines) -> None:
    async with full(engines.a.url):
        answers = await asyncio.gather(*(stack.chat(f"{i} is a number", model=MODEL) for i in range(12)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-inferact-node"] for answer in answers} == {"b"}
    assert health(stack, "a") is Health.HEALTHY, "a full queue is no fault"


async def test_a_drained_node_ends_its_streams_and_gets_no_more(stack: Stack) -> None:
    async with stack.client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 400}) as answer:
        node_id = answer.headers["x-inferact-node"]
        lines = answer.aiter_lines()
        await anext(lines)
        await stack.drain(node_id)
        others = [await stack.chat(f"after {i}", model=MODEL) for i in range(4)]
        assert all(other.headers["x-inferact-node"] != node_id for other in others)
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert (await stack.admin(f"/admin/nodes/{node_id}/restore")).status_code == 200


# Last: what follows takes both engines' lives.


async def test_an_engine_that_dies_within_a_stream_is_seen_and_left_and_comes_back(
    stack: Stack, engines: Engines
) -> None:
    async with stack.client.stream("POST", "/v1/completions", json=LONG) as answer:
        node_id = answer.headers["x-inferact-node"]
        lines = answer.aiter_lines()
        await anext(lines)
        engines.of(node_id).kill_core()
        rest = [line.removeprefix("data: ") async for line in lines if line]
    assert rest[-1] == "[DONE]" and json.loads(rest[-2])["error"]["code"] == 500, "as vLLM says it"
    await until(lambda: bool(stack.outcomes))
    assert stack.outcomes[0].ended is Ended.ERROR, "and [DONE] is no success"

    answers = await asyncio.gather(*(stack.chat(f"next {i}", model=MODEL) for i in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert all(answer.headers["x-inferact-node"] != node_id for answer in answers)
    await until(lambda: health(stack, node_id) is Health.OFFLINE, SEEN_S)
    await comes_back(stack, engines, node_id)


async def comes_back(stack: Stack, engines: Engines, node_id: str) -> None:
    """Start the engine anew: it is healthy again, and what is known of its cache is of the new one."""
    engine, node = engines.of(node_id), stack.service.router.nodes[node_id]
    engine.kill()
    engine.start()
    async with asyncio.timeout(START_S):
        await engine.ready()
    await until(lambda: node.health is Health.HEALTHY, BACK_S)
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=30) as direct:
        body = {"model": MODEL, "prompt": "back again " * 200, "max_tokens": 1}
        assert (await direct.post("/v1/completions", json=body)).status_code == 200
    await until(lambda: node.events.exact and 0 < stack.service.router.exact.blocks(node) < 40, SEEN_S)


async def test_an_engine_that_is_gone_between_requests_costs_no_client_its_answer(
    stack: Stack, engines: Engines
) -> None:
    engines.a.kill()
    answers = await asyncio.gather(*(stack.chat(f"{i} after that", model=MODEL) for i in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-inferact-node"] for answer in answers} == {"b"}
    await until(lambda: health(stack, "a") is Health.OFFLINE, SEEN_S)


async def test_without_any_engine_the_answer_says_so(stack: Stack, engines: Engines) -> None:
    engines.b.kill()
    await until(lambda: health(stack, "b") is Health.OFFLINE, SEEN_S)
    answer = await stack.chat(model=MODEL)
    assert (answer.status_code, answer.headers["x-inferact-reason"]) == (503, "no_available_node")
    assert answer.headers["retry-after"]
