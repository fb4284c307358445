"""Our own router as a picker of replays: the code that serves requests, fed what the service is told."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from extproc.config import Backend, CachePolicy, KvCache, NodeConfig
from extproc.openai.request import Api, Hints, Prompt, RoutingRequest
from extproc.openai.usage import Usage
from extproc.routing.blocks import unit_blocks
from extproc.routing.feedback import learn
from extproc.routing.lane import FIRST_BYTES_PER_TOKEN
from extproc.routing.node import EngineReport, Health, Node
from extproc.routing.outcome import Ended, Outcome
from extproc.routing.router import Decision, Router
from extproc.simulator.replay.picking import NodeInfo, NodeMetrics, PickerFactory
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceRequest

_MODEL = "8B"
_BYTES_PER_TOKEN = int(FIRST_BYTES_PER_TOKEN)
_REQUEST = RoutingRequest(
    api=Api.COMPLETIONS,
    model=_MODEL,
    stream=True,
    hints=Hints(),
    max_tokens=None,
    body_bytes=0,
    prompt=Prompt(),
    needs_cut=False,
    members=(),
)


@dataclass(slots=True)
class _Sent:
    """A request on its way."""

    request: TraceRequest
    decision: Decision
    first_token_s: float = 0.0


class OwnRouter:
    """`Router` under one cache policy. It hears of tokens and times as the service does: after the end."""

    def __init__(self, policy: CachePolicy, nodes: Sequence[NodeInfo], seed: int) -> None:
        self._nodes = [_node(info) for info in nodes]
        self.router = Router(self._nodes, None, random.Random(f"{seed} picker"), KvCache(policy=policy))
        self._capacities = [info.kv_capacity_tokens for info in nodes]
        self._sent: dict[int, _Sent] = {}
        for number in range(len(nodes)):
            self.report(number, NodeMetrics(0.0, 0, 0, 0.0, 0, 0))

    def pick(self, request: TraceRequest, now_s: float) -> int:
        """The node of the router's decision."""
        total_bytes = request.prompt_tokens * _BYTES_PER_TOKEN
        blocks = unit_blocks(request.units, UNIT_TOKENS * _BYTES_PER_TOKEN, total_bytes, 0)
        decision = self.router.decide(_REQUEST, now_s, blocks)
        assert decision is not None, "without a cap there is always a node"
        self._sent[request.id] = _Sent(request, decision)
        return decision.node.slot

    def first_token(self, request_id: int, now_s: float) -> None:
        """The stream has begun; the log entry that tells of it comes later."""
        self._sent[request_id].first_token_s = now_s

    def finished(self, request_id: int, now_s: float, cached_tokens: int) -> None:
        """The answer is whole, or was refused."""
        sent = self._sent.pop(request_id)
        sent.decision.booking.release(now_s)
        if sent.first_token_s:
            learn(self.router, sent.decision, _REQUEST, _outcome(sent, now_s, cached_tokens), 0.0, now_s)

    def report(self, node: int, metrics: NodeMetrics) -> None:
        """A scrape."""
        report = EngineReport(
            metrics.at_s,
            running=metrics.running,
            waiting=metrics.waiting,
            kv_used_ratio=metrics.kv_used_ratio,
            kv_capacity_tokens=self._capacities[node],
            prefix_queries=metrics.prompt_tokens,
            prefix_hits=metrics.cached_tokens,
        )
        target = self._nodes[node]
        target.take_report(report, ours=target.in_flight)
        self.router.reported(target)


def _outcome(sent: _Sent, now_s: float, cached_tokens: int) -> Outcome:
    """What the log entry of a whole answer says, on a clock on which every request came at 0."""
    return Outcome(
        node_id=sent.decision.node.id,
        attempts=1,
        status=200,
        ended=Ended.COMPLETE,
        duration_s=now_s,
        ttft_s=sent.first_token_s,
        usage=Usage(sent.request.prompt_tokens, sent.request.output_tokens, cached_tokens),
    )


def _node(info: NodeInfo) -> Node:
    config = NodeConfig(
        id=info.name,
        hardware=info.hardware,
        backend=Backend.VLLM,
        endpoint="http://10.0.0.1",
        models=(_MODEL,),
    )
    return Node(config=config, profile=info.profile, health=Health.HEALTHY)


ROUTERS: dict[str, PickerFactory] = {policy.value: partial(OwnRouter, policy) for policy in CachePolicy}
"""Our own, by the names of the configuration."""
