"""SGLang's router with its policy `cache_aware`.

    imbalanced (max - min > 64 and max > 1.5 min, requests in flight): fewest in flight
    else matched / prompt > 0.3: a worker with the longest match
    else: the worker with the smallest tree

Constants are the defaults of its command line and Python bindings (sgl-router: cache_threshold 0.3,
balance_abs_threshold 64, balance_rel_threshold 1.5). One tree for all workers: a node of it lists the
workers whose requests went through, and of several the first found is taken, as in the original. The tree
may hold 2^26 characters a worker before leaves are evicted (max_tree_size): some 16 million tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence

from bench.baselines.baseline import Baseline, Sent
from extproc.simulator.replay.picking import NodeInfo
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceRequest

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
MAX_TREE_UNITS = (1 << 26) // 4 // UNIT_TOKENS


class CacheAware(Baseline):
    """SGLang `cache_aware`."""

    def __init__(self, nodes: Sequence[NodeInfo], seed: int) -> None:
        super().__init__(nodes, seed)
        self._workers: dict[int, dict[int, None]] = {}  # unit -> its workers, first seen first
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in nodes]  # least recent first

    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """Balance where loads are far apart, else follow the tree."""
        loads = [self.in_flight[node] for node in able]
        if (
            max(loads) - min(loads) > BALANCE_ABS_THRESHOLD
            and max(loads) > min(loads) * BALANCE_REL_THRESHOLD
        ):
            return self.least(able, lambda node: self.in_flight[node])
        tokens, worker = self._longest_match(request)
        if tokens / request.prompt_tokens > CACHE_THRESHOLD and worker in able:
            return worker
        return min(able, key=lambda node: len(self._trees[node]))

    def on_sent(self, sent: Sent) -> None:
        """The prompt goes into the tree whichever rule decided."""
        tree = self._trees[sent.node]
        for unit in reversed(sent.request.units):
            tree[unit] = None
            tree.move_to_end(unit)
            self._workers.setdefault(unit, {})[sent.node] = None
        while len(tree) > MAX_TREE_UNITS:
            unit, _ = tree.popitem(last=False)
            del self._workers[unit][sent.node]

    def _longest_match(self, request: TraceRequest) -> tuple[int, int]:
        """Tokens of the prompt that the tree knows, and the first worker of their last unit; -1 for none."""
        matched, worker = 0, -1
        for unit in request.units:
            workers = self._workers.get(unit)
            if not workers:
                break
            matched += UNIT_TOKENS
            worker = next(iter(workers))
        return min(matched, request.prompt_tokens), worker
