"""What the end of a request teaches the router: times, lengths, and what engines really had cached."""

import math
from http import HTTPStatus
from typing import Final

from msgspec.structs import replace

from extproc.openai.request import GENERATING, Api, RoutingRequest
from extproc.routing.cost import Term
from extproc.routing.decision import Decision
from extproc.routing.node import NO_SLOT, Node
from extproc.routing.outcome import DEADLY, Ended, LegFailure, Outcome
from extproc.routing.router import FALLBACKS, Router

LEAST_MISSING_TOKENS: Final = 256
"""Fewer are a matter of rounding: engines keep whole blocks, of 16 to 128 tokens mostly."""
LEAST_MISSING_RATIO: Final = 0.25
"""Of what was predicted: an engine that misses less has evicted nothing to speak of."""
TOLD_S: Final = 3600.0
"""How long an engine that told cached tokens is taken to tell them: until it starts anew, mostly."""


def with_cached(outcome: Outcome, node: Node, api: Api, now_s: float) -> Outcome:
    """The outcome of a request to a node, where no number of cached tokens is 0 if the node tells others.

    SGLang, and vLLM in many versions, leave the number out where nothing was cached. APIs differ: by that of
    responses vLLM always tells, by the others with `--enable-prompt-tokens-details`, of embeddings never.
    """
    usage = outcome.usage
    if usage is None:
        return outcome
    if usage.cached_tokens is not None:
        node.told_cached_s[api] = now_s
    elif now_s - node.told_cached_s.get(api, -math.inf) <= TOLD_S:
        return replace(outcome, usage=replace(usage, cached_tokens=0))
    return outcome


def learn(
    router: Router,
    decision: Decision,
    request: RoutingRequest,
    outcome: Outcome,
    arrived_s: float,
    now_s: float,
) -> None:
    """Tell the router what became of a decision on a request that came at `arrived_s`, by its clock."""
    if NO_SLOT in (decision.node.slot, decision.booking.node.slot):
        return  # the node is gone from the fleet
    served = decision.booking.node.id == outcome.node_id
    if served and outcome.ttft_s is not None and request.stream:
        router.first_token(decision, arrived_s + outcome.ttft_s)
    elsewhere = None if served else router.nodes.get(outcome.node_id)
    if elsewhere is not None and outcome.ended is Ended.COMPLETE:
        # Of the attempt that failed we hear too late, or never.
        router.caches.withdraw(decision.booking.node, decision.blocks, decision.matched_bytes)
        router.caches.insert(elsewhere, decision.blocks)
    if served and outcome.status >= HTTPStatus.BAD_REQUEST:  # it refused the prompt, or failed
        router.caches.withdraw(decision.booking.node, decision.blocks, decision.matched_bytes)
    if (node := router.nodes.get(outcome.node_id)) is not None:
        router.exact.settle(node, decision.blocks)
    usage = outcome.usage
    if usage is None or not request.one_answer or request.api not in GENERATING:
        return
    decode_s = 0.0 if outcome.ttft_s is None or not served else outcome.duration_s - outcome.ttft_s
    # What follows another response begins with text that is not in the body: so tokens tell nothing of bytes.
    prompt_tokens = usage.prompt_tokens if request.prompt.previous_response_id is None else 0
    router.answered(decision, request.model, prompt_tokens, usage.output_tokens, decode_s)
    if served and prompt_tokens and usage.cached_tokens is not None and decision.prefill is None:
        _compare(router, decision, request, prompt_tokens, usage.cached_tokens, now_s)


def prefilled(
    router: Router, decision: Decision, took_s: float, failure: LegFailure | None, now_s: float
) -> bool:
    """The prefill leg of a split request is over. `False`, and nothing done, where that was told before."""
    leg, terms = decision.prefill, decision.receipt.prefill
    assert leg is not None
    assert terms is not None
    if not leg.booking.release(now_s):
        return False
    terms.failure = failure
    if failure is None:
        terms.took_s = took_s
        router.paced(leg.node.slot, took_s, leg.predicted_s)
        return True
    router.caches.withdraw(leg.node, decision.blocks, leg.matched_bytes)
    decision.fallbacks = tuple(node for node in decision.fallbacks if node is not leg.node)
    if failure.fault in DEADLY:  # as if the node had been the first: the prompt may have been the cause
        decision.fallbacks = decision.fallbacks[: FALLBACKS - 1]
    return True


def _compare(
    router: Router,
    decision: Decision,
    request: RoutingRequest,
    prompt_tokens: int,
    cached_tokens: int,
    now_s: float,
) -> None:
    """Hold what the index knew of the prompt against what the engine found in its cache."""
    node, blocks, caches = decision.booking.node, decision.blocks, router.caches
    if not blocks.total_bytes:
        return
    predicted_tokens = min(decision.matched_bytes / blocks.total_bytes, 1.0) * prompt_tokens
    missing_tokens = predicted_tokens - cached_tokens
    node.predictions.add(abs(missing_tokens), prompt_tokens, now_s)
    cached_bytes = blocks.total_bytes * cached_tokens / prompt_tokens
    if hint := request.hints.kv_prefix_hint:
        caches.hints.report(request.model, hint, blocks, node.slot, int(cached_bytes))
    least_tokens = max(LEAST_MISSING_TOKENS, predicted_tokens * LEAST_MISSING_RATIO)
    if missing_tokens > least_tokens and _found_idle(decision):
        caches.recomputed(node, blocks, cached_bytes)


def _found_idle(decision: Decision) -> bool:
    """Whether the pick found no prefill to wait for: else what matched was perhaps not computed yet."""
    return decision.booking.node is decision.node and decision.receipt.parts.item(Term.WAIT, 0) <= 0.0
