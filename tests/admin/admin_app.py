"""A real fleet and the context of its admin app, for the tests."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient

from admin.app import AdminContext
from extproc.config import Config
from extproc.drains import DrainStore
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing.admission import Admission
from extproc.routing.node import Node
from extproc.routing.router import Router
from extproc.telemetry import Telemetry

KEY = "correct horse battery staple"
LLAMA = "meta-llama/Llama-3-8B-Instruct"
CONFIG = {
    "scheduler": {"max_body_bytes": 3 << 20},
    "nodes": [
        {
            "id": "node-a100-01",
            "hardware": "a100-80g",
            "backend": "vllm",
            "endpoint": "http://127.0.0.1:8001",
            "models": [LLAMA, "shared"],
        },
        {
            "id": "node-rtx-01",
            "hardware": "rtx-4090",
            "backend": "tgi",
            "endpoint": "http://127.0.0.1:8002",
            "models": ["shared", "only-rtx"],
            "model_aliases": {"small": "only-rtx"},
            "weight": 0.5,
        },
    ],
    "batching": {"max_batch_size": 1},
}


class App:
    """A running admin app. `routes` holds the drained nodes of each time that Envoy's routes were written."""

    client: TestClient[Any, Any]

    def __init__(self, drains: Path) -> None:
        self.now_s = 1000.0
        self.obstacle: str | None = None
        self.routes: list[set[str]] = []
        self.before_routes: Callable[[], Awaitable[None]] | None = None
        config = Config.model_validate(CONFIG)
        router = Router(
            (Node(node, node.profile) for node in config.nodes), cap=config.batching.max_batch_size
        )
        admission = Admission(router, max_waiting=10, max_waiting_bytes=1 << 20)
        self.context = AdminContext(
            config=lambda: config,
            router=router,
            admission=admission,
            telemetry=Telemetry(router, admission, self.clock),
            drains=DrainStore(drains),
            admin_key=KEY,
            ready=lambda: self.obstacle,
            on_drain_change=self._write_routes,
            clock=self.clock,
        )

    def clock(self) -> float:
        return self.now_s

    @property
    def nodes(self) -> dict[str, Node]:
        return self.context.router.nodes

    def request(self, model: str) -> RoutingRequest:
        return parse(Api.CHAT_COMPLETIONS, b'{"model": "%s", "messages": []}' % model.encode())

    async def drain(self, node_id: str) -> ClientResponse:
        return await self._post(f"/admin/nodes/{node_id}/drain")

    async def restore(self, node_id: str) -> ClientResponse:
        return await self._post(f"/admin/nodes/{node_id}/restore")

    async def _post(self, path: str) -> ClientResponse:
        return await self.client.post(path, headers={"X-Inferact-Admin-Key": KEY})

    async def _write_routes(self) -> None:
        drained = {node.id for node in self.nodes.values() if node.drained}
        if self.before_routes is not None:
            await self.before_routes()
        self.routes.append(drained)
