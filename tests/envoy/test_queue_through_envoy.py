"""The queue on the real Envoy: whole batches, full queues, full engines, and the end of the service."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from envoy_stack import MODEL, Stack, open_stream, running_stack, serve_apart, until

from extproc.simulator.faults import Fault, FaultKind

pytestmark = pytest.mark.envoy

BATCH = 8


def sims(names: str = "a", interval_s: float = 0.02, **options: Any) -> dict[str, dict[str, Any]]:
    """Engines that make a token each `interval_s`."""
    return {name: {"speed": 1.0, "token_interval_s": interval_s, **options} for name in names}


def static(max_wait_ms: int) -> dict[str, Any]:
    return {"strategy": "static", "max_batch_size": BATCH, "max_wait_ms": max_wait_ms}


@pytest.mark.parametrize("waiting", [8, 64])
async def test_a_node_sees_whole_batches_only(waiting: int) -> None:
    async with running_stack(sims=sims(), batching=static(max_wait_ms=20_000)) as stack:
        answers = await asyncio.gather(*(stack.chat(f"{i}", max_tokens=1 + i % 5) for i in range(waiting)))
        passages = sorted(stack.sims["a"].stats.passages, key=lambda passage: passage.began_s)
    assert {answer.status_code for answer in answers} == {200}
    assert len(passages) == waiting
    batches = [passages[first : first + BATCH] for first in range(0, waiting, BATCH)]
    for before, after in pairwise(batches):
        assert max(passage.ended_s for passage in before) < after[0].began_s


async def test_a_lone_request_leaves_after_max_wait_ms() -> None:
    """Which is longer here than Envoy waits for an ordinary message."""
    async with running_stack(sims=sims(), batching=static(max_wait_ms=2500)) as stack:
        started_s = time.monotonic()
        answer = await stack.chat()
        assert answer.status_code == 200
        assert 2.5 <= time.monotonic() - started_s < 4.0
        assert await stack.metric("inferact_failopen_requests_total") == 0


async def test_a_full_queue_says_so_at_once_and_when_to_come_back() -> None:
    limits = {"max_queue": 2}
    async with running_stack(sims=sims(), batching={"max_batch_size": 1}, scheduler=limits) as stack:
        running = await open_stream(stack, tokens=150)
        waiting = [asyncio.create_task(stack.chat(max_tokens=1)) for _ in range(2)]
        await until(lambda: stack.service.admission.waiting == 2)
        took_s = []
        for _ in range(30):
            started_s = time.perf_counter()
            answer = await stack.chat()
            took_s.append(time.perf_counter() - started_s)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == answer.headers["x-inferact-reason"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        print(f"\n429 after {statistics.median(took_s) * 1e3:.1f} ms (median), client and Envoy included")
        assert statistics.median(took_s) < 0.02
        important = asyncio.create_task(stack.chat(max_tokens=1, **{"x-inferact": {"priority": 9}}))
        shed, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status_code for task in shed] == [429]
        await running
        assert (await important).status_code == 200
        assert sorted(answer.status_code for answer in await asyncio.gather(*waiting)) == [200, 429]


async def test_the_openai_client_comes_back_by_itself() -> None:
    limits = {"max_queue": 1}
    async with running_stack(sims=sims(), batching={"max_batch_size": 1}, scheduler=limits) as stack:
        running = await open_stream(stack, tokens=30)
        waiting = asyncio.create_task(stack.chat(max_tokens=1))
        await until(lambda: stack.service.admission.waiting == 1)
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client:
            answer = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=1
            )
        assert answer.choices
        assert await stack.metric("inferact_rejections_total", reason="queue_full") >= 1
        assert (await waiting).status_code == 200
        await running


async def test_a_held_request_goes_on_when_the_service_dies() -> None:
    async with running_stack(sims=sims(), batching={"max_batch_size": 1}) as stack:
        service = await serve_apart(stack)
        running = await open_stream(stack, tokens=100)
        text = "the whole body arrives " * 1000
        held = asyncio.create_task(stack.chat(text, max_tokens=1))
        async with asyncio.timeout(5):
            while not await stack.metric("inferact_queue_depth"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert stack.attempts() == 1
        service.kill()
        await service.wait()
        assert (await held).status_code == 200
        assert text.encode() in stack.sims["a"].stats.recorded[-1].body
        assert await running > 100


@contextlib.asynccontextmanager
async def crowd(stack: Stack, priority: int, clients: int) -> AsyncIterator[list[float]]:
    """Clients, each of which asks again as soon as it has its answer; how long the answers took."""
    took_s: list[float] = []

    async def ask() -> None:
        while True:
            started_s = time.monotonic()
            answer = await stack.chat(max_tokens=10, **{"x-inferact": {"priority": priority}})
            assert answer.status_code == 200
            took_s.append(time.monotonic() - started_s)

    asking = [asyncio.create_task(ask()) for _ in range(clients)]
    try:
        yield took_s
    finally:
        for task in asking:
            task.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


async def test_without_a_cap_full_engines_make_requests_wait_here_by_priority() -> None:
    async with (
        running_stack(sims=sims("ab", interval_s=0.05, max_num_seqs=4)) as stack,
        crowd(stack, priority=0, clients=60) as others_s,
    ):
        admission, engines = stack.service.admission, [sim.stats for sim in stack.sims.values()]
        await until(lambda: admission.waiting > 40, limit_s=15)
        await until(lambda: max(engine.waiting for engine in engines) <= 2, limit_s=15)
        longest = 0
        async with crowd(stack, priority=9, clients=1) as important_s:
            for _ in range(100):
                await asyncio.sleep(0.03)
                longest = max(longest, *(engine.waiting for engine in engines))
        waits_s = [statistics.mean(took_s[-30:]) for took_s in (important_s, others_s)]
        print(f"\nengines kept {longest} waiting; answers took {waits_s[0]:.2f} s, others {waits_s[1]:.2f} s")
        assert longest <= 4
        assert waits_s[0] < 0.5 * waits_s[1]


async def test_metrics_that_go_stale_hold_nobody_back() -> None:
    async with (
        running_stack(sims=sims("ab", interval_s=0.05, max_num_seqs=4)) as stack,
        crowd(stack, priority=0, clients=60),
    ):
        admission, engines = stack.service.admission, [sim.stats for sim in stack.sims.values()]
        await until(lambda: admission.waiting > 40, limit_s=15)
        for sim in stack.sims.values():
            sim.faults.arm([Fault(FaultKind.METRICS_GARBAGE)])
        await until(lambda: admission.waiting == 0, limit_s=15)
        await until(lambda: sum(engine.waiting for engine in engines) > 40)
