"""Our own router as a picker of replays: the code that serves requests, fed what the service is told."""

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from extproc.config import CachePolicy, KvCache, Scheduler
from extproc.openai.errors import ApiError
from extproc.openai.request import Api, Hints, Prompt, RoutingRequest
from extproc.openai.usage import Usage
from extproc.routing.admission import Admission
from extproc.routing.blocks import PromptBlocks, unit_blocks
from extproc.routing.feedback import learn
from extproc.routing.lane import FIRST_BYTES_PER_TOKEN
from extproc.routing.node import EngineReport, Health, Node
from extproc.routing.outcome import Ended, Outcome
from extproc.routing.router import Decision, Router
from extproc.routing.waiting import Waiter
from extproc.simulator.replay.picking import NodeInfo, NodeMetrics, PickerFactory, RefusedError
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceRequest

_BYTES_PER_TOKEN = int(FIRST_BYTES_PER_TOKEN)
_TOLD_EVERY_S: Final = 1.0
_LOG_FLUSH_S: Final = 0.1
"""How often Envoy's log tells of a stream that runs, and how late."""


class _Asked(RoutingRequest, frozen=True, kw_only=True):
    """A request of which the blocks are known, and no text."""

    blocks: PromptBlocks


_TEMPLATE: Final = _Asked(
    api=Api.COMPLETIONS,
    model="",
    stream=True,
    hints=Hints(),
    max_tokens=None,
    body_bytes=0,
    prompt=Prompt(),
    needs_cut=False,
    members=(),
    blocks=PromptBlocks((), (), 0, 0),
)


class _BlocksRouter(Router):
    """The router, which finds a prompt's blocks in the request."""

    def decide(
        self,
        request: RoutingRequest,
        now_s: float,
        blocks: PromptBlocks | None = None,
        pick: Callable[[Node], bool] | None = None,
    ) -> Decision | None:
        """As in the service."""
        return super().decide(request, now_s, request.blocks if isinstance(request, _Asked) else blocks, pick)


@dataclass(slots=True)
class _Sent:
    """A request on its way."""

    request: TraceRequest
    asked: RoutingRequest
    decision: Decision
    first_token_s: float = 0.0


class OwnRouter:
    """`Admission` and `Router` over the nodes; told of tokens and times when the service is.

    `cap` is the most requests in flight on a node (`batching.max_batch_size`); further ones wait.
    Requests that name no model ask for the first node's first.
    """

    def __init__(
        self,
        nodes: Sequence[NodeInfo],
        seed: int,
        cache: KvCache,
        cap: int | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        limits = scheduler or Scheduler()
        self._nodes = [
            Node(config=info.config, profile=info.profile, health=Health.HEALTHY) for info in nodes
        ]
        self._model = nodes[0].config.models[0]
        self.router = _BlocksRouter(self._nodes, cap, random.Random(f"{seed} picker"), cache)
        self._admission = Admission(self.router, limits.max_queue, limits.max_queue_bytes)
        self._capacities = [info.kv_capacity_tokens for info in nodes]
        self._waiting: dict[int, tuple[TraceRequest, Waiter]] = {}
        self._woken: list[int] = []
        self._sent: dict[int, _Sent] = {}
        self._news: list[tuple[float, int]] = []
        for number in range(len(nodes)):
            self.report(number, NodeMetrics(0.0, 0, 0, 0.0, 0, 0))

    def pick(self, request: TraceRequest, now_s: float) -> int | None:
        """The node of the router's decision, if there is one now."""
        self._hear(now_s)
        total_bytes = request.prompt_tokens * _BYTES_PER_TOKEN
        asked = msgspec.structs.replace(
            _TEMPLATE,
            model=request.model or self._model,
            body_bytes=total_bytes,
            blocks=unit_blocks(request.units, UNIT_TOKENS * _BYTES_PER_TOKEN, total_bytes, 0),
        )
        wake = partial(self._woken.append, request.id)
        try:
            outcome = self._admission.submit(asked, total_bytes, now_s, wake)
        except ApiError as error:
            raise RefusedError from error
        if isinstance(outcome, Waiter):
            self._waiting[request.id] = request, outcome
            return None
        return self._send(request, asked, outcome)

    def released(self) -> list[tuple[int, int]]:
        """Those that the queue let go."""
        woken = self._woken[:]
        self._woken.clear()
        return [(request_id, self._send_waiter(request_id)) for request_id in woken]

    def first_token(self, request_id: int, now_s: float) -> None:
        """The stream has begun; the log tells of it the next time that it tells of the request."""
        sent = self._sent[request_id]
        sent.first_token_s = now_s
        age_s = now_s - sent.request.arrival_s
        told_s = sent.request.arrival_s + (age_s // _TOLD_EVERY_S + 1.0) * _TOLD_EVERY_S + _LOG_FLUSH_S
        heapq.heappush(self._news, (told_s, request_id))

    def _hear(self, now_s: float) -> None:
        """What the log has told until now of streams that run."""
        while self._news and self._news[0][0] <= now_s:
            told_s, request_id = heapq.heappop(self._news)
            if sent := self._sent.get(request_id):
                sent.decision.booking.begun(sent.first_token_s, told_s)

    def finished(self, request_id: int, now_s: float, cached_tokens: int) -> None:
        """The answer is whole, or was refused."""
        self._hear(now_s)
        sent = self._sent.pop(request_id)
        sent.decision.booking.release(now_s)
        if sent.first_token_s:
            outcome, arrival_s = _outcome(sent, now_s, cached_tokens), sent.request.arrival_s
            learn(self.router, sent.decision, sent.asked, outcome, arrival_s, now_s)
        self._admission.freed(now_s)

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
        self._admission.freed(metrics.at_s)

    def _send_waiter(self, request_id: int) -> int:
        request, waiter = self._waiting.pop(request_id)
        assert isinstance(waiter.outcome, Decision), "no node of a replay goes away"
        return self._send(request, waiter.request, waiter.outcome)

    def _send(self, request: TraceRequest, asked: RoutingRequest, decision: Decision) -> int:
        self._sent[request.id] = _Sent(request, asked, decision)
        return decision.node.slot


def _outcome(sent: _Sent, now_s: float, cached_tokens: int) -> Outcome:
    """What the log entry of a whole answer says."""
    request = sent.request
    return Outcome(
        node_id=sent.decision.node.id,
        attempts=1,
        status=200,
        ended=Ended.COMPLETE,
        duration_s=now_s - request.arrival_s,
        ttft_s=sent.first_token_s - request.arrival_s,
        usage=Usage(request.prompt_tokens, request.output_tokens, cached_tokens),
    )


ROUTERS: Mapping[str, PickerFactory] = {
    policy.value: partial(OwnRouter, cache=KvCache(policy=policy)) for policy in CachePolicy
}
"""Our own, by the names of the configuration, with defaults for all else."""
