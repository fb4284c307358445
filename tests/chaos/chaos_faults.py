"""Lets the scheduled faults happen, and writes them into the timeline."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from chaos_nodes import ChaosNode
from chaos_routers import RestartableEnvoy, ServiceProcess
from chaos_schedule import ENVOY_AWAY, Event, Kind
from chaos_timeline import Timeline

from extproc.simulator.faults import Fault, FaultKind

_ARMED = {
    Kind.DIE: (Fault(FaultKind.DIE, count=1),),
    Kind.HANG: (Fault(FaultKind.HANG),),
    Kind.FREEZE: (Fault(FaultKind.SLOW, factor=1e6),),
    Kind.OUT_OF_MEMORY: (
        Fault(FaultKind.ERROR_MID_STREAM, probability=0.3, after_chunks=3),
        Fault(FaultKind.OUT_OF_MEMORY, probability=0.5),
        Fault(FaultKind.OUT_OF_MEMORY_TGI, probability=0.5),
    ),
    Kind.FLAKY: (
        Fault(FaultKind.RESET_MID_STREAM, probability=0.3, after_chunks=3),
        Fault(FaultKind.RESET, probability=0.5),
    ),
    Kind.BUSY: (Fault(FaultKind.ERROR_503, probability=0.4), Fault(FaultKind.ERROR_429, probability=0.4)),
    Kind.SICK: (Fault(FaultKind.HEALTH_DOWN),),
    Kind.SLOW: (Fault(FaultKind.SLOW, factor=4.0),),
    Kind.BLIND: (
        Fault(FaultKind.METRICS_GARBAGE, probability=0.5),
        Fault(FaultKind.METRICS_SLOW, delay_s=6.0),
    ),
}
_RESTARTED = (Kind.DIE, Kind.HANG, Kind.FREEZE)
"""What ends with a restart of the node."""

_SIGNALS = {
    Kind.KILL_SERVICE: signal.SIGKILL,
    Kind.STOP_SERVICE: signal.SIGTERM,
    Kind.KILL_ENVOY: signal.SIGKILL,
    Kind.STOP_ENVOY: signal.SIGTERM,
}


@dataclass(slots=True)
class Faults:
    """Hands on the nodes, the service and Envoy; `say` tells people what happens."""

    nodes: Mapping[str, ChaosNode]
    service: ServiceProcess
    envoy: RestartableEnvoy
    timeline: Timeline
    say: Callable[[str], None]
    _routers: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the service or Envoy is away: their next fault waits, as a stop may take its time."""

    async def run(self, events: Iterable[Event]) -> None:
        """Let all happen as planned; returns when all is healed."""
        async with asyncio.TaskGroup() as faults:
            for event in events:
                faults.create_task(self._happen(event))

    async def _happen(self, event: Event) -> None:
        await asyncio.sleep(max(0.0, event.at_s - self.timeline.clock()))
        if event.kind in _ARMED:
            await self._arm(event)
        elif event.kind is Kind.KILL:
            await self._kill(event)
        elif event.kind is Kind.DRAIN:
            await self._drain(event)
        else:
            async with self._routers:
                await self._happen_to_routers(event)

    async def _happen_to_routers(self, event: Event) -> None:
        if event.kind is Kind.DRAIN_AND_CRASH:
            await self._drain(event)
        elif event.kind is Kind.FREEZE_SERVICE:
            await self._freeze(event)
        else:
            await self._restart(event)

    @contextlib.contextmanager
    def _holds(self, event: Event) -> Iterator[None]:
        self._announce(event)
        with self.timeline.during(event.kind, event.node):
            yield

    def _announce(self, event: Event) -> None:
        where = f" {event.node}" if event.node else ""
        self.say(f"{event.kind}{where} for {event.lasts_s:.1f} s")

    async def _arm(self, event: Event) -> None:
        node = self.nodes[event.node]
        with self._holds(event):
            node.arm(_ARMED[event.kind])
            if event.kind is Kind.FREEZE:
                node.freeze()
            await asyncio.sleep(event.lasts_s)
            if event.kind in _RESTARTED:
                await node.restart()
            else:
                node.heal()

    async def _kill(self, event: Event) -> None:
        node = self.nodes[event.node]
        with self._holds(event):
            await node.kill()
            await asyncio.sleep(event.lasts_s)
            await node.start()

    async def _drain(self, event: Event) -> None:
        crash = event.kind is Kind.DRAIN_AND_CRASH
        with self._holds(event):
            await self.service.drain(event.node)
            with self.timeline.while_drained(event.node):
                if crash:
                    await self.service.end(signal.SIGKILL)
                await asyncio.sleep(event.lasts_s)
                if crash:
                    await self.service.start()
            await self.service.restore(event.node)

    async def _freeze(self, event: Event) -> None:
        with self._holds(event):
            self.service.send(signal.SIGSTOP)
            await asyncio.sleep(event.lasts_s)
            self.service.send(signal.SIGCONT)

    async def _restart(self, event: Event) -> None:
        self._announce(event)
        both = event.kind is Kind.KILL_BOTH
        kinds = (Kind.KILL_SERVICE, Kind.KILL_ENVOY) if both else (event.kind,)
        await asyncio.gather(*(self._send_away(kind, event.lasts_s) for kind in kinds))

    async def _send_away(self, kind: Kind, lasts_s: float) -> None:
        process = self.envoy if kind in ENVOY_AWAY else self.service
        with self.timeline.during(kind):
            await process.end(_SIGNALS[kind])
            await asyncio.sleep(lasts_s)
            await process.start()
