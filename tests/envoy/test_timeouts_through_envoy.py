"""`request_timeout_ms` on the real Envoy: what is cut, when, and what is not."""

import asyncio
import time
from typing import Any

import pytest
from envoy_stack import STREAM, Stack, open_stream, running_stack, until

from extproc.simulator.faults import Fault, FaultKind

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT_S = 1.5
SLACK_S = 1.4
"""Below a second timeout, above what a busy machine adds."""
LIMIT = {"request_timeout_ms": int(TIMEOUT_S * 1000)}


def slow(interval_s: float, names: str = "abc") -> dict[str, dict[str, Any]]:
    return {name: {"token_interval_s": interval_s, "speed": 1.0} for name in names}


@pytest.fixture(scope="module")
async def slow_stack():
    """A token each 0.25 s, and 1.5 s for a request."""
    async with running_stack(sims=slow(0.25), scheduler=LIMIT) as running:
        yield running


def assert_timeout(answer: Any) -> None:
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "request_timeout"
    assert answer.headers["x-inferact-reason"] == "request_timeout"


async def test_a_long_answer_that_is_no_stream_is_cut_and_not_retried(slow_stack: Stack) -> None:
    before = slow_stack.attempts()
    started_s = time.monotonic()
    answer = await slow_stack.chat(max_tokens=100)
    assert TIMEOUT_S <= time.monotonic() - started_s < TIMEOUT_S + SLACK_S
    assert_timeout(answer)
    assert slow_stack.attempts() == before + 1


async def test_a_steady_stream_outlives_the_timeout(slow_stack: Stack) -> None:
    started_s = time.monotonic()
    async with slow_stack.client.stream(
        "POST", "/v1/chat/completions", json=STREAM | {"max_tokens": 20}
    ) as answer:
        lines = [line async for line in answer.aiter_lines()]
    assert "data: [DONE]" in lines
    assert time.monotonic() - started_s > 3 * TIMEOUT_S


@pytest.mark.slow
async def test_a_stream_of_minutes_at_a_slow_pace() -> None:
    """130 s with a token a second: no default of Envoy's (15 s, 60 s, ...) cuts it."""
    async with running_stack(sims=slow(1.0, "a"), scheduler=LIMIT | {"request_timeout_ms": 3000}) as minutes:
        body = STREAM | {"max_tokens": 130}
        async with minutes.client.stream("POST", "/v1/chat/completions", json=body, timeout=30) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 130


async def test_a_stream_that_falls_silent_is_cut(slow_stack: Stack) -> None:
    async with running_stack(sims=slow(0.05), scheduler=LIMIT) as silent:
        for sim in silent.sims.values():
            sim.faults.arm([Fault(FaultKind.HANG_MID_STREAM, after_chunks=3)])
        heard_s = time.monotonic()
        with pytest.raises(Exception, match=r"peer closed|incomplete|disconnect"):
            async with silent.client.stream(
                "POST", "/v1/chat/completions", json=STREAM | {"max_tokens": 50}
            ) as answer:
                async for _ in answer.aiter_raw():
                    heard_s = time.monotonic()
        assert TIMEOUT_S - 0.1 <= time.monotonic() - heard_s < TIMEOUT_S + SLACK_S
        await until(lambda: sum(silent.in_flight().values()) == 0)


async def test_a_node_that_hangs_before_a_stream_begins_loses_it_to_the_next() -> None:
    async with running_stack(sims=slow(0.01), scheduler=LIMIT) as hanging:
        hanging.sims["a"].faults.arm([Fault(FaultKind.HANG)])
        answers = []
        for _ in range(6):
            started_s = time.monotonic()
            async with hanging.client.stream(
                "POST", "/v1/chat/completions", json=STREAM | {"max_tokens": 2}
            ) as answer:
                await answer.aread()
            answers.append((answer.status_code, answer.headers["x-sim-node"], time.monotonic() - started_s))
        assert {status for status, _, _ in answers} == {200}
        assert "a" not in {node for _, node, _ in answers}
        assert max(took_s for *_, took_s in answers) < TIMEOUT_S


async def test_when_every_node_hangs_the_client_is_told_in_time() -> None:
    async with running_stack(sims=slow(0.01), scheduler=LIMIT) as hanging:
        for sim in hanging.sims.values():
            sim.faults.arm([Fault(FaultKind.HANG)])
        for body in (STREAM, STREAM | {"stream": False}):
            started_s = time.monotonic()
            answer = await hanging.client.post("/v1/chat/completions", json=body)
            assert_timeout(answer)
            assert TIMEOUT_S - 0.1 <= time.monotonic() - started_s < TIMEOUT_S + SLACK_S


async def test_a_held_request_is_served_when_a_slot_frees() -> None:
    """Held for over 2 s, the time that Envoy gives an ordinary message."""
    limit = {"request_timeout_ms": 10_000}
    async with running_stack(sims=slow(0.1, "a"), batching={"max_batch_size": 1}, scheduler=limit) as capped:
        running = await open_stream(capped, tokens=40)
        started_s = time.monotonic()
        answer = await capped.chat(max_tokens=1)
        assert answer.status_code == 200
        assert time.monotonic() - started_s > 2.5
        assert await running > 40
        await until(lambda: capped.in_flight() == {"a": 0})


async def test_a_held_request_gets_its_504_in_time() -> None:
    async with running_stack(sims=slow(0.1, "a"), batching={"max_batch_size": 1}, scheduler=LIMIT) as capped:
        running = await open_stream(capped, tokens=40)
        before = capped.attempts()
        started_s = time.monotonic()
        answer = await capped.chat(max_tokens=1)
        assert TIMEOUT_S <= time.monotonic() - started_s < TIMEOUT_S + SLACK_S
        assert_timeout(answer)
        assert capped.attempts() == before
        assert await running > 40


async def test_time_in_the_queue_counts() -> None:
    """Released with half a second left, an answer that needs a second is cut."""
    async with running_stack(sims=slow(0.1, "a"), batching={"max_batch_size": 1}, scheduler=LIMIT) as capped:
        running = await open_stream(capped, tokens=10)
        started_s = time.monotonic()
        answer = await capped.chat(max_tokens=30)
        assert_timeout(answer)
        assert TIMEOUT_S <= time.monotonic() - started_s < TIMEOUT_S + SLACK_S
        await running


async def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    async with running_stack(sims=slow(0.1, "a"), batching={"max_batch_size": 1}) as capped:
        running = await open_stream(capped, tokens=20)
        waiting = asyncio.create_task(capped.chat(max_tokens=1))
        await until(lambda: capped.service.admission.waiting == 1)
        waiting.cancel()
        await until(lambda: capped.service.admission.waiting == 0, limit_s=1)
        await running
        await until(lambda: capped.in_flight() == {"a": 0})
