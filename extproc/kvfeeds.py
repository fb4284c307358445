"""Reads the KV events of all nodes that publish them, beside the requests."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import zmq

from extproc.engines.kvfeed import Feed
from extproc.engines.kvsockets import KvSockets
from extproc.routing.exact import ExactCaches
from extproc.routing.node import Node

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 0.05
"""Sockets are looked into this often, rather than waited for: one wake-up for all that came meanwhile."""


@dataclass(slots=True, eq=False)
class _Fed:
    node: Node
    sockets: KvSockets
    feed: Feed


class KvFeeds:
    """Keeps `exact` and the nodes' `events` up to date. `clock` is the router's."""

    def __init__(
        self, nodes: Iterable[Node], exact: ExactCaches, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nodes = list(nodes)
        self._exact = exact
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._fed: list[_Fed] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect and to read."""
        self.set_nodes(self._nodes)

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """Read from these from now on, as far as they publish; what is read goes on to be."""
        self._nodes = [node for node in nodes if node.config.kv_events is not None]
        for fed in list(self._fed):
            if not any(fed.node is node for node in self._nodes):
                self._fed.remove(fed)
                fed.sockets.close()
        known = {fed.node.id for fed in self._fed}
        self._fed += [self._feed(node) for node in self._nodes if node.id not in known]
        if self._fed and self._task is None:
            self._task = asyncio.create_task(self._run(), name="KV events")

    def _feed(self, node: Node) -> "_Fed":
        assert node.config.kv_events is not None
        if self._context is None:
            self._context = zmq.Context()
        sockets = KvSockets(self._context, node.config.kv_events)
        return _Fed(node, sockets, Feed(node, sockets, self._exact))

    async def stop(self) -> None:
        """Close the connections; harmless when repeated."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for fed in self._fed:
            fed.sockets.close()
        self._fed.clear()
        if self._context is not None:
            await asyncio.to_thread(self._context.term)
            self._context = None

    async def _run(self) -> None:
        while True:
            more = False
            for fed in list(self._fed):
                if fed not in self._fed:  # its node has left meanwhile
                    continue
                try:
                    more |= fed.feed.tick(self._clock())
                except Exception:
                    logger.exception("node %s: reading its KV events failed; reading goes on", fed.node.id)
                await asyncio.sleep(0)
            await asyncio.sleep(0 if more else _PERIOD_S)
