"""What the replay tests share: requests, engines with tidy numbers, a picker that does as it is told."""

from collections.abc import Callable, Sequence

from extproc.config import Backend, NodeConfig
from extproc.hardware import Hardware, HardwareProfile, model_shape
from extproc.simulator.replay.engine import Engine
from extproc.simulator.replay.fleet import Fleet
from extproc.simulator.replay.picking import NodeInfo, NodeMetrics
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceRequest

SHAPE = model_shape("8B")
CARD = HardwareProfile(memory_bandwidth_gbps=1000, compute_tflops=100, vram_gb=80, nvlink=False)


def request(
    number: int,
    prompt_tokens: int = 1000,
    output_tokens: int = 10,
    arrival_s: float = 0.0,
    units: Sequence[int] | None = None,
) -> TraceRequest:
    """A request whose units are its own unless given."""
    if units is None:
        units = range(1000 * number, 1000 * number - prompt_tokens // -UNIT_TOKENS)
    return TraceRequest(arrival_s, prompt_tokens, output_tokens, tuple(units), number)


def sharing(number: int, *units: int, output_tokens: int = 10, arrival_s: float = 0.0) -> TraceRequest:
    """A request whose prompt is made of these units."""
    return request(number, len(units) * UNIT_TOKENS, output_tokens, arrival_s, units)


def node_config(node_id: str, hardware: Hardware = Hardware.A100_80G, **values: object) -> NodeConfig:
    """A node that serves `8B`, where the values do not say otherwise."""
    usual = {"backend": Backend.VLLM, "endpoint": "http://10.0.0.1", "models": ("8B",)}
    return NodeConfig.model_validate({"id": node_id, "hardware": hardware, **usual, **values})


def nodes(count: int, kv_capacity_tokens: int = 400_000, name: str = "n") -> list[NodeInfo]:
    """Nodes of one kind."""
    configs = [node_config(f"{name}{i}") for i in range(count)]
    return [NodeInfo(config, config.profile, SHAPE, kv_capacity_tokens) for config in configs]


def fleet(count: int, profile: HardwareProfile = CARD, kv_capacity_tokens: int = 400_000) -> Fleet:
    """Engines without hidden factors."""
    return Fleet(
        [Engine(profile, SHAPE, kv_capacity_tokens) for _ in range(count)], nodes(count, kv_capacity_tokens)
    )


class Told:
    """Sends each request where `where` says, and keeps what it hears. Nobody waits."""

    def __init__(self, where: Callable[[TraceRequest], int] = lambda request: 0) -> None:
        self.where = where
        self.picks: list[tuple[int, float]] = []
        self.first_tokens: dict[int, float] = {}
        self.ends: dict[int, tuple[float, int]] = {}
        self.reports: list[tuple[int, NodeMetrics]] = []

    def pick(self, request: TraceRequest, now_s: float) -> int:
        self.picks.append((request.id, now_s))
        return self.where(request)

    def released(self) -> list[tuple[int, int]]:
        return []

    def first_token(self, request_id: int, now_s: float) -> None:
        self.first_tokens[request_id] = now_s

    def finished(self, request_id: int, now_s: float, cached_tokens: int) -> None:
        self.ends[request_id] = (now_s, cached_tokens)

    def report(self, node: int, metrics: NodeMetrics) -> None:
        self.reports.append((node, metrics))
