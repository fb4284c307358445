"""Watches the engines: probes their health, scrapes their metrics, and keeps both in the nodes."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import aiohttp

from extproc.engines.backends import dialect_for
from extproc.engines.client import EngineClient, NoAnswerError, open_session
from extproc.engines.dialect import read_report
from extproc.engines.hit_ratio import HitRatio
from extproc.routing.health import Event, HealthMachine
from extproc.routing.node import EngineReport, Health, Node

logger = logging.getLogger(__name__)

_JITTER_RATIO = 0.1
_LEAST_PAUSE = 0.1
"""Of a period, between two steps."""
_WORKED_S = 3.0
"""How long ago an engine may have been seen at work to count as working: reports come each second or so."""
_STOP_S = 5.0
_NO_METRICS = (404, 501)
"""How engines answer when they were started without metrics (SGLang, llama.cpp)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often nodes are asked, and how long an answer may take.

    A late scrape is worth waiting for: a loaded vLLM takes over 2 s to write its metrics.
    """

    probe_period_s: float = 1.0
    probe_timeout_s: float = 2.0
    scrape_period_s: float = 1.0
    scrape_timeout_s: float = 4.0


class Fleet:
    """Keeps `health`, `last_error`, `report`, `foreign` and `prefix_hit_ratio` of its nodes up to date.

    `on_change` is called with a node whose health has changed, `on_report` with one whose engine has
    reported; `clock` is the router's.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        on_change: Callable[[Node], None],
        on_report: Callable[[Node], None],
        clock: Callable[[], float] = time.monotonic,
        pace: Pace | None = None,
    ) -> None:
        self._nodes = tuple(nodes)
        self._on_change = on_change
        self._on_report = on_report
        self._clock = clock
        self._pace = pace or Pace()
        self._session: aiohttp.ClientSession | None = None
        self._watches: dict[str, _Watch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Begin to watch the nodes; returns before the first answer."""
        self._session = open_session()
        self.set_nodes(self._nodes)

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """Watch these from now on; those that are watched go on to be."""
        new = {node.id: node for node in nodes}
        for node_id, watch in list(self._watches.items()):
            if new.get(node_id) is not watch.node:
                del self._watches[node_id]
                self._tasks.pop(node_id).cancel()
        assert self._session is not None, "started"
        for node_id in new.keys() - self._watches.keys():
            client = EngineClient(self._session, new[node_id].config)
            watch = _Watch(new[node_id], client, self._on_change, self._on_report, self._clock)
            self._watches[node_id] = watch
            self._tasks[node_id] = asyncio.create_task(watch.run(self._pace), name=f"watch {node_id}")

    async def first_probes(self, limit_s: float) -> None:
        """Return once every node was probed, or after `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for watch in self._watches.values():
                    await watch.probed.wait()

    def happened(self, node_id: str, event: Event) -> None:
        """A request has told something of a node; one that was removed meanwhile is passed over."""
        if watch := self._watches.get(node_id):
            watch.happened(event)

    def doubt(self, node_id: str) -> None:
        """An attempt broke off: probe the node now, instead of when it is its turn."""
        if watch := self._watches.get(node_id):
            watch.doubted.set()

    async def stop(self) -> None:
        """Stop watching and close the connections, within seconds; harmless when repeated."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_STOP_S)
            self._tasks.clear()
            self._watches.clear()
        if self._session is not None:
            await self._session.close()
            self._session = None


class _Watch:
    """What is known of one node, and the loops that ask for it."""

    def __init__(
        self,
        node: Node,
        client: EngineClient,
        on_change: Callable[[Node], None],
        on_report: Callable[[Node], None],
        clock: Callable[[], float],
    ) -> None:
        self.node = node
        self._client = client
        self._on_change = on_change
        self._on_report = on_report
        self._clock = clock
        self._dialect = dialect_for(node.config)
        self._machine = HealthMachine(self._dialect.metrics_path is not None, clock())
        self._hit_ratio = HitRatio()
        self._probe_error: str | None = None
        self._scrape_error: str | None = None
        self.probed = asyncio.Event()
        self.doubted = asyncio.Event()

    async def run(self, pace: Pace) -> None:
        """Probe and scrape until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(
                self._every(
                    pace.probe_period_s,
                    lambda: self._probe(self._dialect.health_path, pace.probe_timeout_s),
                    self.doubted,
                )
            )
            if (metrics_path := self._dialect.metrics_path) is not None:
                loops.create_task(
                    self._every(
                        pace.scrape_period_s,
                        lambda: self._scrape(metrics_path, pace.scrape_timeout_s),
                        asyncio.Event(),
                    )
                )

    async def _every(
        self, period_s: float, step: Callable[[], Awaitable[None]], hurry: asyncio.Event
    ) -> None:
        """Repeat a step; begin anywhere in the period, and drift, so that many nodes never fall into step.

        `hurry` ends the wait for the next one, up to ten times in a period.
        """
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(random.uniform(0, period_s))
        while True:
            hurry.clear()
            due_s = clock() + period_s * random.uniform(1 - _JITTER_RATIO, 1 + _JITTER_RATIO)
            try:
                await step()
            except Exception:
                logger.exception("node %s: a watch step failed; watching goes on", self.node.id)
            await asyncio.sleep(period_s * _LEAST_PAUSE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(due_s - clock(), period_s / 2)):  # a slow engine gets a rest
                    await hurry.wait()

    async def _probe(self, path: str, timeout_s: float) -> None:
        try:
            await self._client.get(path, timeout_s)
        except NoAnswerError as error:
            self._probe_error = str(error)
            self.happened(Event.PROBE_REFUSED if error.refused else Event.PROBE_FAILED)
        else:
            self.happened(Event.PROBE_OK)
        self.probed.set()

    async def _scrape(self, path: str, timeout_s: float) -> None:
        ours = self.node.in_flight
        try:
            report = self._read(path, await self._client.get(path, timeout_s))
        except NoAnswerError as error:
            self._scrape_error = str(error)
            if error.status in _NO_METRICS and (option := self._dialect.metrics_option):
                self._scrape_error += f": start the engine with {option}"
        else:
            self._scrape_error = None
            # The engine counted at some time in between: what ran at either end may be in its numbers.
            self.node.take_report(report, max(ours, self.node.in_flight))
            self._on_report(self.node)
            self._hit_ratio.add(report)
        self.node.prefix_hit_ratio = self._hit_ratio.value(self._clock())
        if self._scrape_error is None:
            self.happened(Event.SCRAPE_OK)
        elif self.probed.is_set():  # until then it tells nothing of a node that has just come
            self.happened(Event.SCRAPE_FAILED)

    def _read(self, path: str, text: bytes) -> EngineReport:
        report = read_report(self._dialect, text, self._clock())
        if report == EngineReport(report.at_s):
            raise NoAnswerError(f"GET {path} answered none of the metrics of {self._dialect.engine}")
        return report

    def happened(self, event: Event) -> None:
        """Bring the node's health and last error up to date, and tell of a change."""
        node, machine, now_s = self.node, self._machine, self._clock()
        before = node.health, node.limit, node.cautious, node.resting
        works = now_s - node.worked_s < _WORKED_S or node.fresh_report(now_s) is None  # unknown is neutral
        health = machine.on(event, now_s, node.in_flight, works)
        if machine.lives:
            self._probe_error = None
        node.last_error = machine.fault or self._probe_error or self._scrape_error
        node.limit, node.cautious = machine.limit, machine.is_cautious(now_s)
        node.resting = health is Health.OFFLINE and machine.is_resting(now_s)
        if health is not node.health:
            back = "it answers again" if node.health is Health.OFFLINE else None
            node.health = health
            if health is Health.OFFLINE:
                node.fell_s = now_s
            level = logging.INFO if health is Health.HEALTHY else logging.WARNING
            why = back or node.last_error or "its probes succeed"
            logger.log(level, "node %s is %s: %s", node.id, health, why)
        if before != (node.health, node.limit, node.cautious, node.resting):
            self._on_change(node)
