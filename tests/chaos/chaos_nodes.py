"""The simulated nodes of a run: each keeps a journal, and can be frozen, killed and started again."""

import asyncio
from collections.abc import Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Handler
from chaos_ledger import Arrival
from chaos_schedule import NodePlan

from extproc.simulator.engine import RunningSimulator, make_app, serve
from extproc.simulator.faults import Fault
from extproc.simulator.options import SimulatorOptions

TOKEN_INTERVAL_S = 0.03
"""Slow enough that hundreds of streams are no work for the machine."""
_KV_BLOCKS = 60_000
_CONTEXT_TOKENS = 400_000
_PORT_LIMIT_S = 20.0


class ChaosNode:
    """One simulated node at one port, through all its lives."""

    def __init__(
        self, plan: NodePlan, port: int, arrived: Callable[[Arrival], None], clock: Callable[[], float]
    ):
        self.id = plan.id
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._arrived = arrived
        self._clock = clock
        self._options = SimulatorOptions(
            name=plan.id,
            models=plan.models,
            token_interval_s=TOKEN_INTERVAL_S,
            num_blocks=_KV_BLOCKS,
            max_model_len=_CONTEXT_TOKENS,
        )
        self._lives: list[RunningSimulator] = []
        self._frozen = False

    async def start(self) -> None:
        """Begin a life."""
        self._frozen = False
        app = make_app(self._options)
        app.middlewares.append(self._journal)
        self._lives.append(await self._serve(app))

    async def _serve(self, app: web.Application) -> RunningSimulator:
        """Listen; while nobody did, some connection of another process may have got the port."""
        async with asyncio.timeout(_PORT_LIMIT_S):
            while True:
                try:
                    return await serve(app, "127.0.0.1", self._port)
                except OSError:
                    await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """End this life at once, if it has not ended already."""
        await self._lives[-1].kill()

    async def restart(self) -> None:
        """Kill, and begin another life."""
        await self.kill()
        await self.start()

    def freeze(self) -> None:
        """Answer nothing any more, in this life."""
        self._frozen = True

    def arm(self, faults: Iterable[Fault]) -> None:
        """Let something go wrong."""
        self._lives[-1].faults.arm(faults)

    def heal(self) -> None:
        """Let nothing go wrong any more."""
        self._lives[-1].faults.clear()

    def unended(self) -> int:
        """Requests that came, in any life, and have not ended."""
        stats = [life.stats for life in self._lives]
        arrived = sum(sum(one.attempts.values()) for one in stats)
        return arrived - sum(sum(one.outcomes.values()) for one in stats)

    @web.middleware
    async def _journal(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST":
            self._arrived(Arrival(self.id, request.headers["x-request-id"], self._clock()))
        if self._frozen:
            await asyncio.Event().wait()
        return await handler(request)
