"""Engines as real HTTP servers, and a fleet that watches them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from extproc.config.node import NodeConfig
from extproc.fleet import Fleet, Pace
from extproc.routing.loads import Work
from extproc.routing.node import Booking, Health, Node
from extproc.routing.router import Router

BRISK = Pace(probe_period_s=0.02, probe_timeout_s=5, scrape_period_s=0.02, scrape_timeout_s=5)
LONG_S = 10.0

METRICS = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.25\n"


class Engine:
    """An HTTP server whose answers a test chooses: a status, a body, or a handler."""

    def __init__(self) -> None:
        self.health: int | Callable[[web.Request], Awaitable[web.StreamResponse]] = 200
        self.metrics: bytes | Callable[[web.Request], Awaitable[web.StreamResponse]] = METRICS
        self.asked: Counter[str] = Counter()
        self.asked_at_s: list[float] = []
        self.requests: list[web.Request] = []
        self._news = asyncio.Condition()
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self.server = TestServer(app, host="127.0.0.1")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        async with self._news:
            self.asked[request.path] += 1
            self.asked_at_s.append(time.monotonic())
            self.requests.append(request)
            self._news.notify_all()
        answer = self.metrics if request.path.endswith("/metrics") else self.health
        if isinstance(answer, int):
            return web.Response(status=answer, text="body text")
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        return await answer(request)

    async def answered(self, path: str) -> None:
        """Wait until a request that comes from now on has been asked, answered and taken in."""
        async with asyncio.timeout(LONG_S), self._news:
            wanted = self.asked[path] + 2
            await self._news.wait_for(lambda: self.asked[path] >= wanted)


@asynccontextmanager
async def running_engine(**server: Any) -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.server.start_server(shutdown_timeout=1, **server)
    try:
        yield engine
    finally:
        await engine.server.close()


class Changes:
    """The fleet's `on_change`: remembers what health each change brought."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, Health]] = asyncio.Queue()

    def __call__(self, node: Node) -> None:
        self._queue.put_nowait((node.id, node.health))

    async def next(self) -> Health:
        return (await asyncio.wait_for(self._queue.get(), LONG_S))[1]

    def none_left(self) -> bool:
        return self._queue.empty()


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_node(
    port: int, node_id: str = "n", scheme: str = "http", base_path: str = "", **settings: Any
) -> Node:
    config = NodeConfig.model_validate(
        {
            "id": node_id,
            "hardware": "h100-80g",
            "backend": "vllm",
            "endpoint": f"{scheme}://127.0.0.1:{port}{base_path}",
            "models": ["m"],
            **settings,
        }
    )
    return Node(config=config, profile=config.profile)


def book(node: Node, count: int) -> list[Booking]:
    """So many requests on a node."""
    router = Router([node])
    return [router.book(node, Work(100.0, 10.0, 1.0), 0.0) for _ in range(count)]


def node_of(server: Engine, **settings: Any) -> Node:
    assert server.server.port is not None
    return make_node(server.server.port, **settings)


@asynccontextmanager
async def watching(
    *nodes: Node,
    changes: Changes,
    clock: Clock | None = None,
    pace: Pace = BRISK,
    on_report: Callable[[Node], None] = lambda _: None,
) -> AsyncIterator[Fleet]:
    fleet = Fleet(nodes, changes, on_report, clock or time.monotonic, pace)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


async def hang(_: web.Request) -> web.StreamResponse:
    """An answer that comes later than anybody waits for."""
    await asyncio.sleep(LONG_S)
    return web.Response()
