from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from sim_support import Simulate

from extproc.simulator.engine import RunningSimulator, start
from extproc.simulator.options import SimulatorOptions


@pytest.fixture
async def simulate() -> AsyncIterator[Simulate]:
    """Starts simulated engines that answer at once unless told otherwise, and stops them after the test."""
    started: list[RunningSimulator] = []

    async def begin(**options: Any) -> RunningSimulator:
        simulator = await start(SimulatorOptions(**{"speed": float("inf")} | options))
        started.append(simulator)
        return simulator

    yield begin
    for simulator in started:
        await simulator.stop()


@pytest.fixture
async def http(simulate: Simulate) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that leaves before the engines stop."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session
