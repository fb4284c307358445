"""The candidates of one request in order, and the receipt for it."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Final, TypeAlias

import msgspec
import numpy as np

from extproc.config import CachePolicy
from extproc.openai.request import RoutingRequest
from extproc.routing.blocks import PromptBlocks
from extproc.routing.cost import Ask, Costs, Term
from extproc.routing.lane import Lane
from extproc.routing.loads import Floats
from extproc.routing.node import Health, Node
from extproc.routing.receipts import CANDIDATES, Reason, Receipt

TIE_RATIO: Final = 1.01
"""Costs this close to the lowest are equal: the prediction is not better than that."""

Tiers: TypeAlias = dict[tuple[bool, ...], list[Node]]
"""Candidates by which of `PUT_BACK` hold for them, the best tier first."""
PUT_BACK: Final = (Reason.SPARE, Reason.PREFILLS, Reason.FULL, Reason.CROWDED)
"""What puts a node behind dearer ones, the gravest first."""


class Choice(msgspec.Struct, eq=False):
    """What a request was weighed by, and the outcome."""

    lane: Lane
    blocks: PromptBlocks
    ask: Ask
    matched: Floats | None
    costs: Costs
    tiers: Tiers
    ranked: list[Node]
    """The first candidates, the best one first."""
    equals: int
    """How many were as cheap as the cheapest."""
    must_wait: bool

    @property
    def held_tokens(self) -> float:
        """Prompt tokens that the best candidate holds."""
        if self.matched is None:
            return 0.0
        held_bytes = max(self.matched.item(node.slot) for node in chain.from_iterable(self.tiers.values()))
        return min(held_bytes / self.lane.bytes_per_token, self.ask.prompt_tokens)

    def prefer(self, pick: Callable[[Node], bool]) -> None:
        """Put the first node of which `pick` holds before all."""
        node = next(filter(pick, self.ranked))
        self.ranked.remove(node)
        self.ranked.insert(0, node)

    def receipt(
        self, request: RoutingRequest, fallbacks: tuple[Node, ...], policy: CachePolicy, now_s: float
    ) -> Receipt:
        """All that an operator may ask for later."""
        nodes = self.ranked[:CANDIDATES]
        slots = [node.slot for node in nodes]
        parts, matched = self.costs.parts.take(slots, 1), self.matched
        pinned = request.hints.node_affinity is not None
        left_out = 0 if pinned else len(self.lane.serving) - sum(map(len, self.tiers.values()))
        excluded = self._excluded() if left_out else ()
        return Receipt(
            model=request.model,
            policy=policy,
            prompt_tokens=self.ask.prompt_tokens,
            output_tokens=self.ask.output_tokens,
            bytes_per_token=self.lane.bytes_per_token,
            pinned=pinned,
            equals=self.equals,
            waits=self.must_wait,
            nodes=tuple(nodes),
            fallbacks=fallbacks,
            put_back=self._put_back(nodes),
            excluded=excluded,
            more_excluded=left_out - len(excluded),
            predicted_s=parts.item(Term.WAIT, 0) + parts.item(Term.PREFILL, 0),
            parts=parts,
            matched_bytes=None if matched is None else matched.take(slots),
            decided_s=now_s,
        )

    def _put_back(self, nodes: Iterable[Node]) -> tuple[tuple[Reason, ...], ...]:
        if len(self.tiers) == 1 and not any(next(iter(self.tiers))):
            return ()
        reasons = {
            node.slot: tuple(reason for reason, holds in zip(PUT_BACK, tier, strict=True) if holds)
            for tier, members in self.tiers.items()
            for node in members
        }
        return tuple(reasons[node.slot] for node in nodes)

    def _excluded(self) -> tuple[tuple[Node, Reason], ...]:
        """The first nodes that serve the model and were no candidates: a big fleet may have hundreds."""
        candidates = {node.slot for tier in self.tiers.values() for node in tier}
        others = (node for node in self.lane.serving if node.slot not in candidates)
        return tuple((node, _reason(node)) for node in islice(others, CANDIDATES))


def in_tiers(nodes: Iterable[Node], holds: Iterable[tuple[bool, ...]]) -> Tiers:
    """Nodes by which of `PUT_BACK` hold for each of them."""
    tiers: defaultdict[tuple[bool, ...], list[Node]] = defaultdict(list)
    for node, tier in zip(nodes, holds, strict=True):
        tiers[tier].append(node)
    return {tier: tiers[tier] for tier in sorted(tiers)}


def ranked(tiers: Tiers, totals: Floats, most: int, rng: random.Random) -> tuple[list[Node], int]:
    """The first nodes in order, cheapest first within a tier, and how many are as cheap as the first.

    Chance decides among these.
    """
    order: list[Node] = []
    equals = 0
    for nodes in tiers.values():
        own = totals if len(nodes) == len(totals) else totals[[node.slot for node in nodes]]
        places = own.argsort()[: most - len(order)].tolist()
        if not order:
            equals = _draw(own, places, rng)
        order += [nodes[place] for place in places]
        if len(order) == most:
            break
    return order, equals


def _draw(own: Floats, places: list[int], rng: random.Random) -> int:
    """Put one of those that are as cheap as the cheapest first; how many there are."""
    limit = own.item(places[0]) * TIE_RATIO
    if len(places) == 1 or own.item(places[1]) > limit:
        return 1
    equals = np.flatnonzero(own <= limit).tolist()
    drawn = rng.choice(equals)
    places[:] = [drawn, *(place for place in places if place != drawn)][: len(places)]
    return len(equals)


def _reason(node: Node) -> Reason:
    if node.drained:
        return Reason.DRAINED
    return Reason.OFFLINE if node.health is Health.OFFLINE else Reason.NO_ROOM
