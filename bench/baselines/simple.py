"""The four that know nothing of prompts, or only where they begin."""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

from bench.baselines.baseline import Baseline
from extproc.simulator.replay.picking import NodeInfo
from extproc.simulator.replay.traces import TraceRequest

RING_POINTS = 160
"""Points of each node on the ring, as in libketama (40 digests of 4 points)."""


class RandomPick(Baseline):
    """Any node."""

    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """Every node is as likely as any other."""
        return self.rng.choice(able)


class RoundRobin(Baseline):
    """One node after the other."""

    _last = -1

    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """The next node after the last one picked."""
        self._last = able[bisect_left(able, self._last + 1) % len(able)]
        return self._last


class LeastLoaded(Baseline):
    """The node with the fewest requests in flight, as nginx `least_conn`."""

    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """Requests in flight are those sent and not complete."""
        return self.least(able, lambda node: self.in_flight[node])


class ConsistentHash(Baseline):
    """A ring of hashes (Karger et al., 1997), asked with the first block of the prompt."""

    def __init__(self, nodes: Sequence[NodeInfo], seed: int) -> None:
        super().__init__(nodes, seed)
        ring = sorted(
            (_hash(f"{node.name}/{point}"), number)
            for number, node in enumerate(nodes)
            for point in range(RING_POINTS)
        )
        self._points = [point for point, _ in ring]
        self._owners = [owner for _, owner in ring]

    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """The owner of the first point after the key's, passing over nodes that are not able."""
        start = bisect_left(self._points, _hash(f"key {request.units[0]}"))
        allowed = set(able)
        around = (self._owners[(start + step) % len(self._owners)] for step in range(len(self._owners)))
        return next(owner for owner in around if owner in allowed)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
