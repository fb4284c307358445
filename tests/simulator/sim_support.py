"""What the simulator's tests share."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from extproc.simulator.engine import RunningSimulator

Simulate = Callable[..., Awaitable[RunningSimulator]]
CHAT = "/v1/chat/completions"


def chat(content: str = "hello", **members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **members}


async def post(http: aiohttp.ClientSession, simulator: RunningSimulator, path: str, body: Any) -> Any:
    async with http.post(simulator.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def stream(http: aiohttp.ClientSession, simulator: RunningSimulator, path: str, body: Any) -> list[str]:
    """The data of each event."""
    async with http.post(simulator.url + path, json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        events = (await answer.text()).split("\n\n")
    assert events.pop() == ""
    return [event.partition("data: ")[2] for event in events]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens on the other side of a connection."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
