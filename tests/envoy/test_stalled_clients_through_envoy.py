"""Clients that stop reading, and a fleet at its cap where one node fails: nobody else may pay for it."""

import asyncio
import json

import h2.config
import h2.connection
import pytest
from envoy_stack import MODEL, Stack, running_stack, until

from extproc.simulator.faults import Fault, FaultKind

pytestmark = pytest.mark.envoy

STALL_LIMIT_S = 10.0


async def open_and_never_read(stack: Stack) -> asyncio.StreamWriter:
    """An HTTP/2 request whose answer is larger than the window that the client leaves it."""
    host, port = stack.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "q"}],
        "max_tokens": 2000,
        "stream": True,
    }
    names = {":method": "POST", ":path": "/v1/chat/completions", ":scheme": "http", ":authority": "x"}
    connection.send_headers(1, [*names.items(), ("content-type", "application/json")])
    connection.send_data(1, json.dumps(body).encode(), end_stream=True)
    writer.write(connection.data_to_send())
    await writer.drain()
    return writer


async def test_a_client_that_stops_reading_loses_its_slot() -> None:
    limits = {"request_timeout_ms": 2000}
    async with running_stack(sims=("a",), batching={"max_batch_size": 1}, scheduler=limits) as stack:
        writer = await open_and_never_read(stack)
        await until(lambda: stack.in_flight() == {"a": 1})
        await until(lambda: stack.in_flight() == {"a": 0}, limit_s=STALL_LIMIT_S)
        assert (await stack.chat()).status_code == 200
        writer.close()


async def test_a_failing_node_does_not_swallow_the_queue() -> None:
    """All nodes are full, so the failing one is always the first to be free."""
    sims = {name: {"token_interval_s": 0.01, "speed": 1.0} for name in "abc"}
    async with running_stack(sims=sims, batching={"max_batch_size": 2}) as stack:
        stack.sims["c"].faults.arm([Fault(FaultKind.ERROR_500)])
        answers = await asyncio.gather(
            *(stack.chat(f"question {number}", max_tokens=4) for number in range(60))
        )
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-sim-node"] for answer in answers} == {"a", "b"}
        await until(lambda: set(stack.in_flight().values()) == {0})


async def test_large_bodies_do_not_go_on_without_the_service() -> None:
    async with running_stack(sims=("a",)) as stack:
        await stack.service.stop(grace_s=0)
        large = await stack.chat("x" * 3_000_000)
        assert large.status_code == 503
        assert large.json()["error"]["code"] == "no_available_node"
        assert large.headers["x-inferact-reason"] == "no_available_node"
        assert (await stack.chat("x" * 1_500_000)).headers["x-sim-node"] == "a"
        await stack.restart_service()
