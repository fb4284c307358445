"""What the fleet of a configuration would do with a recorded load, under one policy and another."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from extproc.config import CachePolicy, Config, NodeConfig
from extproc.simulator.replay.fleet import make_fleet
from extproc.simulator.replay.loop import replay
from extproc.simulator.replay.report import Summary, summarize
from extproc.simulator.replay.routers import OwnRouter
from extproc.simulator.replay.traces import TraceRequest, shares_prefixes


@dataclass(frozen=True, slots=True)
class Load:
    """Requests for models that the nodes serve; `notes` are sentences on what is not as it was recorded."""

    requests: list[TraceRequest]
    nodes: list[NodeConfig]
    notes: tuple[str, ...]


def load_on(config: Config, requests: Sequence[TraceRequest], model: str | None = None) -> Load:
    """The requests as this fleet gets them, all for `model` if it is given.

    Else each asks for the model that it names; where no node serves that, for the first node's first.
    """
    served = frozenset(config.models)
    usual = model or config.nodes[0].models[0]
    asked = [usual if model or request.model not in served else request.model for request in requests]
    wanted = frozenset(asked)
    nodes = [node for node in config.nodes if node.serves & wanted]
    notes = []
    unknown = Counter(request.model for request in requests if request.model not in served)
    if unknown and not model:
        notes.append(f"{unknown.total()} requests name no model of this fleet: they ask for `{usual}`.")
    if idle := [node.id for node in config.nodes if node not in nodes]:
        notes.append(f"Left out, because nothing asks for their models: {', '.join(idle)}.")
    if not shares_prefixes(requests):
        notes.append(
            "The trace tells of no shared prefixes: caches are never hit, and policies decide alike."
        )
    addressed = [replace(request, model=name) for request, name in zip(requests, asked, strict=True)]
    return Load(addressed, nodes, tuple(notes))


def compare(
    config: Config,
    load: Load,
    policies: Iterable[CachePolicy],
    seed: int,
    watch: Callable[[Sequence[TraceRequest], str], Iterable[TraceRequest]],
) -> list[tuple[str, Summary]]:
    """Replay the load under each policy; `watch` hands requests on and may show how far they are.

    Raises `FleetError` and `NoAnswerError`.
    """
    rows = []
    for policy in policies:
        fleet = make_fleet(load.nodes)
        cache = config.kv_cache.model_copy(update={"policy": policy})
        router = OwnRouter(fleet.nodes, seed, cache, config.batching.max_batch_size, config.scheduler)
        outcome = replay(watch(load.requests, policy.value), fleet, router, seed)
        rows.append((policy.value, summarize(outcome)))
    return rows
