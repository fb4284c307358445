"""What a run of chaos will do: which faults strike when, and which client asks what. Pure, and seeded.

The same seed makes the same schedule. Times are seconds since the start of the load.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, cycle


class Kind(StrEnum):
    """What goes wrong."""

    KILL = "kill"
    """The node's process is killed, and comes back later."""
    DIE = "die"
    """A request kills the engine; the process follows, and comes back later."""
    HANG = "hang"
    """Requests get no answer while the health endpoint says that all is well; then the node is restarted."""
    FREEZE = "freeze"
    """Nothing gets an answer, and streams stand still; then the node is restarted."""
    OUT_OF_MEMORY = "out-of-memory"
    FLAKY = "flaky"
    """Connections are reset, before the answer or in the middle of a stream."""
    BUSY = "busy"
    """429 and 503."""
    SICK = "sick"
    """The health endpoint says 503, requests are served."""
    SLOW = "slow"
    BLIND = "blind"
    """The metrics are slow or garbage."""
    DRAIN = "drain"
    """Drained and restored."""
    DRAIN_AND_CRASH = "drain-and-crash"
    """The service is killed as soon as it has answered a drain."""
    KILL_SERVICE = "kill-service"
    STOP_SERVICE = "stop-service"
    """SIGTERM, which lets running requests end."""
    FREEZE_SERVICE = "freeze-service"
    """SIGSTOP and SIGCONT."""
    KILL_ENVOY = "kill-envoy"
    STOP_ENVOY = "stop-envoy"
    """SIGTERM, on which Envoy cuts what it carries."""
    KILL_BOTH = "kill-both"
    """The service and Envoy at once."""
    STALL = "stall"
    """Not scheduled: the machine kept the simulated nodes from running."""


DEADLY = frozenset({Kind.KILL, Kind.DIE, Kind.HANG, Kind.FREEZE, Kind.OUT_OF_MEMORY, Kind.FLAKY})
"""What may end a stream that has begun."""
UNSOUND = DEADLY | {Kind.BUSY, Kind.SICK, Kind.DRAIN, Kind.DRAIN_AND_CRASH, Kind.STALL}
"""While one of these holds, a node need not answer."""
ENVOY_AWAY = frozenset({Kind.KILL_ENVOY, Kind.STOP_ENVOY})

RECOVERY_S = 5.0
"""How long a node that is well again may stay unused: two probes, and some time for a busy machine."""

_NODE_FAULTS_S = {
    Kind.KILL: (1.0, 6.0),
    Kind.DIE: (2.0, 6.0),
    Kind.HANG: (3.0, 8.0),
    Kind.FREEZE: (3.0, 8.0),
    Kind.OUT_OF_MEMORY: (1.0, 4.0),
    Kind.FLAKY: (1.0, 5.0),
    Kind.BUSY: (1.0, 5.0),
    Kind.SICK: (2.0, 6.0),
    Kind.SLOW: (3.0, 8.0),
    Kind.BLIND: (3.0, 8.0),
    Kind.DRAIN: (1.0, 5.0),
}
"""Shortest and longest duration of what happens to nodes."""
_ROUTER_FAULTS_S = {
    Kind.DRAIN_AND_CRASH: (1.0, 3.0),
    Kind.KILL_SERVICE: (0.2, 3.0),
    Kind.STOP_SERVICE: (0.2, 2.0),
    Kind.FREEZE_SERVICE: (1.0, 5.0),
    Kind.KILL_ENVOY: (0.2, 1.5),
    Kind.STOP_ENVOY: (0.2, 1.5),
    Kind.KILL_BOTH: (0.5, 2.0),
}
"""The same of what happens to the service and Envoy: how long until they are started again."""
_ROUTER_FAULTS = (
    *_ROUTER_FAULTS_S,
    *(Kind.DRAIN_AND_CRASH, Kind.KILL_SERVICE, Kind.STOP_SERVICE, Kind.FREEZE_SERVICE),
)
"""The service fails more often: while Envoy is away, nothing can be learned."""
_NODE_TRACKS = 2
"""Nodes at fault at a time: with its two fallbacks, a request always has one that is well."""
_BLACKOUT_S = (3.0, 5.0)
_BLACKOUT_EVERY_S = 75.0
_BURST_EVERY_S = 15.0
_BURST_RATIO = 0.3


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node of the fleet."""

    id: str
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """A fault; `node` is empty where it is the service or Envoy that fails."""

    at_s: float
    kind: Kind
    lasts_s: float
    node: str = ""

    @property
    def until_s(self) -> float:
        """When it is over by plan; healing takes a moment longer."""
        return self.at_s + self.lasts_s


def plan_events(seed: int, seconds: float, fleet: Sequence[NodePlan]) -> list[Event]:
    """The faults of a run, by time; all are over when it ends.

    Two nodes are at fault at a time, and now and then all nodes of one model.
    """
    blackouts = list(_blackouts(random.Random(f"blackouts {seed}"), seconds, fleet))
    events = list(blackouts)
    for number in range(_NODE_TRACKS):
        rng = random.Random(f"nodes {seed} {number}")
        events += list(_node_track(rng, seconds, fleet, blackouts, events))
    events += _router_track(random.Random(f"routers {seed}"), seconds, fleet, events)
    return sorted(events, key=lambda event: event.at_s)


def _blackouts(rng: random.Random, seconds: float, fleet: Sequence[NodePlan]) -> Iterator[Event]:
    """Kill every node of a model at once."""
    models = sorted(set(chain.from_iterable(node.models for node in fleet)))
    count = round(seconds / _BLACKOUT_EVERY_S)
    for number in range(count):
        at_s = seconds / count * (number + rng.uniform(0.4, 0.7))
        lasts_s, model = rng.uniform(*_BLACKOUT_S), rng.choice(models)
        for node in fleet:
            if model in node.models and at_s + lasts_s < seconds:
                yield Event(at_s, Kind.KILL, lasts_s, node.id)


def _node_track(
    rng: random.Random,
    seconds: float,
    fleet: Sequence[NodePlan],
    blackouts: Sequence[Event],
    others: Sequence[Event],
) -> Iterator[Event]:
    """One node after the other is at fault, never one that is at fault anyway, and none near a blackout."""
    mine: list[Event] = []
    kinds = _shuffled(rng, tuple(_NODE_FAULTS_S))
    at_s = rng.uniform(1.0, 3.0)
    while True:
        kind = next(kinds)
        lasts_s = rng.uniform(*_NODE_FAULTS_S[kind])
        ends_s = at_s + lasts_s
        if ends_s > seconds:
            return
        if late := [event.until_s for event in blackouts if _near(event, at_s, ends_s)]:
            at_s = max(late) + RECOVERY_S + rng.uniform(0.1, 1.0)
            continue
        free = _free(fleet, [*others, *mine], at_s, ends_s)
        if not free:
            at_s += 1.0
            continue
        mine.append(Event(at_s, kind, lasts_s, rng.choice(free)))
        yield mine[-1]
        at_s = ends_s + rng.uniform(0.5, 4.0)


def _router_track(
    rng: random.Random, seconds: float, fleet: Sequence[NodePlan], others: Sequence[Event]
) -> Iterator[Event]:
    """The service and Envoy fail in turns."""
    kinds = _shuffled(rng, _ROUTER_FAULTS)
    at_s = rng.uniform(2.0, 5.0)
    while True:
        kind = next(kinds)
        lasts_s = rng.uniform(*_ROUTER_FAULTS_S[kind])
        if at_s + lasts_s > seconds:
            return
        node = ""
        if kind is Kind.DRAIN_AND_CRASH:
            free = _free(fleet, others, at_s, at_s + lasts_s)
            if not free:
                continue
            node = rng.choice(free)
        yield Event(at_s, kind, lasts_s, node)
        at_s += lasts_s + rng.uniform(4.0, 10.0)


def _shuffled(rng: random.Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    """All of them, in some order, before the first comes again."""
    while True:
        yield from rng.sample(kinds, len(kinds))


def _free(fleet: Sequence[NodePlan], events: Sequence[Event], from_s: float, until_s: float) -> list[str]:
    taken = {event.node for event in events if _near(event, from_s, until_s)}
    return [node.id for node in fleet if node.id not in taken]


def _near(event: Event, from_s: float, until_s: float) -> bool:
    return event.at_s - RECOVERY_S < until_s and from_s < event.until_s + RECOVERY_S


class Api(StrEnum):
    """Where a request goes."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request that a client will make; `document` is what its prompt is taken from."""

    id: str
    at_s: float
    api: Api
    model: str
    document: int
    prompt_bytes: int
    max_tokens: int
    stream: bool
    include_usage: bool
    priority: int | None
    leaves_after_s: float | None
    """When the client loses patience; `None`: it waits for the end."""


DOCUMENTS = 64
SHORTEST_BYTES = 1_000
LONGEST_BYTES = 1_000_000
_SIZES = ((0.80, 4_000), (0.16, 32_000), (0.035, 256_000), (0.005, LONGEST_BYTES))
"""Shares of prompts, and the most bytes of each: a third of what the nodes can do on a quiet machine."""
_OUTPUT_TOKENS = ((1, 4), (5, 30), (60, 150))
_THINK_S = 5.0


def plan_bursts(seed: int, seconds: float) -> list[float]:
    """When many clients ask at once."""
    rng = random.Random(f"bursts {seed}")
    slots = int(seconds / _BURST_EVERY_S)
    return [_BURST_EVERY_S * (slot + rng.random()) for slot in range(slots)]


def plan_asks(seed: int, client: int, seconds: float, models: Sequence[str]) -> list[Ask]:
    """What a client asks, by time. It may come to some later than planned: it waits for each answer."""
    rng = random.Random(f"client {seed} {client}")
    times = [at_s for at_s in plan_bursts(seed, seconds) if rng.random() < _BURST_RATIO]
    at_s = rng.uniform(0.0, _THINK_S)
    while at_s < seconds:
        times.append(at_s)
        at_s += rng.expovariate(1 / _THINK_S)
    names = cycle(rng.sample(models, len(models)))
    return [
        _ask(rng, f"chaos-{seed}-{client}-{number}", at_s, next(names))
        for number, at_s in enumerate(sorted(times))
    ]


def _ask(rng: random.Random, request_id: str, at_s: float, model: str) -> Ask:
    most = rng.choices([size for _, size in _SIZES], [share for share, _ in _SIZES])[0]
    least = max((size for _, size in _SIZES if size < most), default=SHORTEST_BYTES)
    return Ask(
        id=request_id,
        at_s=at_s,
        api=rng.choices(list(Api), (0.7, 0.3))[0],
        model=model,
        document=rng.randrange(DOCUMENTS),
        prompt_bytes=rng.randint(least, most),
        max_tokens=rng.choices((rng.randint(1, 4), rng.randint(5, 30), rng.randint(60, 120)), (30, 60, 10))[
            0
        ],
        stream=rng.random() < 0.5,
        include_usage=rng.random() < 0.5,
        priority=rng.choice((None, None, None, 0, 5, 10)),
        leaves_after_s=rng.uniform(0.001, 1.5) if rng.random() < 0.1 else None,
    )
