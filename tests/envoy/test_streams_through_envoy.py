"""Streams through the real Envoy: order, bytes, aborts, many at once."""

import asyncio
import json
import statistics
import time

import httpx
import pytest
from aiohttp import web
from envoy_stack import MODEL, Stack, running_stack, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "tell me"}], "stream": True}


@pytest.fixture(scope="module")
async def slow_stack():
    """Engines with 20 ms between tokens."""
    sims = {name: {"token_interval_s": 0.02, "speed": 1.0, "max_num_seqs": 512} for name in "abc"}
    async with running_stack(sims=sims) as running:
        yield running


async def test_events_in_order_and_complete(stack: Stack) -> None:
    whole = (await stack.chat("tell me", max_tokens=50, **{"x-inferact": {"node_affinity": "a"}})).json()
    pieces = []
    body = BODY | {
        "max_tokens": 50,
        "stream_options": {"include_usage": True},
        "x-inferact": {"node_affinity": "a"},
    }
    async with stack.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-inferact-node"] == "a"
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    for event in events:
        pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_an_engines_bytes_are_not_touched() -> None:
    """Odd chunk borders, comments, CRLF, empty events and half characters pass as they are."""
    script = [
        b": ping\r\n\r\n",
        b'data: {"a": 1.',
        b"0}\n\ndata: \xc3",
        b"\xa9\n\n\n",
        b"event: x\ndata: [DONE]\n\n",
    ]

    async def chat(request: web.Request) -> web.StreamResponse:
        await request.read()
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", "x-engine": "kept"})
        await answer.prepare(request)
        for piece in script:
            await answer.write(piece)
            await asyncio.sleep(0.01)
        return answer

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", healthy)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    odd_node = {
        "endpoint": f"http://127.0.0.1:{port}",
        "backend": "custom",
        "engine": {"health_path": "/health"},
    }
    try:
        async with (
            running_stack(sims=("a",), nodes={"a": odd_node}) as odd,
            odd.client.stream("POST", "/v1/chat/completions", json=BODY) as answer,
        ):
            assert answer.headers["x-engine"] == "kept"
            assert b"".join([piece async for piece in answer.aiter_raw()]) == b"".join(script)
    finally:
        await runner.cleanup()


async def test_an_abort_frees_the_booking_at_once(slow_stack: Stack) -> None:
    took_s = []
    for _ in range(5):
        async with slow_stack.client.stream(
            "POST", "/v1/chat/completions", json=BODY | {"max_tokens": 500}
        ) as answer:
            async for _ in answer.aiter_raw():
                break
            assert sum(slow_stack.in_flight().values()) == 1
        left_s = time.monotonic()
        await until(lambda: sum(slow_stack.in_flight().values()) == 0, limit_s=1)
        took_s.append(time.monotonic() - left_s)
    assert statistics.median(took_s) < 0.1
    await until(lambda: all(sim.stats.running == 0 for sim in slow_stack.sims.values()))


async def test_three_hundred_streams_at_once() -> None:
    sims = {name: {"token_interval_s": 0.5, "speed": 1.0, "max_num_seqs": 512} for name in "abc"}
    async with running_stack(sims=sims) as wide:
        limits = httpx.Limits(max_connections=400)
        async with httpx.AsyncClient(base_url=wide.url, limits=limits, timeout=60, trust_env=False) as client:
            streams = [asyncio.create_task(read_stream(client, number)) for number in range(300)]
            await until(lambda: sum(wide.in_flight().values()) == 300, limit_s=20)
            events = await asyncio.gather(*streams)
        assert min(events) >= 20
        await until(lambda: sum(wide.in_flight().values()) == 0)


async def read_stream(client: httpx.AsyncClient, number: int) -> int:
    """The number of events of one stream of 20 tokens."""
    body = BODY | {"max_tokens": 20, "messages": [{"role": "user", "content": f"stream {number}"}]}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return len(lines)
