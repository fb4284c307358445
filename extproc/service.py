"""The service: every part made, wired, started and stopped in order."""

import asyncio
import contextlib
import logging
import time

import grpc
from aiohttp import web

from admin.app import AdminContext, make_app, start_admin
from extproc.accesslog import AccessLog
from extproc.config import Batching, BatchStrategy, Config, ListenerTls
from extproc.drains import DrainStore
from extproc.envoyconfig.files import write_all, write_routes
from extproc.envoyconfig.told import await_routes, failed_open_requests
from extproc.exchange import Limits
from extproc.fleet import Fleet
from extproc.kvfeeds import KvFeeds
from extproc.learner import Learner
from extproc.routing.admission import Admission, Batches
from extproc.routing.node import Health, Node
from extproc.routing.router import Router
from extproc.rundir import RunDir
from extproc.server import ExtProc, GrpcServer
from extproc.telemetry import Telemetry

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""How often the event loop's lag is measured, and the queue looked at."""


class Service:
    """The scheduler process. `start`, then `stop`; raises `BindError` and `OSError` on the way up."""

    def __init__(self, config: Config, admin_key: str | None) -> None:
        self.config = config
        self.run_dir = RunDir(config.scheduler.run_dir)
        self.router = Router(
            (Node(config=node, profile=node.profile) for node in config.nodes),
            cap=config.batching.max_batch_size,
            cache=config.kv_cache,
        )
        scheduler = config.scheduler
        self.admission = Admission(
            self.router, scheduler.max_queue, scheduler.max_queue_bytes, _batches(config.batching)
        )
        self.telemetry = Telemetry(self.router, self.admission)
        limits = Limits(scheduler.request_timeout_ms / 1000, scheduler.max_body_bytes)
        nodes = self.router.nodes.values()
        self.kv_feeds = KvFeeds(nodes, self.router.exact)
        self.learner = Learner(nodes, self.router.exact)
        self.extproc = ExtProc(self.admission, self.telemetry, limits, on_routed=self.learner.on_routed)
        self.fleet = Fleet(nodes, on_change=self._node_changed, on_report=self._node_reported)
        self._access_log = AccessLog(
            self.router,
            self.telemetry,
            self.extproc.exchanges,
            self.fleet,
            on_outcome=self.router.receipts.happened,
        )
        self._drains = DrainStore(self.run_dir.drains)
        self._grpc: GrpcServer | None = None
        self._admin: web.AppRunner | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._stopping = False
        self._admin_key = admin_key

    async def start(self) -> None:
        """Read the drains, write Envoy's files, then listen: Envoy may start when this returns."""
        await asyncio.to_thread(self.run_dir.path.mkdir, parents=True, exist_ok=True)
        for node_id in await self._drains.load():
            if node_id in self.router.nodes:
                self.router.nodes[node_id].drained = True
                logger.info("node %s is still drained: inferact restore %s", node_id, node_id)
        await asyncio.to_thread(write_all, self.config, self.run_dir, self._drained())
        self._admin = await self._start_admin()
        self._grpc = GrpcServer(self.extproc, self._access_log)
        await self._grpc.start(
            self.config.scheduler.extproc_address, _credentials(self.config.scheduler.extproc_tls)
        )
        self.telemetry.failed_open(await failed_open_requests(self.config.scheduler.envoy_admin_port))
        await self.fleet.start()
        await self.kv_feeds.start()
        await self.learner.start()
        self._ticking = asyncio.create_task(self._tick(), name="tick")

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no new request, let the running ones end within `grace_s` (`request_timeout_ms`), and go."""
        self._stopping = True
        if grace_s is None:
            grace_s = self.config.scheduler.request_timeout_ms / 1000
        if self._grpc is not None:
            await self._grpc.stop(grace_s)
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        await self.learner.stop()
        await self.kv_feeds.stop()
        await self.fleet.stop()
        if self._admin is not None:
            await self._admin.cleanup()

    def why_not_ready(self) -> str | None:
        """Why no request can be routed; `None` when one can."""
        if self._grpc is None or self._stopping:
            return "stopping" if self._stopping else "starting"
        if all(node.drained or node.health is Health.OFFLINE for node in self.router.nodes.values()):
            return "every node is offline or drained"
        return None

    async def _start_admin(self) -> web.AppRunner:
        context = AdminContext(
            config=self.config,
            router=self.router,
            admission=self.admission,
            telemetry=self.telemetry,
            drains=self._drains,
            admin_key=self._admin_key,
            ready=self.why_not_ready,
            on_drain_change=self._drains_changed,
        )
        scheduler = self.config.scheduler
        return await start_admin(
            make_app(context), scheduler.admin_host, scheduler.admin_port, self.run_dir.admin_socket
        )

    def _drained(self) -> frozenset[str]:
        return frozenset(node.id for node in self.router.nodes.values() if node.drained)

    async def _drains_changed(self) -> None:
        """Drained nodes leave the fail-open routes; restored ones may serve those who wait."""
        self.admission.freed(time.monotonic())
        version = await asyncio.to_thread(write_routes, self.config, self.run_dir, self._drained())
        await await_routes(self.config.scheduler.envoy_admin_port, version)

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


def _batches(batching: Batching) -> Batches | None:
    if batching.strategy is not BatchStrategy.STATIC:
        return None
    assert batching.max_batch_size is not None, "checked with the configuration"
    return Batches(batching.max_batch_size, batching.max_wait_ms / 1000)


def _credentials(tls: ListenerTls | None) -> grpc.ServerCredentials | None:
    """Mutual TLS for Envoys on other machines."""
    if tls is None:
        return None
    pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
    return grpc.ssl_server_credentials([pair], tls.ca_file.read_bytes(), require_client_auth=True)
