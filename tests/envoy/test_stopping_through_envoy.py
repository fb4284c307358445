"""Stopping the service and Envoy while requests run."""

import asyncio

import httpx
import pytest
from envoy_stack import Stack, running_stack, serve_apart, until

pytestmark = pytest.mark.envoy

SOON_S = 5.0
"""Far less than `request_timeout_ms`, which a stop may use up when requests run."""


@pytest.fixture
async def stack():
    """A node that needs a second for a hundred tokens."""
    sims = {"a": {"token_interval_s": 0.01, "speed": 1.0}}
    async with running_stack(sims=sims) as running:
        yield running


async def running_request(stack: Stack) -> asyncio.Task[httpx.Response]:
    """A request that has reached the node."""
    task = asyncio.create_task(stack.chat(max_tokens=100, ignore_eos=True))
    await until(lambda: stack.in_flight() == {"a": 1})
    return task


async def test_an_idle_service_stops_soon_though_envoy_keeps_its_log_streams(stack: Stack) -> None:
    assert (await stack.chat()).status_code == 200
    async with asyncio.timeout(SOON_S):
        await stack.service.stop()


async def test_a_stopping_service_lets_running_exchanges_end(stack: Stack) -> None:
    request = await running_request(stack)
    await stack.service.stop()
    assert stack.in_flight() == {"a": 0}
    assert (await request).status_code == 200


async def test_a_stop_under_way_can_be_cut_short(stack: Stack) -> None:
    request = await running_request(stack)
    stopping = asyncio.create_task(stack.service.stop())
    done, _ = await asyncio.wait({stopping}, timeout=0.1)
    assert not done
    stopping.cancel()
    async with asyncio.timeout(SOON_S):
        await stack.service.stop(0)
    await asyncio.gather(request, return_exceptions=True)


async def test_a_draining_envoy_refuses_new_connections_and_finishes_what_runs(stack: Stack) -> None:
    request = await running_request(stack)
    draining = asyncio.create_task(stack.envoy.drain())
    await until(lambda: draining.done() or request.done())
    assert request.done(), "the drain waits for the request"
    await draining
    answer = await request
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    async with httpx.AsyncClient(trust_env=False) as newcomer:
        with pytest.raises(httpx.TransportError):
            await newcomer.get(f"{stack.url}/healthz")


async def test_draining_an_envoy_that_is_gone_is_harmless(stack: Stack) -> None:
    await stack.envoy.stop()
    async with asyncio.timeout(SOON_S):
        await stack.envoy.drain()
        await stack.envoy.stop()


async def test_a_service_of_its_own_stops_soon_after_traffic(stack: Stack) -> None:
    service = await serve_apart(stack)
    assert (await stack.chat()).status_code == 200
    service.terminate()
    async with asyncio.timeout(SOON_S):
        assert await service.wait() == 0
