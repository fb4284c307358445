"""What the simulator's tests share."""

import asyncio
from collections.abc import Awaitable, Callable

from extproc.simulator.engine import RunningSimulator

Simulate = Callable[..., Awaitable[RunningSimulator]]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens on the other side of a connection."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
