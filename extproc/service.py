"""The service: every part made, wired, started and stopped in order."""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from aiohttp import web

from admin.app import AdminContext, make_app, start_admin
from extproc.accesslog import AccessLog
from extproc.applying import Applier, Parts, batches, limits
from extproc.calls import ExtProc
from extproc.config import Config
from extproc.config.fields import Transport
from extproc.drains import DrainStore
from extproc.envoyconfig.told import failed_open_requests
from extproc.fleet import Fleet
from extproc.kvfeeds import KvFeeds
from extproc.lean.server import LeanServer
from extproc.learner import Learner
from extproc.prefill import Prefiller
from extproc.reload import Reloader
from extproc.routing.admission import Admission
from extproc.routing.node import Health, Node
from extproc.routing.router import Router
from extproc.rundir import RunDir
from extproc.server import GrpcServer
from extproc.telemetry import Telemetry

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""How often the event loop's lag is measured, and the queue looked at."""


class Service:
    """The scheduler process. `start`, then `stop`; raises `BindError` and `OSError` on the way up."""

    def __init__(self, config: Config, admin_key: str | None, config_file: Path | None = None) -> None:
        self.router = Router(
            (Node(config=node, profile=node.profile) for node in config.nodes),
            cap=config.batching.max_batch_size,
            cache=config.kv_cache,
            splits=config.batching.prefill_decode_split,
        )
        scheduler = config.scheduler
        self.admission = Admission(
            self.router, scheduler.max_queue, scheduler.max_queue_bytes, batches(config.batching)
        )
        self.telemetry = Telemetry(self.router, self.admission)
        nodes = self.router.nodes.values()
        self.kv_feeds = KvFeeds(nodes, self.router.exact)
        self.learner = Learner(nodes, self.router.exact)
        self.extproc = ExtProc(
            self.admission, self.telemetry, limits(config), on_routed=self.learner.on_routed
        )
        self.fleet = Fleet(nodes, on_change=self._node_changed, on_report=self._node_reported)
        self._access_log = AccessLog(
            self.router,
            self.telemetry,
            self.extproc.exchanges,
            self.fleet,
            on_outcome=self.router.receipts.happened,
        )
        self.prefiller = Prefiller(nodes, self.telemetry, self._access_log)
        if config.batching.prefill_decode_split:
            self.extproc.start_leg = self.prefiller.begin
        self._run_dir = RunDir(scheduler.run_dir)
        self._drains = DrainStore(self._run_dir.drains)
        parts = Parts(
            admission=self.admission,
            telemetry=self.telemetry,
            extproc=self.extproc,
            fleet=self.fleet,
            kv_feeds=self.kv_feeds,
            learner=self.learner,
            prefiller=self.prefiller,
            drains=self._drains,
        )
        self._applier = Applier(config, parts)
        self.reloader = (
            Reloader(config_file, lambda: self.config, self._applier.apply) if config_file else None
        )
        self._server: GrpcServer | LeanServer | None = None
        self._admin: web.AppRunner | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._stopping = False
        self._admin_key = admin_key

    @property
    def config(self) -> Config:
        """What is in force."""
        return self._applier.config

    async def start(self) -> None:
        """Read the drains, write Envoy's files, then listen: Envoy may start when this returns."""
        await asyncio.to_thread(self._run_dir.path.mkdir, parents=True, exist_ok=True)
        await self._applier.start()
        await self.fleet.start()
        await self.kv_feeds.start()
        await self.learner.start()
        await self.prefiller.start()
        self._admin = await self._start_admin()
        scheduler = self.config.scheduler
        transport = GrpcServer if scheduler.transport is Transport.GRPC else LeanServer
        self._server = transport(self.extproc, self._access_log)
        await self._server.start(scheduler.extproc_address, scheduler.extproc_tls)
        self.telemetry.failed_open(await failed_open_requests(scheduler.envoy_admin_port))
        self._ticking = asyncio.create_task(self._tick(), name="tick")
        if self.reloader is not None:
            self.reloader.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no new request, let the running ones end within `grace_s` (`request_timeout_ms`), and go."""
        self._stopping = True
        if self.reloader is not None:
            await self.reloader.stop()
        if grace_s is None:
            grace_s = self.config.scheduler.request_timeout_ms / 1000
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        await self._applier.stop()
        await self.prefiller.stop()
        await self.learner.stop()
        await self.kv_feeds.stop()
        await self.fleet.stop()
        if self._admin is not None:
            await self._admin.cleanup()

    def reload(self) -> None:
        """Read the configuration file again, soon."""
        if self.reloader is not None and self._ticking is not None and not self._stopping:
            self.reloader.ask()  # earlier there is no need: it is read once more when all have started

    def why_not_ready(self) -> str | None:
        """Why no request can be routed; `None` when one can."""
        if self._server is None or self._stopping:
            return "stopping" if self._stopping else "starting"
        if all(node.drained or node.health is Health.OFFLINE for node in self.router.nodes.values()):
            return "every node is offline or drained"
        return None

    async def _start_admin(self) -> web.AppRunner:
        context = AdminContext(
            config=lambda: self.config,
            router=self.router,
            admission=self.admission,
            telemetry=self.telemetry,
            drains=self._drains,
            admin_key=self._admin_key,
            ready=self.why_not_ready,
            on_drain_change=self._applier.drains_changed,
            drain_lock=self._applier.lock,
            reloader=self.reloader,
            config_errors=self.reloader.errors if self.reloader else [],
        )
        scheduler = self.config.scheduler
        return await start_admin(
            make_app(context), scheduler.admin_host, scheduler.admin_port, self._run_dir.admin_socket
        )

    def _node_changed(self, node: Node) -> None:
        now_s = time.monotonic()
        self.router.health_changed(node, now_s)
        self.admission.freed(now_s)

    def _node_reported(self, node: Node) -> None:
        self.router.reported(node)
        if self.admission.waiting:
            self.admission.freed(time.monotonic())

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.telemetry.loop_lag(max(0.0, loop.time() - due_s))
            if self.admission.waiting:  # the reports that hold them back may have grown old meanwhile
                self.admission.freed(time.monotonic())
