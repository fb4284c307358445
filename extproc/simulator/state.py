"""All that one simulated engine holds."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from aiohttp import web

from extproc.hardware import model_shape
from extproc.simulator import roofline
from extproc.simulator.batch import Batch
from extproc.simulator.blocks import BlockCache
from extproc.simulator.faults import Faults
from extproc.simulator.journal import Stats
from extproc.simulator.kvevents import KvPublisher
from extproc.simulator.options import SimulatorOptions
from extproc.simulator.runtime import Runtime
from extproc.simulator.tokens import SimulatedText

_STORED_RESPONSES = 1000


class Engine:
    """The parts of a simulated engine, and its end."""

    def __init__(self, options: SimulatorOptions) -> None:
        self.options = options
        self.started_at = time.time()
        self.faults = Faults(options.faults, options.seed)
        self.kv = _publisher(options)
        cache = BlockCache(options.blocks, self.kv.removed if self.kv else None)
        self.batch = Batch(cache, self._step_s, options.max_num_seqs, watcher=self.kv)
        self.runtime = Runtime(self.batch, options.speed)
        self.stats = Stats(self.batch)
        self.finish_reasons: Counter[str] = Counter()
        self.text = SimulatedText(options.name)
        self.on_death: Callable[[], object] = lambda: None
        """Called when a fault has killed the engine and its process should go."""
        self._shape = model_shape(options.models[0])
        self._responses: OrderedDict[str, bytes] = OrderedDict()

    def _step_s(self, load: roofline.StepLoad) -> float:
        seconds = self.options.token_interval_s
        if seconds is None:
            seconds = roofline.step_s(self.options.hardware, self._shape, load)
        return seconds * self.faults.slowdown()

    def die(self, delay_s: float) -> None:
        """Fail everything in flight and to come; in `delay_s` real seconds the process goes too."""
        if not self.runtime.dead:
            self.runtime.die()
            asyncio.get_running_loop().call_later(delay_s, self.on_death)

    def store_response(self, response_id: str, tokens: bytes) -> None:
        """Remember a conversation for `previous_response_id`."""
        self._responses[response_id] = tokens
        if len(self._responses) > _STORED_RESPONSES:
            self._responses.popitem(last=False)

    def stored_response(self, response_id: str) -> bytes | None:
        """The conversation that ended with this response, if this engine made it."""
        return self._responses.get(response_id)


def _publisher(options: SimulatorOptions) -> KvPublisher | None:
    if options.kv_events is None:
        return None
    return KvPublisher(options.kv_events, options.kv_replay, options.kv_topic)


ENGINE = web.AppKey("engine", Engine)
