"""What the baselines have in common: who may take a request, and what they sent where."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.baselines.prefixes import PrefixIndex
from extproc.simulator.replay.picking import NodeInfo, NodeMetrics, RefusedError
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceRequest


@dataclass(slots=True)
class Sent:
    """A request on its way, and what was believed of it when it was sent."""

    request: TraceRequest
    node: int
    sent_s: float
    uncached_tokens: int = 0
    begun: bool = False


class Baseline(ABC):
    """A picker that decides by its own bookings. Subclasses say which of the candidates it is.

    None of the originals knows how much KV memory a node has; here all of them are spared the nodes that
    could never hold a request, as if their operator had given the small nodes a shorter context. For that
    alone, the length of the answer is known beforehand.
    """

    def __init__(self, nodes: Sequence[NodeInfo], seed: int) -> None:
        self.nodes = nodes
        self.rng = random.Random(f"{seed} picker")
        self.in_flight = [0] * len(nodes)
        self._sent: dict[int, Sent] = {}

    def pick(self, request: TraceRequest, now_s: float) -> int:
        """The node that `choose` names, booked. Raises `RefusedError`: none could hold the request."""
        tokens = request.prompt_tokens + request.output_tokens
        able = [number for number, node in enumerate(self.nodes) if tokens <= node.kv_capacity_tokens]
        if not able:
            raise RefusedError
        node = self.choose(request, able, now_s)
        sent = self._sent[request.id] = Sent(request, node, now_s)
        self.in_flight[node] += 1
        self.on_sent(sent)
        return node

    def first_token(self, request_id: int, now_s: float) -> None:
        """The prompt of a request is computed."""
        sent = self._sent[request_id]
        sent.begun = True
        self.on_first_token(sent, now_s)

    def finished(self, request_id: int, now_s: float, cached_tokens: int) -> None:
        """A request has left its node."""
        sent = self._sent.pop(request_id)
        self.in_flight[sent.node] -= 1
        self.on_finished(sent, now_s)

    def released(self) -> Sequence[tuple[int, int]]:
        """None of them lets a request wait."""
        return ()

    def report(self, node: int, metrics: NodeMetrics) -> None:  # noqa: B027
        """Metrics tell a sole router no more than its bookings, and later."""

    @abstractmethod
    def choose(self, request: TraceRequest, able: Sequence[int], now_s: float) -> int:
        """One of the nodes in `able`, which is never empty and ascends."""

    def on_sent(self, sent: Sent) -> None:  # noqa: B027
        """A request was booked."""

    def on_first_token(self, sent: Sent, now_s: float) -> None:  # noqa: B027
        """A booked request got its first token."""

    def on_finished(self, sent: Sent, now_s: float) -> None:  # noqa: B027
        """A booked request is complete."""

    def least(self, nodes: Iterable[int], cost: Callable[[int], float]) -> int:
        """The node of least cost; among equals, any."""
        costs = [(cost(node), node) for node in nodes]
        lowest = min(costs)[0]
        return self.rng.choice([node for value, node in costs if value == lowest])


class PrefixBaseline(Baseline):
    """A baseline that remembers which prefixes it sent where, and how much prefill it has queued.

    The index is the most generous reading of "approximate": as large as each engine's KV memory, least
    recently used first out. Prefill is queued from the pick to the first token.
    """

    def __init__(self, nodes: Sequence[NodeInfo], seed: int) -> None:
        super().__init__(nodes, seed)
        self.index = PrefixIndex([node.kv_capacity_tokens // UNIT_TOKENS for node in nodes])
        self.queued_tokens = [0] * len(nodes)

    def matched_tokens(self, request: TraceRequest, node: int) -> int:
        """Prompt tokens that the node is believed to have."""
        return min(self.index.match(request.units, node) * UNIT_TOKENS, request.prompt_tokens)

    def uncached_tokens(self, request: TraceRequest, node: int) -> int:
        """Prompt tokens that the node would have to compute."""
        return request.prompt_tokens - self.matched_tokens(request, node)

    def on_sent(self, sent: Sent) -> None:
        """Queue the prefill; from now on the node is believed to have the prompt."""
        sent.uncached_tokens = self.uncached_tokens(sent.request, sent.node)
        self.queued_tokens[sent.node] += sent.uncached_tokens
        self.index.add(sent.request.units, sent.node)

    def on_first_token(self, sent: Sent, now_s: float) -> None:
        """The prefill is done."""
        self.queued_tokens[sent.node] -= sent.uncached_tokens

    def on_finished(self, sent: Sent, now_s: float) -> None:
        """A refused request never had a first token."""
        if not sent.begun:
            self.queued_tokens[sent.node] -= sent.uncached_tokens
