"""Reads the KV events of all nodes that publish them, beside the requests."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

import zmq

from extproc.engines.kvfeed import Feed
from extproc.engines.kvsockets import KvSockets
from extproc.routing.exact import ExactCaches
from extproc.routing.node import Node

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 0.05
"""Sockets are looked into this often, rather than waited for: one wake-up for all that came meanwhile."""


class KvFeeds:
    """Keeps `exact` and the nodes' `events` up to date. `clock` is the router's."""

    def __init__(
        self, nodes: Iterable[Node], exact: ExactCaches, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nodes = [node for node in nodes if node.config.kv_events is not None]
        self._exact = exact
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: list[KvSockets] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect and to read."""
        if not self._nodes:
            return
        self._context = zmq.Context()
        feeds = []
        for node in self._nodes:
            assert node.config.kv_events is not None
            self._sockets.append(KvSockets(self._context, node.config.kv_events))
            feeds.append((node, Feed(node, self._sockets[-1], self._exact)))
        self._task = asyncio.create_task(self._run(feeds), name="KV events")

    async def stop(self) -> None:
        """Close the connections; harmless when repeated."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for sockets in self._sockets:
            sockets.close()
        self._sockets.clear()
        if self._context is not None:
            await asyncio.to_thread(self._context.term)
            self._context = None

    async def _run(self, feeds: list[tuple[Node, Feed]]) -> None:
        while True:
            more = False
            for node, feed in feeds:
                try:
                    more |= feed.tick(self._clock())
                except Exception:
                    logger.exception("node %s: reading its KV events failed; reading goes on", node.id)
                await asyncio.sleep(0)
            await asyncio.sleep(0 if more else _PERIOD_S)
