"""`make chaos`: many clients through a real Envoy, while nodes, the service and Envoy fail as a seed has it.

What clients may see meanwhile is said in `chaos_ledger`. The simulated nodes and the clients live in this
process, the service and Envoy in processes of their own. Where the machine keeps this process from running,
the nodes stand still: that counts as a fault of theirs (`stall`), and the ledger tells how often it was so.
"""

import argparse
import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop
from chaos_clients import Clients
from chaos_faults import Faults
from chaos_ledger import Ledger, Remains
from chaos_nodes import ChaosNode
from chaos_routers import (
    REQUEST_TIMEOUT_S,
    Crashes,
    RestartableEnvoy,
    ServiceProcess,
    held_ports,
    write_configuration,
)
from chaos_schedule import Kind, NodePlan, plan_asks, plan_events
from chaos_timeline import Span, Timeline

from extproc.config import load_config
from extproc.routing.node import Health

LLAMA, QWEN, MISTRAL = (
    "meta-llama/Llama-3-8B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.3",
)
FLEET = (
    NodePlan("n1", (LLAMA, MISTRAL)),
    NodePlan("n2", (LLAMA, MISTRAL)),
    NodePlan("n3", (LLAMA, QWEN)),
    NodePlan("n4", (QWEN, LLAMA)),
    NodePlan("n5", (QWEN, MISTRAL)),
    NodePlan("n6", (MISTRAL, QWEN)),
)
"""Each model on four nodes, of which two may fail: a request and its two fallbacks reach one that is well.
No two models share more than two nodes: where one has none left, the others go on."""

_PROGRESS_EVERY_S = 10.0
_LAG_EVERY_S = 0.05
_STALL_S = 0.8
"""From here on a probe of the nodes' health may come too late."""
_SETTLE_LIMIT_S = REQUEST_TIMEOUT_S + 15.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How long, with which seed, with how many clients."""

    seconds: float
    seed: int
    clients: int


class Run:
    """One run, and what is in it."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.ledger = Ledger(FLEET, Timeline(lambda: time.monotonic() - self._began_s))
        self._settings = settings
        self._say = say
        self._began_s = time.monotonic()
        self._longest_lag_s = 0.0

    async def run(self, folder: Path) -> Ledger:
        """Start everything, let it happen, and wait until it is quiet again."""
        clock, crashes = self.ledger.timeline.clock, Crashes()
        async with contextlib.AsyncExitStack() as at_end:
            ports = iter(at_end.enter_context(held_ports(3 + len(FLEET))))
            own_ports = [next(ports), next(ports), next(ports)]
            nodes = {
                plan.id: ChaosNode(plan, port, self.ledger.arrivals.append, clock)
                for plan, port in zip(FLEET, ports, strict=True)
            }
            file = write_configuration(folder, own_ports, FLEET, [node.url for node in nodes.values()])
            config = load_config(file)
            session = await at_end.enter_async_context(aiohttp.ClientSession())
            for node in nodes.values():
                await node.start()
                at_end.push_async_callback(node.kill)
            service, envoy = ServiceProcess(file, config, session, crashes), RestartableEnvoy(config, crashes)
            await service.start()
            at_end.push_async_callback(service.end, signal.SIGKILL)
            await envoy.start()
            at_end.push_async_callback(envoy.end, signal.SIGTERM)
            await _quiet(service)
            before = service.footprint()
            faults = Faults(nodes, service, envoy, self.ledger.timeline, self._tell)
            await self._load(f"http://127.0.0.1:{config.scheduler.port}", faults)
            remains = await _quiet(service)
            remains.in_engines = {node.id: node.unended() for node in nodes.values()}
            remains.before, remains.after = before, service.footprint()
            remains.crashes = crashes
            self.ledger.remains = remains
        return self.ledger

    async def _load(self, url: str, faults: Faults) -> None:
        settings, timeline = self._settings, self.ledger.timeline
        models = sorted({model for node in FLEET for model in node.models})
        plans = [plan_asks(settings.seed, n, settings.seconds, models) for n in range(settings.clients)]
        clients = Clients(url, settings.seed, timeline.clock, self.ledger.exchanges.append)
        self._began_s = time.monotonic()
        async with asyncio.TaskGroup() as around:
            watches = [around.create_task(self._progress(clients)), around.create_task(self._stalls())]
            async with asyncio.TaskGroup() as load:
                load.create_task(faults.run(plan_events(settings.seed, settings.seconds, FLEET)))
                load.create_task(clients.run(plans))
            for watch in watches:
                watch.cancel()

    async def _progress(self, clients: Clients) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            offences = sum(1 for _ in self.ledger.offences())
            self._tell(
                f"{clients.sent} sent, {clients.waiting} in flight, {offences} offences; "
                f"longest lag here {self._longest_lag_s:.2f} s"
            )

    async def _stalls(self) -> None:
        """Note when this process, and with it every node, stood still."""
        timeline = self.ledger.timeline
        while True:
            due_s = timeline.clock() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            lag_s = timeline.clock() - due_s
            self._longest_lag_s = max(self._longest_lag_s, lag_s)
            if lag_s > _STALL_S:
                timeline.faults.append(Span(Kind.STALL, "", due_s, timeline.clock()))

    def _tell(self, what: str) -> None:
        self._say(f"{self.ledger.timeline.clock():7.1f} s  {what}")


async def _quiet(service: ServiceProcess) -> Remains:
    """What is left once all nodes are healthy and nothing is in flight, or after as long as is fair."""
    deadline_s = time.monotonic() + _SETTLE_LIMIT_S
    while True:
        status = await service.status() or {"nodes": [], "queue_depth": 0}
        remains = Remains(
            booked={node["id"]: node["requests_in_flight"] for node in status["nodes"]},
            queued=status["queue_depth"],
            unwell=[node["id"] for node in status["nodes"] if node["status"] != Health.HEALTHY]
            if status["nodes"]
            else ["the service: it does not answer"],
        )
        if time.monotonic() > deadline_s or not (
            remains.unwell or remains.queued or any(remains.booked.values())
        ):
            return remains
        await asyncio.sleep(0.2)


async def run(settings: Settings, say: Callable[[str], None], keep: Path | None = None) -> Ledger:
    """One run; the logs of the service and Envoy stay in `keep`, if that is given."""
    folder = Path(tempfile.mkdtemp(prefix="inferact-chaos-"))
    try:
        return await Run(settings, say).run(folder)
    finally:
        if keep is not None:
            await asyncio.to_thread(_copy_logs, folder, keep)
        shutil.rmtree(folder, ignore_errors=True)


def _copy_logs(folder: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for log in folder.rglob("*.log"):
        shutil.copy(log, to)


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="a folder for the logs of the service and Envoy")
    given = parser.parse_args()
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # nodes that are killed complain
    settings = Settings(given.seconds, given.seed, given.clients)
    ledger = uvloop.run(run(settings, lambda line: print(line, flush=True), given.keep))
    print(f"\n{ledger}\n")
    faults = ledger.faults()
    for fault in faults:
        print(fault)
    print(f"{len(faults)} offences" if faults else "nothing lost")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
