"""Carries a new configuration to every part of the running service, and to Envoy, between two requests."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from extproc.calls import ExtProc
from extproc.config import Batching, BatchStrategy, Config, NodeConfig
from extproc.config.difference import starts_anew
from extproc.drains import DrainStore
from extproc.envoyconfig.deliver import deliver_routes, grow, shrink
from extproc.envoyconfig.files import write_all
from extproc.exchange import Exchange, Limits, Phase
from extproc.fleet import Fleet
from extproc.kvfeeds import KvFeeds
from extproc.learner import Learner
from extproc.logs import set_level
from extproc.prefill import Prefiller
from extproc.routing.admission import Admission, Batches
from extproc.routing.node import Health, Node
from extproc.rundir import RunDir
from extproc.telemetry import Telemetry

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
"""How often it is looked whether the last request to a node that left is over."""
_LOG_LAG_S: Final = 2.0
"""How long after its end a request may still be told of in Envoy's log."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Parts:
    """What a configuration is carried to."""

    admission: Admission
    telemetry: Telemetry
    extproc: ExtProc
    fleet: Fleet
    kv_feeds: KvFeeds
    learner: Learner
    prefiller: Prefiller
    drains: DrainStore


class Applier:
    """Keeps the configuration in force, and Envoy's files true to it and to the drained nodes.

    A node that left stays known to Envoy, and keeps its slot, until the last request that may go there is
    over.
    """

    def __init__(self, config: Config, parts: Parts) -> None:
        self.config = config
        self.lock = asyncio.Lock()
        """Whoever writes Envoy's files, or changes what they are made of, holds it."""
        self._parts = parts
        self._router = parts.admission.router
        self._leaving: list[Node] = []
        self._farewells: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Read the drains, and write Envoy's files. Raises `DrainStoreError` and `OSError`."""
        drained = await self._parts.drains.load()
        for node in self._router.nodes.values():
            node.drained = node.id in drained
            if node.drained:
                logger.info("node %s is still drained: inferact restore %s", node.id, node.id)
        await asyncio.to_thread(write_all, self.config, self._run, self._drained())

    async def stop(self) -> None:
        """Wait for no node any more that leaves: the next start forgets them."""
        for task in self._farewells:
            task.cancel()
        await asyncio.gather(*self._farewells, return_exceptions=True)

    async def drains_changed(self) -> None:
        """Drained nodes leave the fail-open routes; restored ones may serve those who wait.

        The caller holds `lock`. Raises `OSError`.
        """
        self._parts.admission.freed(time.monotonic())
        await deliver_routes(self._for_envoy(self.config), self._run, self._drained())

    async def apply(self, config: Config) -> None:
        """Put a configuration in force: new nodes are known to Envoy before the first request goes there.

        Raises `DrainStoreError` and `OSError`: then nothing has changed.
        """
        async with self.lock:
            drained = await self._parts.drains.load()
            before = self._for_envoy(self.config)
            ids = {node.id for node in config.nodes}
            gone = frozenset(node.id for node in before.nodes if node.id not in ids)
            try:
                both = _with_nodes(config, [node for node in before.nodes if node.id in gone])
                await grow(both, self._run, self._drained() | gone | drained)
            except OSError:
                await asyncio.to_thread(write_all, before, self._run, self._drained())
                raise
            left = self._switch(config, self._nodes(config.nodes, drained))
            self._leaving += left
            for node in left:
                task = asyncio.create_task(self._see_off(node), name=f"node {node.id} leaves")
                self._farewells.add(task)
                task.add_done_callback(self._farewells.discard)

    @property
    def _run(self) -> RunDir:
        return RunDir(self.config.scheduler.run_dir)

    def _drained(self) -> frozenset[str]:
        """Nodes that get no request from Envoy on its own."""
        nodes = self._router.nodes
        drained = {node.id for node in nodes.values() if node.drained}
        return frozenset(drained | {node.id for node in self._leaving if node.id not in nodes})

    def _for_envoy(self, config: Config) -> Config:
        """The configuration with the nodes that still leave."""
        ids = {node.id for node in config.nodes}
        leaving = {node.id: node.config for node in self._leaving if node.id not in ids}
        return _with_nodes(config, leaving.values())

    def _nodes(self, configs: Iterable[NodeConfig], drained: Collection[str]) -> list[Node]:
        """The nodes there are to be: those that are there, as far as they are the same engines."""
        return [self._node(config, config.id in drained) for config in configs]

    def _node(self, config: NodeConfig, drained: bool) -> Node:
        known = self._router.nodes.get(config.id)
        if known is None:  # until it was probed, it is a last resort
            node = Node(config, config.profile, drained, Health.OFFLINE, resting=True)
            node.last_error = "it was not probed yet"
            return node
        if starts_anew(known.config, config):
            return Node(config, config.profile, known.drained)
        known.config = config
        return known

    def _switch(self, config: Config, nodes: Sequence[Node]) -> Sequence[Node]:
        """The change itself, between two requests; gives the nodes that left."""
        parts, scheduler = self._parts, config.scheduler
        if scheduler.log_level is not self.config.scheduler.log_level:
            set_level(scheduler.log_level)
        splits = config.batching.prefill_decode_split
        self._router.configure(config.batching.max_batch_size, config.kv_cache, splits)
        left = self._router.set_nodes(nodes)
        parts.fleet.set_nodes(nodes)
        parts.kv_feeds.set_nodes(nodes)
        parts.learner.set_nodes(nodes)
        parts.extproc.on_routed = parts.learner.on_routed
        parts.prefiller.set_nodes(nodes)
        parts.extproc.start_leg = parts.prefiller.begin if splits else None
        parts.extproc.limits = limits(config)
        admission = parts.admission
        admission.max_waiting, admission.max_waiting_bytes = scheduler.max_queue, scheduler.max_queue_bytes
        admission.batches = batches(config.batching)
        self.config = config
        admission.freed(time.monotonic())
        return left

    async def _see_off(self, node: Node) -> None:
        """Forget a node that left, once its last request is over and was told of."""
        await _over([one for one in self._parts.extproc.exchanges.live.values() if one.names(node)])
        await asyncio.sleep(_LOG_LAG_S)
        async with self.lock:
            self._leaving = [one for one in self._leaving if one is not node]
            self._router.roster.release(node)
            if node.id not in self._router.nodes:
                self._parts.telemetry.forget(node.id)
            logger.info("node %s has left: its last request is over", node.id)
            try:
                await shrink(self._for_envoy(self.config), self._run, self._drained())
            except OSError as error:
                logger.warning("Envoy still knows node %s: %s", node.id, error.strerror)


def limits(config: Config) -> Limits:
    """What every request is held to."""
    return Limits(config.scheduler.request_timeout_ms / 1000, config.scheduler.max_body_bytes)


def batches(batching: Batching) -> Batches | None:
    """How requests go together; `None`: each by itself."""
    if batching.strategy is not BatchStrategy.STATIC:
        return None
    assert batching.max_batch_size is not None, "checked with the configuration"
    return Batches(batching.max_batch_size, batching.max_wait_ms / 1000)


def _with_nodes(config: Config, more: Iterable[NodeConfig]) -> Config:
    return config.model_copy(update={"nodes": (*config.nodes, *more)})


async def _over(exchanges: list[Exchange]) -> None:
    """Return when all of them are over."""
    while True:
        exchanges = [one for one in exchanges if one.phase is not Phase.OVER]
        if not exchanges:
            return
        await asyncio.sleep(_LOOK_S)
