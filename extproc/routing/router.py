"""Candidates, their costs, and the pick: where a request goes."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from extproc.openai.errors import ApiError, ErrorCode, shown
from extproc.openai.request import RoutingRequest
from extproc.routing.cost import cost_s, service_s
from extproc.routing.node import Booking, Health, Node

FALLBACKS = 2
"""Nodes named beside the pick, for Envoy to go on with: the route knows two retry headers."""
TIE_RATIO = 1.01
"""Costs this close to the lowest are equal: the prediction is not better than that."""
RETRY_AFTER_S = 1
"""When to ask again while no node can take a request: one health probe later."""


@dataclass(slots=True)
class Decision:
    """The node that takes a request, its booking, and where the request goes if that node fails."""

    node: Node
    fallbacks: tuple[Node, ...]
    booking: Booking
    engine_model: str | None
    """The model's name on these nodes, where an alias changes it."""

    def attempt_failed(self, node_id: str, request: RoutingRequest) -> bool:
        """Move the booking from the node that failed to the one that Envoy went on to; whether it moved."""
        order = (self.node, *self.fallbacks)
        for failed, following in pairwise(order):
            if failed.id == node_id and self.booking.node is failed:
                return self.booking.move(following, service_s(following, request))
        return False


class Router:
    """Picks nodes for requests, and owns the nodes' live state.

    `cap` is the most requests in flight on a node (`batching.max_batch_size`; `None`: the engine decides).
    """

    def __init__(
        self, nodes: Iterable[Node], cap: int | None = None, rng: random.Random | None = None
    ) -> None:
        self.nodes: dict[str, Node] = {node.id: node for node in nodes}
        self.cap = cap
        self._rng = rng or random.Random()

    def models(self) -> list[str]:
        """Public model names that some undrained node serves, sorted."""
        return sorted(
            {name for node in self.nodes.values() if not node.drained for name in node.config.serves}
        )

    def decide(self, request: RoutingRequest, now_s: float) -> Decision | None:
        """Pick and book a node; `None` while every candidate is at its cap.

        Raises `ApiError`: the model is unknown, the affinity cannot hold, or no node can take it now.
        """
        candidates = self._candidates(request)
        wanted = [node for node in candidates if not _is_spare(node)] or candidates
        if all(map(self._is_full, wanted)):
            return None
        ranked = self._ranked(candidates, request, now_s)
        node, own_s = ranked[0]
        engine_model = node.config.engine_model(request.model)
        return Decision(
            node=node,
            fallbacks=tuple(self._fallbacks(ranked[1:], request.model, engine_model)),
            booking=node.book(own_s),
            engine_model=None if engine_model == request.model else engine_model,
        )

    def _candidates(self, request: RoutingRequest) -> list[Node]:
        """Nodes that serve the model and take traffic."""
        serving = [node for node in self.nodes.values() if request.model in node.config.serves]
        if not serving:
            message = f"The model `{shown(request.model)}` does not exist: see GET /v1/models."
            raise ApiError(ErrorCode.MODEL_NOT_FOUND, message, param="model")
        if request.hints.node_affinity is not None:
            return [self._pinned(request.hints.node_affinity, request.model)]
        usable = [node for node in serving if _takes_traffic(node)]
        if not usable:
            raise ApiError(
                ErrorCode.NO_AVAILABLE_NODE,
                f"Every node that serves `{shown(request.model)}` is offline or drained.",
                retry_after_s=RETRY_AFTER_S,
            )
        return usable

    def _pinned(self, node_id: str, model: str) -> Node:
        """The node that the client asked for."""
        node = self.nodes.get(node_id)
        param = "x-inferact.node_affinity"
        if node is None:
            raise ApiError(ErrorCode.INVALID_HINT, f"There is no node `{node_id}`.", param=param)
        if model not in node.config.serves:
            raise ApiError(
                ErrorCode.INVALID_HINT, f"The node `{node_id}` does not serve `{shown(model)}`.", param=param
            )
        if not _takes_traffic(node):
            state = "drained" if node.drained else node.health.value
            raise ApiError(
                ErrorCode.NODE_UNAVAILABLE,
                f"The node `{node_id}` is {state}.",
                param=param,
                retry_after_s=RETRY_AFTER_S,
            )
        return node

    def _is_full(self, node: Node) -> bool:
        return self.cap is not None and node.in_flight >= self.cap

    def _ranked(self, nodes: list[Node], request: RoutingRequest, now_s: float) -> list[tuple[Node, float]]:
        """Nodes with their own seconds for the request, cheapest first; the best tier in random order.

        Full nodes come after those with room: where all others have failed, over the cap is better than lost.
        """
        costed = []
        for node in nodes:
            own_s = service_s(node, request)
            costed.append((_is_spare(node), self._is_full(node), cost_s(node, own_s, now_s), node, own_s))
        costed.sort(key=lambda entry: entry[:3])
        spare, full, cost = costed[0][:3]
        limit = (spare, full, cost * TIE_RATIO)
        tier = next((i for i, entry in enumerate(costed) if entry[:3] > limit), len(costed))
        if tier > 1:
            pick = self._rng.randrange(tier)
            costed[0], costed[pick] = costed[pick], costed[0]
        return [(node, own_s) for *_, node, own_s in costed]

    def _fallbacks(self, others: list[tuple[Node, float]], model: str, engine_model: str) -> Iterator[Node]:
        """The next cheapest nodes; only those that know the model by the name that the body will carry."""
        left = FALLBACKS
        for node, _ in others:
            if left and node.config.engine_model(model) == engine_model:
                left -= 1
                yield node


def _takes_traffic(node: Node) -> bool:
    return not node.drained and node.health is not Health.OFFLINE


def _is_spare(node: Node) -> bool:
    """Weight 0: for affinity, and for when no other node is left. Being full is not being gone."""
    return node.config.weight <= 0.0
