"""Lets the scheduled faults happen, and writes them into the timeline."""

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

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

    async def run(self, events: Iterable[Event]) -> None:
        """Let all happen as planned; returns when all is healed."""
        async with asyncio.TaskGroup() as faults:
            for event in events:
                faults.create_task(self._happen(event))

    async def _happen(self, event: Event) -> None:
        await asyncio.sleep(max(0.0, event.at_s - self.timeline.clock()))
        where = f" {event.node}" if event.node else ""
        self.say(f"{event.kind}{where} for {event.lasts_s:.1f} s")
        with self.timeline.during(event.kind, event.node):
            if event.kind in _ARMED:
                await self._arm(event)
            elif event.node:
                await self._take_away(event)
            else:
                await self._restart(event)

    async def _arm(self, event: Event) -> None:
        node = self.nodes[event.node]
        node.arm(_ARMED[event.kind])
        if event.kind is Kind.FREEZE:
            node.freeze()
        await asyncio.sleep(event.lasts_s)
        if event.kind in _RESTARTED:
            await node.restart()
        else:
            node.heal()

    async def _take_away(self, event: Event) -> None:
        """Kill a node, or drain it."""
        node = self.nodes[event.node]
        if event.kind is Kind.KILL:
            await node.kill()
            await asyncio.sleep(event.lasts_s)
            await node.start()
            return
        await self.service.drain(node.id)
        with self.timeline.while_drained(node.id):
            if event.kind is Kind.DRAIN_AND_CRASH:
                await self.service.end(signal.SIGKILL)
            await asyncio.sleep(event.lasts_s)
            if event.kind is Kind.DRAIN_AND_CRASH:
                await self.service.start()
        await self.service.restore(node.id)

    async def _restart(self, event: Event) -> None:
        match event.kind:
            case Kind.FREEZE_SERVICE:
                self.service.send(signal.SIGSTOP)
                await asyncio.sleep(event.lasts_s)
                self.service.send(signal.SIGCONT)
            case Kind.KILL_SERVICE | Kind.STOP_SERVICE:
                await self.service.end(_signal(event))
                await asyncio.sleep(event.lasts_s)
                await self.service.start()
            case Kind.KILL_ENVOY | Kind.STOP_ENVOY:
                await self.envoy.end(_signal(event))
                await asyncio.sleep(event.lasts_s)
                await self.envoy.start()
            case _:
                await asyncio.gather(self.service.end(signal.SIGKILL), self.envoy.end(signal.SIGKILL))
                await asyncio.sleep(event.lasts_s)
                await asyncio.gather(self.service.start(), self.envoy.start())


def _signal(event: Event) -> signal.Signals:
    kills = event.kind in (Kind.KILL_SERVICE, Kind.KILL_ENVOY)
    return signal.SIGKILL if kills else signal.SIGTERM
