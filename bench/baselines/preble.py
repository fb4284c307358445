"""Preble's global scheduler, E2 (Srivatsa et al., ICLR 2025, arXiv:2407.00023).

    exploit, if more of the prompt is cached on some node than not: of the nodes with the longest match the
        one with the least load; from the most loaded node to the least while it has over 1.5 times its load
    explore, else: the least L + M + P
    L = load: seconds of the prefill sent to the node in the last 3 minutes, and of the answers it now makes
    M = seconds to recompute the prefixes evicted for the request, times the share of requests that used them
    P = seconds of the request's prefill

Constants are those of its code: window 3 minutes, HIGH_LOAD_THRESHOLD 1.5, TPOT the median of the last 200,
0.15 s before the first, answers of 45 tokens until one was seen. Its prefill times are a regression on one
GPU type; here they are the data sheet of each node. Left out: its local scheduler (engines here serve first
come first served) and the copying of a prefix whose TTFT doubles, which needs its own engines.
"""

from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean, median

from bench.baselines.baseline import PrefixBaseline, Sent
from extproc.hardware import prefill_s
from extproc.simulator.replay.picking import NodeInfo
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceRequest

WINDOW_S = 180.0
HIGH_LOAD_THRESHOLD = 1.5
TPOT_KEPT = 200
FIRST_TPOT_S = 0.15
FIRST_OUTPUT_TOKENS = 45


class Window:
    """The requests sent to one node in the last three minutes."""

    def __init__(self) -> None:
        self.prefill_s = 0.0
        self.uses: Counter[int] = Counter()
        self.tpots_s: deque[float] = deque([FIRST_TPOT_S], maxlen=TPOT_KEPT)
        self._requests: deque[tuple[float, float, tuple[int, ...]]] = deque()
        self._tpot_s = FIRST_TPOT_S

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def tpot_s(self) -> float:
        """Seconds a token of an answer, the median of those seen."""
        return self._tpot_s

    def add(self, now_s: float, seconds: float, units: tuple[int, ...]) -> None:
        """A request with so many seconds of prefill was sent."""
        self._requests.append((now_s, seconds, units))
        self.prefill_s += seconds
        self.uses.update(units)

    def expire(self, now_s: float) -> None:
        """Forget the requests that are too old."""
        while self._requests and self._requests[0][0] < now_s - WINDOW_S:
            _, seconds, units = self._requests.popleft()
            self.prefill_s -= seconds
            for unit in units:
                self.uses[unit] -= 1
                if not self.uses[unit]:
                    del self.uses[unit]

    def saw_tpot(self, seconds: float) -> None:
        """An answer took so long a token."""
        self.tpots_s.append(seconds)
        self._tpot_s = median(self.tpots_s)


class Preble(PrefixBaseline):
    """Preble E2."""

    def __init__(self, nodes: Sequence[NodeInfo], seed: int) -> None:
        super().__init__(nodes, seed)
        self._windows = [Window() for _ in nodes]
        self._outputs: deque[int] = deque([FIRST_OUTPUT_TOKENS], maxlen=TPOT_KEPT)
        self._output_tokens = float(FIRST_OUTPUT_TOKENS)
        self._first_tokens_s: dict[int, float] = {}

    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """Exploit a cached prefix where it is worth more than half of the prompt, else explore."""
        for window in self._windows:
            window.expire(now_s)
        matched = {node: self.matched_tokens(request, node) for node in able}
        longest = max(matched.values())
        if longest <= request.prompt_tokens - longest:
            return self.least(able, lambda node: self._explore_s(request, node))
        node = self.least([node for node in able if matched[node] == longest], self._load_s)
        return self._rebalanced(node, able)

    def on_sent(self, sent: Sent) -> None:
        """It counts as load for the next three minutes."""
        seconds = self._prefill_s(sent.request, sent.node)
        super().on_sent(sent)
        self._windows[sent.node].add(sent.sent_s, seconds, sent.request.units)

    def on_first_token(self, sent: Sent, now_s: float) -> None:
        """From here on its answer is decoded."""
        super().on_first_token(sent, now_s)
        self._first_tokens_s[sent.request.id] = now_s

    def on_finished(self, sent: Sent, now_s: float) -> None:
        """Learn the length of answers and the seconds a token."""
        super().on_finished(sent, now_s)
        first_token_s = self._first_tokens_s.pop(sent.request.id, now_s)
        tokens = sent.request.output_tokens
        if tokens > 1 and now_s > first_token_s:
            self._windows[sent.node].saw_tpot((now_s - first_token_s) / (tokens - 1))
            self._outputs.append(tokens)
            self._output_tokens = fmean(self._outputs)

    def _rebalanced(self, node: int, able: Sequence[int]) -> int:
        heaviest = max(able, key=self._load_s)
        lightest = min(able, key=self._load_s)
        uneven = self._load_s(heaviest) > HIGH_LOAD_THRESHOLD * self._load_s(lightest)
        return lightest if node == heaviest and uneven else node

    def _load_s(self, node: int) -> float:
        window = self._windows[node]
        return window.prefill_s + self.in_flight[node] * self._output_tokens * window.tpot_s

    def _explore_s(self, request: TraceRequest, node: int) -> float:
        return self._load_s(node) + self._eviction_s(request, node) + self._prefill_s(request, node)

    def _prefill_s(self, request: TraceRequest, node: int) -> float:
        info, matched = self.nodes[node], self.matched_tokens(request, node)
        return prefill_s(info.profile, info.shape, request.prompt_tokens - matched, matched)

    def _eviction_s(self, request: TraceRequest, node: int) -> float:
        window, info = self._windows[node], self.nodes[node]
        units = -(-self.uncached_tokens(request, node) // UNIT_TOKENS)
        uses = sum(window.uses[unit] for unit in self.index.victims(units, node))
        unit_s = prefill_s(info.profile, info.shape, UNIT_TOKENS)
        return unit_s * uses / max(1, len(window))
