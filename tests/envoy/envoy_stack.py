"""A real Envoy, the real service and simulated engines, wired as `inferact up` does it."""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extproc.config import load_config
from extproc.fleet import Pace
from extproc.launch.envoyprocess import EnvoyProcess
from extproc.routing.node import Health
from extproc.routing.outcome import Outcome
from extproc.service import Service
from extproc.simulator.engine import RunningSimulator, start
from extproc.simulator.options import SimulatorOptions

ADMIN_KEY = "a-key-for-tests"
TRANSPORT = "INFERACT_TRANSPORT"
"""The variable that names the transport of every stack."""
MODEL = "meta-llama/Llama-3-8B-Instruct"
STREAM = {"model": MODEL, "messages": [{"role": "user", "content": "tell me"}], "stream": True}
"""The body of a chat that is a stream."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass
class Stack:
    """Everything between a client and the engines."""

    folder: Path
    config_file: Path
    service: Service
    envoy: EnvoyProcess
    sims: dict[str, RunningSimulator]
    client: httpx.AsyncClient
    cleanup: list[Callable[[], Any]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._keep_outcomes()

    def _keep_outcomes(self) -> None:
        log = self.service._access_log
        on_outcome = log._on_outcome

        def keep(exchange_id: str, outcome: Outcome) -> None:
            on_outcome(exchange_id, outcome)
            self.outcomes.append(outcome)

        log._on_outcome = keep

    @property
    def url(self) -> str:
        """Envoy's public address."""
        return str(self.client.base_url).rstrip("/")

    async def chat(
        self, text: str = "hello", headers: dict[str, str] | None = None, **members: Any
    ) -> httpx.Response:
        """One chat completion; further members go into the body."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4} | members
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def admin(self, path: str, method: str = "POST") -> httpx.Response:
        """An admin call with the key."""
        return await self.client.request(method, path, headers={"x-inferact-admin-key": ADMIN_KEY})

    async def outcome(self) -> Outcome:
        """What the service was told of the next request that is over."""
        await until(lambda: bool(self.outcomes))
        return self.outcomes.pop(0)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum over the samples of one of the service's metrics that have these labels."""
        families = text_string_to_metric_families((await self.client.get("/metrics")).text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def in_flight(self) -> dict[str, int]:
        """Booked requests a node, as the service counts them."""
        return {node.id: node.in_flight for node in self.service.router.nodes.values()}

    def attempts(self) -> int:
        """Routed requests that arrived at the engines."""
        return sum(sum(sim.stats.attempts.values()) for sim in self.sims.values())

    async def envoy_stat(self, name: str) -> int:
        """A counter or gauge of Envoy's own."""
        admin = f"http://127.0.0.1:{self.service.config.scheduler.envoy_admin_port}"
        answer = await self.client.get(f"{admin}/stats", params={"filter": f"^{name}$", "format": "json"})
        return sum(stat["value"] for stat in answer.json()["stats"] if stat.get("name") == name)

    async def drain(self, node_id: str) -> None:
        """Drain a node: Envoy has the routes without it when this returns."""
        assert (await self.admin(f"/admin/nodes/{node_id}/drain")).status_code == 200

    async def restart_service(self) -> None:
        """Another service process in the place of this one."""
        await self.service.stop(grace_s=0)
        self.service = Service(load_config(self.config_file), ADMIN_KEY, self.config_file)
        self._keep_outcomes()
        await self.service.start()


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait for a condition, or fail."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "not within the limit"
        await asyncio.sleep(0.005)


async def open_stream(stack: Stack, tokens: int) -> asyncio.Task[int]:
    """A stream that is known to have begun; its task gives the number of lines."""
    begun = asyncio.Event()

    async def read() -> int:
        lines = 0
        async with stack.client.stream(
            "POST", "/v1/chat/completions", json=STREAM | {"max_tokens": tokens}
        ) as answer:
            async for _ in answer.aiter_lines():
                begun.set()
                lines += 1
        return lines

    task = asyncio.create_task(read())
    await begun.wait()
    return task


def node_entry(sim_id: str, url: str, **changes: Any) -> dict[str, Any]:
    """A node of the configuration file."""
    return {
        "id": sim_id,
        "hardware": "a100-80g",
        "backend": "vllm",
        "endpoint": url,
        "models": [MODEL],
    } | changes


@contextlib.asynccontextmanager
async def running_stack(
    sims: Sequence[str] | dict[str, dict[str, Any]] = ("a", "b", "c"),
    nodes: dict[str, dict[str, Any]] | None = None,
    speed: float = 1000.0,
    healthy: bool = True,
    pace: Pace | None = None,
    **sections: Any,
) -> AsyncIterator[Stack]:
    """Start simulators, service and Envoy, and wait until the nodes are healthy, or at least were probed.

    `sims` names them, or gives each its simulator options; `nodes` changes a node's configuration; `pace` is
    that of probes and scrapes; `sections` are added to the configuration file.
    """
    options = sims if isinstance(sims, dict) else {name: {} for name in sims}
    async with contextlib.AsyncExitStack() as stack:
        running: dict[str, RunningSimulator] = {}
        for name, extra in options.items():
            made = SimulatorOptions(
                **{"name": name, "models": (MODEL,), "speed": speed, "record": True} | extra
            )
            running[name] = await start(made, "127.0.0.1", 0)
            stack.push_async_callback(running[name].stop)
        entries = [node_entry(name, sim.url, **(nodes or {}).get(name, {})) for name, sim in running.items()]
        whole = await stack.enter_async_context(stack_over(entries, healthy, pace, **sections))
        whole.sims = running
        yield whole


@contextlib.asynccontextmanager
async def stack_over(
    entries: Sequence[dict[str, Any]], healthy: bool = True, pace: Pace | None = None, **sections: Any
) -> AsyncIterator[Stack]:
    """Start service and Envoy over the nodes of these entries; the rest as `running_stack`."""
    folder = Path(tempfile.mkdtemp(prefix="inferact-"))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        port, admin_port, envoy_admin_port = free_ports(3)
        scheduler = {
            "host": "127.0.0.1",
            "port": port,
            "admin_port": admin_port,
            "envoy_admin_port": envoy_admin_port,
            "run_dir": str(folder / "run"),
            "transport": os.environ.get(TRANSPORT, "grpc"),
        } | sections.pop("scheduler", {})
        config_file = folder / "inferact.yaml"
        config_file.write_text(yaml.safe_dump({"scheduler": scheduler, "nodes": list(entries), **sections}))
        config = load_config(config_file)
        service = Service(config, ADMIN_KEY, config_file)
        service.fleet._pace = pace or service.fleet._pace
        await service.start()
        envoy = EnvoyProcess(config, concurrency=1)
        await envoy.start()
        stack.push_async_callback(envoy.stop)
        limits = httpx.Limits(max_connections=200)
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False, limits=limits
        )
        await stack.enter_async_context(client)
        whole = Stack(folder, config_file, service, envoy, {}, client)
        try:
            await service.fleet.first_probes(5.0)
            if healthy:
                await until(
                    lambda: all(node.health is Health.HEALTHY for node in service.router.nodes.values())
                )
            yield whole
        finally:
            await envoy.stop()
            await whole.service.stop(grace_s=0)


async def serve_apart(stack: Stack) -> asyncio.subprocess.Process:
    """The service in a process of its own, in the place of the one in this process."""
    await stack.service.stop(grace_s=0)
    log = (stack.folder / "serve.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc.cli", "serve", "-c", str(stack.config_file)),
        stdout=log,
        stderr=log,
        env=os.environ | {"INFERACT_ADMIN_KEY": ADMIN_KEY},
    )
    for _ in range(500):
        answer = await stack.client.get("/readyz")
        if answer.status_code == 200:
            return process
        await asyncio.sleep(0.02)
    raise AssertionError((stack.folder / "serve.log").read_text())
