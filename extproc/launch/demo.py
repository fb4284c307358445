"""The fleet of `inferact up --demo`: three simulated nodes, and the configuration that names them."""

import asyncio
import contextlib
import logging
import socket
import sys
from asyncio.subprocess import Process
from dataclasses import dataclass
from pathlib import Path
from string import Template

from extproc.hardware import Hardware
from extproc.launch.child import end, ending, spawn

logger = logging.getLogger(__name__)

MODEL = "meta-llama/Llama-3-8B-Instruct"
OTHER_MODEL = "Qwen/Qwen2.5-7B-Instruct"
_START_LIMIT_S = 15.0
_STOP_LIMIT_S = 3.0
_ASK_EVERY_S = 0.05

_HEAD = Template("""\
# Written by `inferact up --demo`. Copy it, point the endpoints at your engines, and it is yours.
scheduler:
  host: 127.0.0.1
  port: $port
  admin_port: $admin_port
  envoy_admin_port: $envoy_admin_port
  run_dir: .
nodes:
""")
_NODE = Template("""\
  - id: $id
    hardware: $hardware
    backend: vllm
    endpoint: http://127.0.0.1:$port
    models: [$models]
""")


@dataclass(frozen=True, slots=True)
class DemoNode:
    """A node of the demo; the first model gives the size."""

    id: str
    hardware: Hardware
    models: tuple[str, ...]
    port: int

    @property
    def command(self) -> tuple[str, ...]:
        """The simulated engine as a process."""
        models = [option for model in self.models for option in ("--model", model)]
        where = ("--port", str(self.port), "--name", self.id, "--hardware", self.hardware)
        return (sys.executable, "-m", "extproc.cli", "sim", *where, *models)


def demo_folder(port: int) -> Path:
    """Where the demo at a port keeps its files, under the current folder."""
    return (Path(".inferact") / f"demo-{port}").absolute()


def demo_nodes() -> tuple[DemoNode, ...]:
    """Three nodes on free ports."""
    a100, h100, rtx4090 = _free_ports(3)
    return (
        DemoNode("node-a100-01", Hardware.A100_80G, (MODEL, OTHER_MODEL), a100),
        DemoNode("node-h100-01", Hardware.H100_80G, (MODEL, OTHER_MODEL), h100),
        DemoNode("node-rtx-01", Hardware.RTX_4090, (MODEL,), rtx4090),
    )


def write_configuration(folder: Path, nodes: tuple[DemoNode, ...], port: int) -> Path:
    """Write the demo's configuration into a folder, which is also its `run_dir`. Raises `OSError`.

    Envoy listens on `port`, the admin app on the next one, Envoy's own admin 901 above.
    """
    text = _HEAD.substitute(port=port, admin_port=port + 1, envoy_admin_port=port + 901)
    for node in nodes:
        models = ", ".join(node.models)
        text += _NODE.substitute(id=node.id, hardware=node.hardware, port=node.port, models=models)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "inferact.yaml"
    path.write_text(text, encoding="utf-8")
    return path


class DemoFleet:
    """The simulated nodes as processes; the output of each is in `NODE.log`."""

    def __init__(self, nodes: tuple[DemoNode, ...], folder: Path) -> None:
        self._nodes = nodes
        self._folder = folder
        self._processes: list[Process] = []
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start every node, and wait until they listen, or for as long as is fair. Raises `OSError`."""
        for node in self._nodes:
            log = self._folder / f"{node.id}.log"
            process = await spawn(*node.command, stdout=log, stderr=log)
            self._processes.append(process)
            self._watches.append(asyncio.create_task(_watch(node.id, process, log)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_LIMIT_S):
                await asyncio.gather(*(_listens(node.port) for node in self._nodes))

    async def stop(self) -> None:
        """End every node; harmless when repeated."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*(end(process, _STOP_LIMIT_S) for process in self._processes))


async def _watch(node_id: str, process: Process, log: Path) -> None:
    """Say when a node dies: the others take its requests."""
    how = ending(await process.wait())
    logger.warning("the demo's %s ended (%s); the others take over. Its log: %s", node_id, how, log)


async def _listens(port: int) -> None:
    """Return once somebody answers on the port."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(_ASK_EVERY_S)
        else:
            writer.close()
            return


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
