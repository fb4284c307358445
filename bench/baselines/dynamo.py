"""NVIDIA Dynamo's KV router.

    cost = 1.0 * prefill blocks + decode blocks, least wins
    prefill blocks = (tokens whose prefill is queued on the node + this prompt's uncached tokens) / block
    decode blocks = blocks of all requests in flight on the node, this one included, shared ones once

Constants are its defaults: overlap_score_weight 1.0, router_temperature 0 (no sampling; equals at random),
output blocks not tracked. Both terms are in blocks, so the block size cancels: here it is a unit.
"""

from collections import Counter
from collections.abc import Sequence

from bench.baselines.baseline import PrefixBaseline, Sent
from extproc.simulator.replay.picking import NodeInfo
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceRequest

OVERLAP_SCORE_WEIGHT = 1.0


class Dynamo(PrefixBaseline):
    """Dynamo's default worker selector."""

    def __init__(self, nodes: Sequence[NodeInfo], seed: int) -> None:
        super().__init__(nodes, seed)
        self._active: list[Counter[int]] = [Counter() for _ in nodes]  # units of requests in flight

    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """The least cost."""
        return self.least(able, lambda node: self._cost_blocks(request, node))

    def on_sent(self, sent: Sent) -> None:
        """Its blocks are in use."""
        super().on_sent(sent)
        self._active[sent.node].update(sent.request.units)

    def on_finished(self, sent: Sent, now_s: float) -> None:
        """Its blocks are free, but for those that others use."""
        super().on_finished(sent, now_s)
        active = self._active[sent.node]
        for unit in sent.request.units:
            active[unit] -= 1
            if not active[unit]:
                del active[unit]

    def _cost_blocks(self, request: TraceRequest, node: int) -> float:
        prefill = (self.queued_tokens[node] + self.uncached_tokens(request, node)) / UNIT_TOKENS
        active = self._active[node]
        decode = len(active) + sum(unit not in active for unit in request.units)
        return OVERLAP_SCORE_WEIGHT * prefill + decode
