"""Runs the batch model against real time, on one task."""

import asyncio
import math
import time
from collections.abc import Iterable

from extproc.simulator.batch import Batch, Generation

# Work done before the loop gets its turn, about 10 ms of it.
_SLICE = 20_000


class EngineDeadError(Exception):
    """The engine's core is gone: nothing more will be generated."""


class Runtime:
    """Lets handlers wait for tokens of a batch that runs `speed` simulated seconds a real second."""

    def __init__(self, batch: Batch, speed: float) -> None:
        self.dead = False
        self._batch = batch
        self._speed = speed
        self._instant = math.isinf(speed)
        self._lost_s = 0.0
        self._work_came = asyncio.Event()
        self._token_waiters: dict[Generation, asyncio.Future[None]] = {}
        self._end_waiters: dict[Generation, asyncio.Future[None]] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            ends_at_s = self._batch.next_at_s
            if ends_at_s is None:
                self._work_came.clear()
                await self._work_came.wait()
                continue
            await asyncio.sleep(0 if self._instant else (ends_at_s - self._now_s()) / self._speed)
            self._advance()

    def submit(self, generation: Generation) -> None:
        """Queue a generation. Raises EngineDeadError."""
        if self.dead:
            raise EngineDeadError
        self._batch.submit(generation, 0.0 if self._instant else self._now_s())
        self._work_came.set()

    def abort(self, generation: Generation) -> None:
        """Drop a generation and whoever waits for it; harmless if it has ended."""
        self._batch.abort(generation)
        self._token_waiters.pop(generation, None)
        self._end_waiters.pop(generation, None)

    async def more_tokens(self, generations: Iterable[Generation]) -> None:
        """Wait until one of the generations gets tokens or ends. Raises EngineDeadError."""
        if self.dead:
            raise EngineDeadError
        woken = asyncio.get_running_loop().create_future()
        self._token_waiters.update(dict.fromkeys(generations, woken))
        await woken

    async def end(self, generation: Generation) -> None:
        """Wait until the generation ends. Raises EngineDeadError."""
        if generation.ended:
            return
        if self.dead:
            raise EngineDeadError
        ended = self._end_waiters[generation] = asyncio.get_running_loop().create_future()
        await ended

    def die(self) -> None:
        """Fail everything in flight and to come."""
        self.dead = True
        for waiter in {*self._token_waiters.values(), *self._end_waiters.values()}:
            if not waiter.done():
                waiter.set_exception(EngineDeadError())

    def _now_s(self) -> float:
        return math.inf if self._instant else time.monotonic() * self._speed - self._lost_s

    def _advance(self) -> None:
        now_s = self._now_s()
        moved = self._batch.advance(now_s, max_work=_SLICE)
        ends_at_s = self._batch.next_at_s
        if ends_at_s is not None and ends_at_s < now_s and not self._instant:
            # This machine cannot keep the pace asked for: simulated time runs slower rather than ever later.
            self._lost_s += now_s - ends_at_s
        for generation in moved:
            _wake(self._token_waiters.pop(generation, None))
            if generation.ended:
                _wake(self._end_waiters.pop(generation, None))


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
