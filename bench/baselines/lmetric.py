"""LMetric (Zhang et al., 2026, arXiv:2603.15202): the least product of prefill and batch.

    score = P-token * BS
    P-token = prompt tokens not in the node's cache
    BS = requests in flight on the node, this one included

The abstract counts the request's own new tokens; the pseudocode (figure 17) adds those queued on the node.
Both forms are here. There are no constants.
"""

from collections.abc import Sequence

from bench.baselines.baseline import PrefixBaseline
from extproc.simulator.replay.traces import TraceRequest


class LMetric(PrefixBaseline):
    """The request's own new prefill tokens times the batch."""

    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """The least product."""
        return self.least(able, lambda node: self._prefill_tokens(request, node) * (self.in_flight[node] + 1))

    def _prefill_tokens(self, request: TraceRequest, node: int) -> int:
        return self.uncached_tokens(request, node)


class LMetricQueued(LMetric):
    """The same with the prefill tokens that are queued on the node already."""

    def _prefill_tokens(self, request: TraceRequest, node: int) -> int:
        return self.queued_tokens[node] + self.uncached_tokens(request, node)
