"""A fleet under any load, in simulated time: real queue and router before engines that batch as vLLM."""

import heapq
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from extproc.config import Backend, NodeConfig
from extproc.hardware import PROFILES, Hardware, model_shape
from extproc.openai.errors import ApiError
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing.admission import Admission
from extproc.routing.node import EngineReport, Health, Node
from extproc.routing.router import Decision, Router
from extproc.routing.waiting import Waiter
from extproc.simulator.batch import Batch, Generation
from extproc.simulator.blocks import BlockCache
from extproc.simulator.roofline import step_s

NODES = 4
SLOTS = 16
"""Requests that an engine runs at once."""
TIMEOUT_S = 30.0
"""`request_timeout_ms`: no answer is a stream."""
SHARES = {10: 0.1, 5: 0.4, 0: 0.5}
"""Of the requests, by priority."""

_MODEL = "simulated-8b"
_PROMPT_TOKENS = 400
_OUTPUT_TOKENS = 100
_CARD = PROFILES[Hardware.A100_80G]
_SCRAPE_S = 1.0


@dataclass(slots=True, eq=False)
class Client:
    """A request and what became of it; a time is inf until it comes."""

    priority: int
    generation: Generation
    arrived_s: float
    left_queue_s: float = math.inf
    ended_s: float = math.inf
    is_served: bool = False
    """Whether the whole answer came in time."""
    waiter: Waiter | None = None
    decision: Decision | None = None

    @property
    def wait_s(self) -> float:
        """How long it was in the queue."""
        return self.left_queue_s - self.arrived_s


@dataclass(slots=True, repr=False)
class Outcome:
    """What a run brought."""

    seconds: float
    clients: list[Client]
    engine_waiting: list[int] = field(default_factory=list)
    """Requests that an engine could not start, whenever a step began."""

    @property
    def throughput(self) -> float:
        """Whole answers a second."""
        return sum(one.is_served and one.ended_s <= self.seconds for one in self.clients) / self.seconds

    def of(self, priority: int) -> list[Client]:
        """The clients of a priority."""
        return [client for client in self.clients if client.priority == priority]

    def wait_s(self, priority: int, pct: int) -> float:
        """Percentile (nearest rank) of the time in the queue, of those too whose time ran out there."""
        waits_s = sorted(client.wait_s for client in self.of(priority))
        return waits_s[(pct * len(waits_s) - 1) // 100]


class Overload:
    """One run. `cap` is `max_batch_size`; `reports`: whether the engines' metrics are scraped."""

    def __init__(self, cap: int | None, reports: bool, seed: int) -> None:
        self.now_s = 0.0
        self.outcome = Outcome(0.0, [])
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._nodes = [make_node(number) for number in range(NODES)]
        self._engines = [_engine() for _ in self._nodes]
        self._running: dict[Generation, Client] = {}
        self.admission = Admission(Router(self._nodes, cap, random.Random(seed)), 10_000, 1 << 30)
        if reports:
            for number in range(NODES):
                self._at(self._rng.uniform(0.0, _SCRAPE_S), partial(self._scrape, number))

    def run(self, rate: float, seconds: float, shares: dict[int, float] | None = None) -> Outcome:
        """Let `rate` requests a second come for so long."""
        shares = shares or SHARES
        at_s = 0.0
        while (at_s := at_s + self._rng.expovariate(rate)) < seconds:
            (priority,) = self._rng.choices(list(shares), list(shares.values()))
            self._at(at_s, partial(self._arrive, priority))
        while self._events and self._events[0][0] <= seconds:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
        for client in self.outcome.clients:
            client.left_queue_s = min(client.left_queue_s, seconds)
        self.outcome.seconds = seconds
        return self.outcome

    def _at(self, at_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), happens))

    def _arrive(self, priority: int) -> None:
        request = request_of(priority, len(self.outcome.clients))
        output = 1 + round(min(self._rng.expovariate(1 / _OUTPUT_TOKENS), 8 * _OUTPUT_TOKENS))
        client = Client(priority, Generation(_PROMPT_TOKENS, output, []), self.now_s)
        self.outcome.clients.append(client)
        wake = partial(self._release, client)
        outcome = self.admission.submit(request, request.body_bytes, self.now_s, wake)
        self._at(self.now_s + TIMEOUT_S, partial(self._cut, client))
        if isinstance(outcome, Decision):
            self._send(client, outcome)
        else:
            client.waiter = outcome
            longest_s = self.admission.patience.longest_s(_MODEL, TIMEOUT_S)
            self._at(self.now_s + longest_s, partial(self._give_up, client))

    def _release(self, client: Client) -> None:
        assert client.waiter is not None
        outcome = client.waiter.outcome
        if isinstance(outcome, ApiError):
            raise outcome
        assert outcome is not None
        self._send(client, outcome)

    def _send(self, client: Client, decision: Decision) -> None:
        client.decision, client.left_queue_s = decision, self.now_s
        self._running[client.generation] = client
        self._engines[decision.node.slot].submit(client.generation, self.now_s)
        self._await_step(decision.node.slot)

    def _give_up(self, client: Client) -> None:
        assert client.waiter is not None
        if client.waiter.outcome is None:
            client.left_queue_s = client.ended_s = self.now_s
            self.admission.leave(client.waiter)

    def _cut(self, client: Client) -> None:
        if client.decision is not None and not client.generation.ended:
            self._engines[client.decision.node.slot].abort(client.generation)
            self._end(client)
            self.admission.freed(self.now_s)

    def _end(self, client: Client) -> None:
        assert client.decision is not None
        del self._running[client.generation]
        client.ended_s = self.now_s
        client.decision.booking.release(self.now_s)
        if client.is_served:
            self.admission.patience.answered(_MODEL, self.now_s - client.left_queue_s)

    def _await_step(self, number: int) -> None:
        due_s = self._engines[number].next_at_s
        if due_s is not None:
            self._at(due_s, partial(self._step, number, due_s))

    def _step(self, number: int, due_s: float) -> None:
        engine = self._engines[number]
        if engine.next_at_s != due_s:
            return
        ended = [generation for generation in engine.advance(self.now_s) if generation.ended]
        self.outcome.engine_waiting.append(len(engine.waiting))
        self._await_step(number)
        for generation in ended:
            client = self._running[generation]
            client.is_served = True
            self._end(client)
        if ended:
            self.admission.freed(self.now_s)

    def _scrape(self, number: int) -> None:
        node, engine = self._nodes[number], self._engines[number]
        report = EngineReport(
            self.now_s,
            running=len(engine.running),
            waiting=len(engine.waiting),
            kv_used_ratio=engine.cache.used_ratio,
        )
        node.take_report(report, ours=node.in_flight)
        self.admission.router.reported(node)
        self.admission.freed(self.now_s)
        self._at(self.now_s + _SCRAPE_S, partial(self._scrape, number))


def capacity() -> float:
    """Whole answers a second of the fleet when every slot is taken."""
    seconds = 20.0
    run = Overload(cap=SLOTS, reports=False, seed=0)
    served = [one.ended_s for one in run.run(30.0 * NODES, seconds).clients if one.is_served]
    return sum(seconds / 4 < ended_s for ended_s in served) / (seconds * 3 / 4)


def request_of(priority: int, number: int) -> RoutingRequest:
    """A request whose prompt is its own."""
    text = f"{number:08}".ljust(_PROMPT_TOKENS * 4, "x")
    hints = {"priority": priority}
    return parse(Api.COMPLETIONS, json.dumps({"model": _MODEL, "prompt": text, "x-inferact": hints}).encode())


def make_node(number: int) -> Node:
    """A healthy node."""
    config = NodeConfig(
        id=f"node-{number}",
        hardware=Hardware.A100_80G,
        backend=Backend.VLLM,
        endpoint="http://10.0.0.1:8000",
        models=(_MODEL,),
    )
    return Node(config=config, profile=config.profile, health=Health.HEALTHY)


def _engine() -> Batch:
    shape = model_shape(_MODEL)
    return Batch(BlockCache(20_000), partial(step_s, _CARD, shape), max_num_seqs=SLOTS)
