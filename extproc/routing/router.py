"""Candidates, their costs, and the pick: where a request goes."""

import math
import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from extproc.config import KvCache
from extproc.openai.errors import ApiError, ErrorCode, shown
from extproc.openai.request import GENERATING, WITHOUT_MODEL, RoutingRequest
from extproc.routing.blocks import PromptBlocks, prompt_blocks
from extproc.routing.choice import PUT_BACK, Choice, Tiers, in_tiers, ranked
from extproc.routing.cost import Ask, Term, costs, prefill_s, step_s
from extproc.routing.decision import Decision as Decision
from extproc.routing.lane import Lane
from extproc.routing.loads import Floats, Work
from extproc.routing.node import REPORT_FRESH_S, Booking, Health, Node, book
from extproc.routing.policy import Policy
from extproc.routing.quarantine import Quarantine
from extproc.routing.receipts import CANDIDATES, Receipt, Receipts
from extproc.routing.room import fits_everywhere, with_room
from extproc.routing.roster import Roster
from extproc.routing.saturation import engine_cap
from extproc.routing.split import Split

FALLBACKS = 2
"""Nodes named beside the pick, for Envoy to go on with: the route knows two retry headers.

One less for each node that has died of the prompt, as it seems.
"""
RETRY_AFTER_S = 1
"""When to ask again while no node can take a request: one health probe later."""

_POISONOUS = (
    "This prompt is in quarantine: two engines died right after they got it. An operator can let it out."
)
_ONE_TOKEN = np.array(1.0)
_NOTHING_HOLDS = (False,) * len(PUT_BACK)


class Router:
    """Picks nodes for requests, and owns the nodes' live state.

    `cap` is the most requests in flight on a node (`batching.max_batch_size`; `None`: the engine decides).
    `splits`: whether prefill and decode may go to separate nodes.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        cap: int | None = None,
        rng: random.Random | None = None,
        cache: KvCache | None = None,
        splits: bool = False,
    ) -> None:
        cache = cache or KvCache()
        self.cap = cap
        self.split: Split | None = None  # no request is split
        self._splits = splits
        self.policy = Policy(cache.policy)
        self.roster = Roster(cache)
        self.caches, self.exact = self.roster.caches, self.roster.exact
        self.loads, self.pace = self.roster.loads, self.roster.pace
        self.receipts = Receipts()
        self.quarantine = Quarantine()
        self._lanes = self.roster.lanes
        self._rng = rng or random.Random()
        self._secret = secrets.randbits(64)
        self._stale_s = math.inf  # when the first of the reports says nothing any more
        self.set_nodes(nodes)

    @property
    def nodes(self) -> Mapping[str, Node]:
        """By id, in the order of the configuration."""
        return self.roster.nodes

    def set_nodes(self, nodes: Iterable[Node]) -> Sequence[Node]:
        """These are the nodes from now on; no decision names others. Gives those that left.

        Bookings on these go on. Once no request names one any more, `roster.release` it.
        """
        came, left = self.roster.change(nodes)
        self.split = Split(self.roster) if self._splits else None
        self._has_spares = any(map(_is_spare, self.nodes.values()))
        for node in came:
            self.reported(node)
        self._find_limits()
        return left

    def configure(self, cap: int | None, cache: KvCache, splits: bool = False) -> None:
        """The most requests on a node, the cache settings, and whether to split, from now on."""
        self.cap = cap
        self._splits = splits
        self.split = Split(self.roster) if splits else None
        if cap is not None:  # which counts instead of what engines show
            for node in self.nodes.values():
                node.engine_cap = None
        self.caches.configure(cache)
        if cache.policy is not self.policy.configured:
            self.policy = Policy(cache.policy)
        self._find_limits()

    def models(self) -> list[str]:
        """Public model names that some undrained node serves, sorted."""
        return sorted(
            {name for node in self.nodes.values() if not node.drained for name in node.config.serves}
        )

    def reported(self, node: Node) -> None:
        """A node's engine has reported: `report` and `foreign` of the node are new."""
        report = node.report
        if report is None:
            return
        self.roster.set_room(node)
        if self.cap is None:
            node.engine_cap = engine_cap(node.engine_cap, node.earlier_report, report, node.foreign)
            self._find_limits()
        self.caches.report(node, report)
        self.loads.set_foreign(node.slot, node.foreign)
        self._stale_s = min(self._stale_s, report.at_s + REPORT_FRESH_S)

    def health_changed(self, node: Node, now_s: float) -> None:
        """A node's health or limit is another now; one whose engine is gone takes its cache along."""
        self._find_limits()
        if node.health is Health.OFFLINE and not node.resting:
            self.caches.lost(node)
            self.quarantine.died(node.id, now_s)

    def book(self, node: Node, work: Work, now_s: float) -> Booking:
        """Charge a node with a request."""
        return book(node, self.loads, work, now_s)

    def check(self, request: RoutingRequest) -> None:
        """Raises `ApiError` if no node could ever take the request."""
        self._candidates(self._lane(request.model), request)

    def blocks_of(self, request: RoutingRequest) -> PromptBlocks:
        """The blocks of its prompt, for whoever decides on it more than once."""
        return prompt_blocks(request, self._secret)

    def is_large(self, request: RoutingRequest, blocks: PromptBlocks) -> bool:
        """Whether some nodes might have no room for it, so that it waits for others. Raises `ApiError`."""
        lane = self._lane(request.model)
        return not fits_everywhere(lane, request, blocks.total_bytes / lane.bytes_per_token)

    def decide(
        self,
        request: RoutingRequest,
        now_s: float,
        blocks: PromptBlocks | None = None,
        pick: Callable[[Node], bool] | None = None,
    ) -> Decision | None:
        """Pick and book a node; `None` while every candidate is at its cap.

        `blocks`: where they are known. `pick`: which nodes may take it, though others may be fallbacks.
        Raises `ApiError`: the model is unknown, the affinity cannot hold, or no node can take it now.
        """
        choice = self._choose(request, now_s, blocks, pick)
        if choice is None:
            return None
        if pick is not None:
            choice.prefer(pick)
        if self.policy.adapts and request.api in GENERATING:
            self.policy.note(choice.held_tokens, choice.ask.prompt_tokens, now_s)
        pair = self.split.pair(choice, request, self._takes_more) if self.split and pick is None else None
        node, ask, blocks = choice.ranked[0], choice.ask, choice.blocks
        slot, engine_model = node.slot, node.config.engine_model(request.model)
        fallbacks = self._fallbacks(choice, request.model)
        wait_s, own_s = (choice.costs.parts.item(term, slot) for term in (Term.WAIT, Term.PREFILL))
        if ask.prompt_tokens <= choice.lane.room_tokens.item(slot):  # else the engine will refuse it
            self.caches.insert(node, blocks)
        self.caches.bind_hint(request, blocks)
        decision = Decision(
            node=node,
            fallbacks=fallbacks,
            booking=book(node, self.loads, Work(ask.prompt_tokens, ask.output_tokens, own_s), now_s),
            engine_model=None if engine_model == request.model else engine_model,
            blocks=blocks,
            matched_bytes=0.0 if choice.matched is None else choice.matched.item(slot),
            picked_s=now_s,
            predicted_s=(wait_s + own_s) / self.pace.prefill[slot],
            receipt=choice.receipt(request, fallbacks, self.policy.in_force, now_s),
        )
        if pair and self.split:
            self.split.divide(decision, pair, request.model, now_s)
        return decision

    def explain(self, request: RoutingRequest, now_s: float) -> Receipt:
        """What would be decided now. Nothing is booked and nothing noted.

        Raises `ApiError` as `decide` does.
        """
        choice = self._choose(request, now_s, even_full=True)
        assert choice is not None
        pair = None if self.split is None else self.split.pair(choice, request, self._takes_more)
        fallbacks = self._fallbacks(choice, request.model)
        receipt = choice.receipt(request, fallbacks, self.policy.in_force, now_s)
        receipt.prefill = None if pair is None else pair.terms
        return receipt

    def _choose(
        self,
        request: RoutingRequest,
        now_s: float,
        blocks: PromptBlocks | None = None,
        pick: Callable[[Node], bool] | None = None,
        *,
        even_full: bool = False,
    ) -> Choice | None:
        """Weigh the candidates; `None`: none can take it."""
        lane = self._lane(request.model)
        candidates = self._candidates(lane, request)
        if now_s > self._stale_s:
            self._forget_stale_reports(now_s)
        must_wait = self._must_wait(lane, candidates, pick)
        if must_wait and not even_full:
            return None
        blocks = blocks or self.blocks_of(request)
        if self.quarantine.holds(blocks.fingerprint, now_s):
            raise ApiError(ErrorCode.POISONOUS_REQUEST, _POISONOUS)
        matched = self.caches.matched_bytes(request, blocks)
        ask = self._ask(lane, request, blocks, matched)
        candidates = with_room(candidates, lane, request, ask.prompt_tokens)
        must_wait = must_wait or self._must_wait(lane, candidates, pick)
        if must_wait and not even_full:
            return None
        weighed = costs(lane, self.loads, ask, now_s)
        totals = weighed.total / self.loads.weights if self.roster.is_weighed else weighed.total
        tiers = self._tiers(lane, candidates, self.caches.crowded(blocks, matched, now_s))
        most = len(candidates) if lane.has_aliases or pick or self.split else CANDIDATES
        first, equals = ranked(tiers, totals, most, self._rng)
        return Choice(lane, blocks, ask, matched, weighed, tiers, first, equals, must_wait)

    def attempt_failed(self, decision: Decision, node_id: str, request: RoutingRequest, now_s: float) -> bool:
        """Move the booking from the node that failed to the one that Envoy went on to; whether it moved."""
        booking = decision.booking
        for failed, following in pairwise((decision.node, *decision.fallbacks)):
            if failed.id == node_id and booking.node is failed and not booking.released:
                self.caches.withdraw(failed, decision.blocks, decision.matched_bytes)
                self._follow(decision, following, request, now_s)
                return True
        return False

    def _follow(self, decision: Decision, node: Node, request: RoutingRequest, now_s: float) -> None:
        """Charge the node that now has the request with what it is to that node."""
        lane, blocks = self._lanes[request.model], decision.blocks
        matched = self.caches.matched_bytes(request, blocks)
        ask = self._ask(lane, request, blocks, matched)
        work = Work(ask.prompt_tokens, ask.output_tokens, prefill_s(lane, self.loads, ask, node.slot))
        decision.matched_bytes = 0.0 if matched is None else float(matched[node.slot])
        decision.booking.move(node, work, now_s)
        self.caches.insert(node, blocks)

    def first_token(self, decision: Decision, at_s: float) -> None:
        """The first token of a stream came at `at_s`. The node may have left, but not been released."""
        if decision.booking.node is decision.node and decision.prefill is None:
            self.paced(decision.node.slot, at_s - decision.picked_s, decision.predicted_s)

    def paced(self, slot: int, seconds: float, predicted_s: float) -> None:
        """A prefill took a node so long, from its pick on."""
        self.pace.first_token(slot, seconds, predicted_s)
        self.loads.set_pace(slot, self.pace.prefill[slot], self.pace.decode[slot])

    def answered(
        self, decision: Decision, model: str, prompt_tokens: int, output_tokens: int, decode_s: float
    ) -> None:
        """What an answer's usage said, and its time from the first token to its end; as `first_token`."""
        lane, booking = self._lanes[model], decision.booking
        slot, ended = booking.node.slot, booking.work if booking.released else None
        lane.learn(decision.blocks.total_bytes, prompt_tokens, output_tokens)
        self.pace.decoded(slot, output_tokens, decode_s, step_s(lane, self.loads, slot, ended))
        self.loads.set_pace(slot, self.pace.prefill[slot], self.pace.decode[slot])

    def _lane(self, model: str) -> Lane:
        lane = self._lanes.get(model)
        if lane is None or not lane.serving:
            message = f"The model `{shown(model)}` does not exist: see GET /v1/models."
            raise ApiError(ErrorCode.MODEL_NOT_FOUND, message, param="model")
        return lane

    def _candidates(self, lane: Lane, request: RoutingRequest) -> list[Node]:
        """Nodes that serve the model and take traffic."""
        if request.hints.node_affinity is not None:
            return [self._pinned(request.hints.node_affinity, request.model)]
        offline = Health.OFFLINE
        usable = [node for node in lane.serving if not node.drained and node.health is not offline]
        if not usable:  # a node that rests is better than none
            usable = [node for node in lane.serving if not node.drained and node.resting]
        if self.split is not None and request.api in GENERATING:
            usable = self.split.answering(usable, lane.model)
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
        if node.drained or node.health is Health.OFFLINE:
            state = "drained" if node.drained else node.health.value
            raise ApiError(
                ErrorCode.NODE_UNAVAILABLE,
                f"The node `{node_id}` is {state}.",
                param=param,
                retry_after_s=RETRY_AFTER_S,
            )
        return node

    def _find_limits(self) -> None:
        """Whether any node can be full."""
        limits = (node.limit is not None or node.engine_cap is not None for node in self.nodes.values())
        self._has_limits = self.cap is not None or any(limits)

    def _is_full(self, node: Node) -> bool:
        in_flight, cap, limit = node.in_flight, self.cap, node.limit
        return (cap is not None and in_flight >= cap) or (limit is not None and in_flight >= limit)

    def _takes_more(self, node: Node) -> bool:
        return not self._is_full(node) and (node.engine_cap is None or node.in_flight < node.engine_cap)

    def _must_wait(self, lane: Lane, candidates: list[Node], pick: Callable[[Node], bool] | None) -> bool:
        """Whether none takes more. Last resorts do not count while others are left: full is not gone.

        Where one does, an engine with a queue may still be the better choice: that is a matter of cost.
        """
        if not self._has_limits and pick is None:
            return False
        wanted = [node for node in candidates if not _is_spare(node)] or candidates
        if self.split is not None:
            wanted = [node for node in wanted if not self.split.prefills(node, lane.model)] or wanted
        takes = [node for node in wanted if self._takes_more(node) and (pick is None or pick(node))]
        return not takes or (self.split is not None and self.split.waits(lane, takes, self._takes_more))

    def _ask(self, lane: Lane, request: RoutingRequest, blocks: PromptBlocks, matched: Floats | None) -> Ask:
        """The request in tokens."""
        if request.api in WITHOUT_MODEL:
            return Ask(1.0, 1.0, 1.0)
        bytes_per_token, limit = lane.bytes_per_token, request.max_tokens
        prompt_tokens = max(blocks.total_bytes / bytes_per_token, 1.0)
        if request.api not in GENERATING:
            return Ask(prompt_tokens, 1.0, prompt_tokens)
        output_tokens = lane.output_tokens if limit is None else max(1.0, min(limit, lane.output_tokens))
        if matched is None or not self.policy.counts_matches:
            return Ask(prompt_tokens, output_tokens, prompt_tokens)
        uncached = matched * (-1.0 / bytes_per_token)
        uncached += prompt_tokens
        np.maximum(uncached, _ONE_TOKEN, out=uncached)
        return Ask(prompt_tokens, output_tokens, uncached)

    def _fallbacks(self, choice: Choice, model: str) -> tuple[Node, ...]:
        """The next cheapest nodes; only those that know the model by the name that the body will carry."""
        most = max(0, FALLBACKS - self.quarantine.dead_nodes(choice.blocks.fingerprint))
        if not choice.lane.has_aliases:
            return tuple(choice.ranked[1 : 1 + most])
        engine_model = choice.ranked[0].config.engine_model(model)
        named = [node for node in choice.ranked[1:] if node.config.engine_model(model) == engine_model]
        return tuple(named[:most])

    def _tiers(self, lane: Lane, nodes: list[Node], crowded: set[int]) -> Tiers:
        """Spares come last, before them those that only prefill, and full nodes after those with room.

        They do come: where all others have failed, over the cap is better than lost.
        """
        prefilling = set() if self.split is None else self.split.prefilling(nodes, lane.model)
        if not (self._has_limits or crowded or self._has_spares or prefilling):
            return {_NOTHING_HOLDS: nodes}
        holds = (
            (_is_spare(node), node.slot in prefilling, self._is_full(node), node.slot in crowded)
            for node in nodes
        )
        return in_tiers(nodes, holds)

    def _forget_stale_reports(self, now_s: float) -> None:
        """What others sent is not known any longer where a report is too old."""
        fresh = [node for node in self.nodes.values() if node.fresh_report(now_s)]
        self._stale_s = min((node.report.at_s for node in fresh if node.report), default=math.inf)
        self._stale_s += REPORT_FRESH_S
        for node in self.nodes.values():
            self.loads.set_foreign(node.slot, node.foreign_requests(now_s))
            if node.fresh_report(now_s) is None:
                node.engine_cap = None
        self._find_limits()


def _is_spare(node: Node) -> bool:
    """Weight 0: for affinity, and for when no other node is left."""
    return node.config.weight <= 0.0
