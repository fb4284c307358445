"""What `GET /status` says: the keys of the API reference in their order, then our own."""

import msgspec

from admin.context import AdminContext
from extproc import __version__
from extproc.config import Backend, CachePolicy, Role
from extproc.hardware import Hardware
from extproc.routing.node import Health, Node
from extproc.routing.split import Split
from extproc.telemetry import KnowledgeLevel


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node now; `None` where nobody knows, or where the engine's report is too old.

    `role` is `both` where requests are not split, and where it differs from model to model.
    `engine_running` and `queue_depth` count what runs and waits inside the engine, whoever sent it, as of
    its report, `report_age_s` ago.
    """

    id: str
    hardware: Hardware
    backend: Backend
    status: Health
    kv_cache_used_pct: float | None
    requests_in_flight: int
    requests_total: int
    p99_latency_ms: int | None
    drained: bool
    models: list[str]
    weight: float
    queue_depth: int | None
    prefix_hit_ratio: float | None
    knowledge_level: KnowledgeLevel
    last_error: str | None
    engine_running: int | None
    report_age_s: float | None
    role: Role


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes in the order of the configuration, and the service itself.

    `queue_depth` counts the requests that wait for a node.
    """

    scheduler_version: str
    uptime_seconds: int
    nodes: list[NodeStatus]
    total_requests_routed: int
    policy: CachePolicy
    queue_depth: int
    config_errors: list[str]


def fleet_status(context: AdminContext) -> FleetStatus:
    """The fleet as of now; may run in a thread beside the event loop."""
    now_s, split = context.clock(), context.router.split
    return FleetStatus(
        scheduler_version=__version__,
        uptime_seconds=int(now_s - context.started_s),
        nodes=[node_status(node, now_s, split) for node in list(context.router.nodes.values())],
        total_requests_routed=context.telemetry.requests_routed,
        policy=context.router.policy.in_force,
        queue_depth=context.admission.waiting,
        config_errors=context.config_errors,
    )


def node_status(node: Node, now_s: float, split: Split | None) -> NodeStatus:
    """One node as of `now_s` (the router's clock)."""
    role = None if split is None else split.role_of(node)
    report = node.fresh_report(now_s)
    kv_used_ratio = report.kv_used_ratio if report else None
    p99_s = node.p99_latency_s()
    return NodeStatus(
        id=node.id,
        hardware=node.config.hardware,
        backend=node.config.backend,
        status=node.health,
        kv_cache_used_pct=None if kv_used_ratio is None else round(kv_used_ratio * 100, 1),
        requests_in_flight=node.in_flight,
        requests_total=node.requests_total,
        p99_latency_ms=None if p99_s is None else round(p99_s * 1000),
        drained=node.drained,
        models=sorted(node.config.serves),
        weight=node.config.weight,
        queue_depth=report.waiting if report else None,
        prefix_hit_ratio=node.hit_ratio(now_s),
        knowledge_level=KnowledgeLevel.of(node, now_s),
        last_error=node.last_error,
        engine_running=report.running if report else None,
        report_age_s=round(now_s - report.at_s, 3) if report else None,
        role=role or Role.BOTH,
    )
