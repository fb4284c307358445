"""What the end of a request teaches the router: times, lengths, and what engines really had cached."""

from typing import Final

from extproc.openai.request import Api, RoutingRequest
from extproc.openai.usage import Usage
from extproc.routing.outcome import Ended, Outcome
from extproc.routing.router import Decision, Router

_GENERATING: Final = frozenset({Api.CHAT_COMPLETIONS, Api.COMPLETIONS, Api.RESPONSES})


def learn(
    router: Router,
    decision: Decision,
    request: RoutingRequest,
    outcome: Outcome,
    arrived_s: float,
    now_s: float,
) -> None:
    """Tell the router what became of a decision on a request that came at `arrived_s`, by its clock."""
    served = decision.booking.node.id == outcome.node_id
    if served and outcome.ttft_s is not None and request.stream:
        router.first_token(decision, arrived_s + outcome.ttft_s, now_s)
    elsewhere = None if served else router.nodes.get(outcome.node_id)
    if elsewhere is not None and outcome.ended is Ended.COMPLETE:
        router.caches.insert(elsewhere, decision.blocks)  # of the attempt that failed we heard too late
    usage = outcome.usage
    if usage is None or request.api not in _GENERATING:
        return
    decode_s = 0.0 if outcome.ttft_s is None or not served else outcome.duration_s - outcome.ttft_s
    # What follows another response begins with text that is not in the body: so tokens tell nothing of bytes.
    prompt_tokens = usage.prompt_tokens if request.previous_response_id is None else 0
    router.answered(decision, request.model, prompt_tokens, usage.output_tokens, decode_s)
    if served and prompt_tokens and usage.cached_tokens is not None:
        _compare(router, decision, request, usage, usage.cached_tokens, now_s)


def _compare(
    router: Router,
    decision: Decision,
    request: RoutingRequest,
    usage: Usage,
    cached_tokens: int,
    now_s: float,
) -> None:
    """Hold what the index knew of the prompt against what the engine found in its cache."""
    node, blocks = decision.booking.node, decision.blocks
    bytes_per_token = blocks.total_bytes / usage.prompt_tokens
    if not bytes_per_token:
        return
    predicted_tokens = min(decision.matched_bytes / bytes_per_token, usage.prompt_tokens)
    node.predictions.add(abs(predicted_tokens - cached_tokens), usage.prompt_tokens, now_s)
    router.caches.found(node, request, blocks, decision.matched_bytes, cached_tokens * bytes_per_token)
