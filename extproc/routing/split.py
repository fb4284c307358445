"""Which requests are split, and over which two nodes: one computes the prompt, the other the answer.

A split is worth it when it spares a decode node more than the client waits longer for its first token: for
the transfer, and for the prefill node where that has more to do or is slower. Spared are the seconds of the
prefill, and the same for each answer that runs there, at the weight that costs give to decoding.
"""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import numpy as np

from extproc.config import Protocol, Role
from extproc.config.roles import Roles, one_role, roles
from extproc.hardware import model_shape, transfer_token_s
from extproc.openai.errors import ApiError, ErrorCode, shown
from extproc.openai.request import Api, RoutingRequest
from extproc.routing.choice import Choice
from extproc.routing.cost import DECODE_WEIGHT, SCALE, Term
from extproc.routing.decision import Decision, Prefill
from extproc.routing.lane import Lane
from extproc.routing.loads import Floats, Work
from extproc.routing.node import Health, Node, book
from extproc.routing.receipts import SplitTerms
from extproc.routing.room import ROOM_MARGIN_TOKENS
from extproc.routing.roster import Roster

FLOOR_TOKENS: Final = 1_024
"""Prompts of which less is to be computed are never split: a transfer has costs that no formula has."""
SPLIT_APIS: Final = frozenset({Api.CHAT_COMPLETIONS, Api.COMPLETIONS})
"""The endpoints for which engines have a protocol."""

_RETRY_AFTER_S: Final = 1
_UNTIL_DONE: Final = (Term.WAIT, Term.PREFILL, Term.QUEUE)
_ANSWERING: Final = (Term.PRESSURE, Term.DECODE, Term.HARM)


class Pair(msgspec.Struct, eq=False):
    """Where the two legs go."""

    prefill: Node
    decode: Node
    protocol: Protocol
    matched_bytes: float
    """How much of the prompt the prefill node holds."""
    terms: SplitTerms


class Split:
    """The roles of the nodes of every model, and the choice of pairs."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._roles: Roles = roles([node.config for node in roster.nodes.values()])

    def role(self, node: Node, model: str) -> Role:
        """What a node is to a model that it serves."""
        return self._of(model).get(node.id, Role.BOTH)

    def role_of(self, node: Node) -> Role | None:
        """The same for all of its models; `None` where they differ."""
        return one_role(self._roles, node.id)

    def is_half(self, node: Node, model: str) -> bool:
        """Whether its engine refuses whole requests: SGLang's, started for one half."""
        return node.config.protocol is Protocol.SGLANG and self.role(node, model) is not Role.BOTH

    def prefills(self, node: Node, model: str) -> bool:
        """Whether whole requests go there only where no other node is left."""
        return self.role(node, model) is Role.PREFILL

    def prefilling(self, nodes: list[Node], model: str) -> set[int]:
        """The slots of those of which `prefills` holds."""
        return {node.slot for node in nodes if self.prefills(node, model)}

    def answering(self, nodes: list[Node], model: str) -> list[Node]:
        """Those that may get a request from Envoy."""
        return [node for node in nodes if not (self.prefills(node, model) and self.is_half(node, model))]

    def waits(self, lane: Lane, nodes: list[Node], takes_more: Callable[[Node], bool]) -> bool:
        """Whether these take halves only, and all who might prefill for them are full."""
        model = lane.model
        if not all(self.is_half(node, model) for node in nodes):
            return False
        prefilling = [
            node for node in lane.serving if self.is_half(node, model) and self._may_prefill(node, model)
        ]
        return bool(prefilling) and not any(map(takes_more, prefilling))

    def pair(
        self, choice: Choice, request: RoutingRequest, takes_more: Callable[[Node], bool]
    ) -> Pair | None:
        """The two nodes for a request that was weighed; `None`: it stays whole.

        Leaves in `choice.ranked` those that can have it from Envoy, the decode node first. Raises `ApiError`
        where none is left.
        """
        if request.api not in SPLIT_APIS:
            return None
        model, whole = request.model, choice.ranked[0]
        must = self.is_half(whole, model)
        found = None
        if must or self._is_long(choice, request, whole):
            found = self._cheapest(choice, model, whole, must, takes_more)
        if found is not None and self.is_half(found.decode, model):
            choice.ranked = [node for node in choice.ranked if node.config.protocol is found.protocol]
        else:
            choice.ranked = [node for node in choice.ranked if not self.is_half(node, model)]
        if not choice.ranked:
            message = f"No node can compute prompts for `{shown(model)}`: all are offline or drained."
            raise ApiError(ErrorCode.NO_AVAILABLE_NODE, message, retry_after_s=_RETRY_AFTER_S)
        if found is not None:
            choice.prefer(lambda node: node is found.decode)
        return found

    def divide(self, decision: Decision, pair: Pair, model: str, now_s: float) -> None:
        """Charge the prefill node with the prompt, and the decode node with the answer alone."""
        roster, node, terms = self._roster, pair.prefill, pair.terms
        whole = decision.booking.work
        decision.booking.redo(Work(whole.prompt_tokens, whole.output_tokens, 0.0), now_s)
        decision.booking.has_begun = True  # its first token tells nothing of what others prefill there
        roster.caches.insert(node, decision.blocks)
        decision.receipt.prefill = terms
        decision.receipt.predicted_s = terms.wait_s + terms.prefill_s + terms.transfer_s
        decision.prefill = Prefill(
            node=node,
            protocol=pair.protocol,
            engine_model=node.config.engine_model(model),
            booking=book(node, roster.loads, Work(whole.prompt_tokens, 1.0, terms.prefill_s), now_s),
            whole=whole,
            matched_bytes=pair.matched_bytes,
            predicted_s=(terms.wait_s + terms.prefill_s) / roster.pace.prefill[node.slot],
        )

    def _of(self, model: str) -> Mapping[str, Role]:
        return self._roles.get(model, {})

    def _is_long(self, choice: Choice, request: RoutingRequest, whole: Node) -> bool:
        return (
            _uncached(choice, whole) >= FLOOR_TOKENS
            and request.one_answer
            and request.hints.node_affinity is None
            and whole.config.protocol is not None
            and not self.prefills(whole, request.model)
        )

    def _cheapest(
        self,
        choice: Choice,
        model: str,
        whole: Node,
        must: bool,
        takes_more: Callable[[Node], bool],
    ) -> Pair | None:
        protocol, parts = whole.config.protocol, choice.costs.parts
        assert protocol is not None
        prefilling = [node for node in self._prefilling(choice, model, protocol, must) if takes_more(node)]
        if not prefilling:
            return None
        slots = [node.slot for node in prefilling]
        until_done_s = parts[_UNTIL_DONE, :][:, slots].sum(axis=0) / _weights(prefilling)
        prefill = prefilling[int(until_done_s.argmin())]
        answering = [
            node
            for node in next(iter(choice.tiers.values()))
            if node is not prefill and self._may_answer(node, model, protocol) and takes_more(node)
        ]
        if not answering:
            return None
        transfers_s = np.array([_transfer_s(choice, prefill, node, model) for node in answering])
        requests = self._roster.loads.requests
        total_s = (_answer_s(choice, answering, requests) + transfers_s) / _weights(answering)
        at = int(total_s.argmin())
        terms = self._terms(choice, prefill, whole, float(transfers_s[at]))
        if not must and terms.saved_s <= terms.delay_s:
            return None
        matched_bytes = 0.0 if choice.matched is None else float(choice.matched[prefill.slot])
        return Pair(prefill, answering[at], protocol, matched_bytes, terms)

    def _prefilling(self, choice: Choice, model: str, protocol: Protocol, must: bool) -> list[Node]:
        """The nodes that may compute prompts for others. Room is a preference where there `must` be one."""
        able = [
            node
            for node in choice.lane.serving
            if node.config.protocol is protocol and self._may_prefill(node, model)
        ]
        needed = choice.ask.prompt_tokens + ROOM_MARGIN_TOKENS
        roomy = [node for node in able if choice.lane.room_tokens.item(node.slot) > needed]
        return roomy or (able if must else [])

    def _may_prefill(self, node: Node, model: str) -> bool:
        """An engine for both halves prefills for others only while it has nothing else to do."""
        role = self.role(node, model)
        has_time = role is Role.BOTH and not node.in_flight and node.config.protocol is not Protocol.SGLANG
        takes_traffic = not node.drained and node.health is not Health.OFFLINE and node.config.weight > 0.0
        return takes_traffic and (role is Role.PREFILL or has_time)

    def _may_answer(self, node: Node, model: str, protocol: Protocol) -> bool:
        """Engines of SGLang's fetch KV only if they were started for that."""
        if node.config.protocol is not protocol:
            return False
        role = self.role(node, model)
        return role is Role.DECODE or (role is Role.BOTH and protocol is not Protocol.SGLANG)

    def _terms(self, choice: Choice, prefill: Node, whole: Node, transfer_s: float) -> SplitTerms:
        """What the split costs and saves, against the best node for the whole request.

        A node that only ever decodes shows no pace of its prefill: that of the prefill node has to do.
        """
        parts, pace, requests = choice.costs.parts, self._roster.pace, self._roster.loads.requests
        wait_s, prefill_s = (float(parts[term, prefill.slot]) for term in (Term.WAIT, Term.PREFILL))
        whole_wait_s, whole_s = (float(parts[term, whole.slot]) for term in (Term.WAIT, Term.PREFILL))
        if not pace.knows_prefill(whole.slot):
            whole_s *= pace.prefill[prefill.slot]
        return SplitTerms(
            node=prefill,
            uncached_tokens=_uncached(choice, prefill),
            wait_s=wait_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            saved_s=whole_s * (1.0 + DECODE_WEIGHT * float(requests[whole.slot])),
            delay_s=wait_s + prefill_s + transfer_s - whole_wait_s - whole_s,
        )


def _uncached(choice: Choice, node: Node) -> float:
    """Tokens of the prompt that the node would have to compute."""
    uncached = choice.ask.uncached
    return uncached if isinstance(uncached, float) else float(uncached[node.slot])


def _weights(nodes: list[Node]) -> Floats:
    return np.array([node.config.weight or 1.0 for node in nodes])


def _transfer_s(choice: Choice, prefill: Node, decode: Node, model: str) -> float:
    """The decode node fetches what it does not hold, over NVLink where both nodes have it."""
    nvlink = prefill.profile.nvlink and decode.profile.nvlink
    shape = model_shape(decode.config.engine_model(model))
    return _uncached(choice, decode) * transfer_token_s(shape, nvlink)


def _answer_s(choice: Choice, nodes: list[Node], requests: Floats) -> Floats:
    """What the answer alone costs: the `requests` on each node wait for no prefill of this prompt."""
    slots = [node.slot for node in nodes]
    parts = choice.costs.parts
    scaled = SCALE[list(_ANSWERING)] @ parts[_ANSWERING, :][:, slots]
    spared: Floats = scaled - SCALE[Term.HARM] * requests[slots] * parts[Term.PREFILL, slots]
    return spared
