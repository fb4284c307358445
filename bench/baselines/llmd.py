"""llm-d's "sticky until saturated": prefix affinity filter, then the token load scorer.

    sticky = nodes with matched / prompt >= 0.8
    the least wait of the sticky exceeds the least of the others by over 18 s: all nodes, else the sticky
    of these the one with the least uncached tokens in flight, with this request's own on it
    wait = uncached tokens in flight / peak prefill tokens a second

Constants are the defaults of `prefix-cache-affinity-filter` (affinityThreshold 0.8, maxTTFTPenaltyMs 18000,
explorationProbability 0); tokens count as in flight until the first token. Its built-in peak of 15,928
tokens/s is for a 32B model on two H100; its recipe says to measure one's own: one unloaded chunk of 8,192
tokens, for which the data sheet of each node stands here.
"""

from collections.abc import Sequence

from bench.baselines.baseline import PrefixBaseline
from extproc.hardware import prefill_s
from extproc.simulator.replay.picking import NodeInfo
from extproc.simulator.replay.traces import TraceRequest

AFFINITY_THRESHOLD = 0.8
MAX_TTFT_PENALTY_S = 18.0
CALIBRATION_TOKENS = 8192


class StickyUntilSaturated(PrefixBaseline):
    """llm-d's optimized baseline."""

    def __init__(self, nodes: Sequence[NodeInfo], seed: int) -> None:
        super().__init__(nodes, seed)
        self._peaks = [
            CALIBRATION_TOKENS / prefill_s(node.profile, node.shape, CALIBRATION_TOKENS) for node in nodes
        ]

    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """Stay with the prefix until that costs too long a wait."""
        matched = {node: self.matched_tokens(request, node) for node in able}
        enough = AFFINITY_THRESHOLD * request.prompt_tokens
        sticky = [node for node in able if matched[node] >= enough]
        others = [node for node in able if matched[node] < enough]
        if sticky and others and self._wait_s(sticky) - self._wait_s(others) > MAX_TTFT_PENALTY_S:
            sticky = []
        return self.least(sticky or able, lambda node: self.queued_tokens[node] - matched[node])

    def _wait_s(self, nodes: Sequence[int]) -> float:
        return min(self.queued_tokens[node] / self._peaks[node] for node in nodes)
