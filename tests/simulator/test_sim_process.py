"""A simulated engine as a process of its own."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest

PROGRAM = """
import sys
from extproc.simulator.engine import run
from extproc.simulator.faults import Fault, FaultKind
from extproc.simulator.options import SimulatorOptions
faults = (Fault(FaultKind.DIE, contains="poison", delay_s=0.05),)
run(SimulatorOptions(speed=float("inf"), faults=faults), "127.0.0.1", int(sys.argv[1]), print)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
async def process_and_url() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, str(port))
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(30), aiohttp.ClientSession() as http:
            while not await healthy(http, url):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url + "/health") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectorError:
        return False


async def test_it_ends_in_order_when_told_to(
    process_and_url: tuple[asyncio.subprocess.Process, str],
) -> None:
    process, _ = process_and_url
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_it_ends_with_1_when_a_request_kills_it(
    process_and_url: tuple[asyncio.subprocess.Process, str],
) -> None:
    process, url = process_and_url
    body = {"messages": [{"role": "user", "content": "poison"}]}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + "/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status == 500
    assert await asyncio.wait_for(process.wait(), 10) == 1
