"""Lets the scheduled faults happen, and writes them into the timeline."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from chaos_nodes import ChaosNode
from chaos_routers import RestartableEnvoy, ServiceProcess
from chaos_schedule import Event, Kind
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


@dataclass(slots=True)
class Faults:
    """Hands on the nodes, the service and Envoy; `say` tells people what happens."""

    nodes: Mapping[str, ChaosNode]
    service: ServiceProcess
    envoy: RestartableEnvoy
    timeline: Timeline
    say: Callable[[str], None]
    _routers: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the service or Envoy is away: the next fault of theirs waits, as a stop may take its time."""

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
                await (self._drain(event) if event.node else self._restart(event))

    @contextlib.contextmanager
    def _holds(self, event: Event) -> Iterator[None]:
        where = f" {event.node}" if event.node else ""
        self.say(f"{event.kind}{where} for {event.lasts_s:.1f} s")
        with self.timeline.during(event.kind, event.node):
            yield

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

    async def _restart(self, event: Event) -> None:
        if event.kind is Kind.FREEZE_SERVICE:
            with self._holds(event):
                self.service.send(signal.SIGSTOP)
                await asyncio.sleep(event.lasts_s)
                self.service.send(signal.SIGCONT)
            return
        number, away = self._away(event.kind)
        with self._holds(event):
            await asyncio.gather(*(one.end(number) for one in away))
            await asyncio.sleep(event.lasts_s)
            await asyncio.gather(*(one.start() for one in away))

    def _away(self, kind: Kind) -> tuple[signal.Signals, list[ServiceProcess | RestartableEnvoy]]:
        """Who is ended, and by which signal."""
        match kind:
            case Kind.KILL_SERVICE:
                return signal.SIGKILL, [self.service]
            case Kind.STOP_SERVICE:
                return signal.SIGTERM, [self.service]
            case Kind.KILL_ENVOY:
                return signal.SIGKILL, [self.envoy]
            case Kind.STOP_ENVOY:
                return signal.SIGTERM, [self.envoy]
            case _:
                return signal.SIGKILL, [self.service, self.envoy]
