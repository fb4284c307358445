"""The service and Envoy of a run: processes that can be killed, stopped, frozen and started again."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from chaos_ledger import Footprint
from chaos_schedule import NodePlan

from extproc import headers
from extproc.config import Config
from extproc.launch.child import ending
from extproc.launch.envoyprocess import STOP_LIMIT_S, EnvoyProcess

REQUEST_TIMEOUT_S = 30.0
_MOST_ON_A_NODE = 32
_ADMIN_KEY = "a-key-for-chaos"
_ASK_EVERY_S = 0.1
_START_LIMIT_S = 30.0
_CALL_LIMIT_S = 3.0
_INSIST_LIMIT_S = 2 * REQUEST_TIMEOUT_S
"""More than the service is away for: a stop takes up to `request_timeout_ms`."""


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports for this run alone: nobody else is given one while its owner here is dead.

    A bound socket that does not listen keeps a port: others may listen there only by its number.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in sockets]


def write_configuration(
    folder: Path, ports: Sequence[int], fleet: Iterable[NodePlan], urls: Iterable[str]
) -> Path:
    """The configuration file of a fleet; `ports` are the public one, the admin app's and Envoy's admin's."""
    port, admin_port, envoy_admin_port = ports
    scheduler = {
        "host": "127.0.0.1",
        "port": port,
        "admin_port": admin_port,
        "envoy_admin_port": envoy_admin_port,
        "run_dir": str(folder / "run"),
        "request_timeout_ms": int(REQUEST_TIMEOUT_S * 1000),
    }
    nodes = [
        {
            "id": node.id,
            "hardware": "a100-80g",
            "backend": "vllm",
            "endpoint": url,
            "models": list(node.models),
        }
        for node, url in zip(fleet, urls, strict=True)
    ]
    file = folder / "inferact.yaml"
    batching = {"max_batch_size": _MOST_ON_A_NODE}
    file.write_text(yaml.safe_dump({"scheduler": scheduler, "nodes": nodes, "batching": batching}))
    return file


class Crashes(list[str]):
    """Processes that ended though nobody had told them to."""

    def look_at(self, name: str, process: Process) -> None:
        """Note it if the process, which should be alive, is not."""
        if process.returncode is not None:
            self.append(f"{name} ended by itself: {ending(process.returncode)}")


class ServiceProcess:
    """The service, through all its lives, and its admin app."""

    def __init__(self, file: Path, config: Config, session: aiohttp.ClientSession, crashes: Crashes) -> None:
        self.log = file.parent / "service.log"
        self._file = file
        self._url = f"http://127.0.0.1:{config.scheduler.admin_port}"
        self._session = session
        self._crashes = crashes
        self._process: Process | None = None

    async def start(self) -> None:
        """Begin a life, and wait until it answers. Raises `TimeoutError`."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "extproc.cli", "serve", "-c", str(self._file)),
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us
                env=os.environ | {"INFERACT_ADMIN_KEY": _ADMIN_KEY},
            )
        async with asyncio.timeout(_START_LIMIT_S):
            while await self._called("GET", "/healthz") is None:  # noqa: ASYNC110
                await asyncio.sleep(_ASK_EVERY_S)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._crashes.look_at("the service", self._process)
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def end(self, number: signal.Signals) -> None:
        """Send a signal that ends it, and wait for that; past all patience, kill it."""
        assert self._process is not None
        self._crashes.look_at("the service", self._process)
        await _end(self._process, number, REQUEST_TIMEOUT_S + _CALL_LIMIT_S)

    async def status(self) -> Any:
        """What `/status` says; `None` while it does not answer."""
        return await self._called("GET", "/status")

    async def drain(self, node: str) -> None:
        """Drain a node; repeated until it is answered. Raises `TimeoutError`."""
        await self._insist(f"/admin/nodes/{node}/drain")

    async def restore(self, node: str) -> None:
        """Restore a node; repeated until it is answered. Raises `TimeoutError`."""
        await self._insist(f"/admin/nodes/{node}/restore")

    def footprint(self) -> Footprint:
        """What it holds now; nothing if it is dead, which is noted."""
        assert self._process is not None
        self._crashes.look_at("the service", self._process)
        if self._process.returncode is not None:
            return Footprint(0, 0)
        proc = Path(f"/proc/{self._process.pid}")
        pages = int((proc / "statm").read_text().split()[1])
        return Footprint(pages * os.sysconf("SC_PAGE_SIZE"), sum(1 for _ in (proc / "fd").iterdir()))

    async def _insist(self, path: str) -> None:
        async with asyncio.timeout(_INSIST_LIMIT_S):
            while await self._called("POST", path) is None:  # noqa: ASYNC110
                await asyncio.sleep(_ASK_EVERY_S)

    async def _called(self, method: str, path: str) -> Any:
        """The JSON that it answers; `None` if it is away."""
        key = {headers.ADMIN_KEY: _ADMIN_KEY}
        timeout = aiohttp.ClientTimeout(total=_CALL_LIMIT_S)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.request(
                method, self._url + path, headers=key, timeout=timeout
            ) as answer:
                answer.raise_for_status()
                return await answer.json(content_type=None)
        return None


class RestartableEnvoy:
    """Envoy, through all its lives."""

    def __init__(self, config: Config, crashes: Crashes) -> None:
        self._envoy = EnvoyProcess(config, concurrency=1)
        self._crashes = crashes

    async def start(self) -> None:
        """Begin a life, and wait until it serves. Raises `EnvoyError`."""
        await self._envoy.start()

    async def end(self, number: signal.Signals) -> None:
        """Send a signal that ends it, and wait for that."""
        assert self._envoy.process is not None
        self._crashes.look_at("Envoy", self._envoy.process)
        await _end(self._envoy.process, number, STOP_LIMIT_S)


async def _end(process: Process, number: signal.Signals, limit_s: float) -> None:
    if process.returncode is not None:
        return
    process.send_signal(number)
    try:
        await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            process.kill()
        await process.wait()
