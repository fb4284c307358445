"""What a request costs a node, in seconds."""

from extproc.hardware import decode_step_s, model_shape, prefill_s
from extproc.openai.request import RoutingRequest
from extproc.routing.node import Node

BYTES_PER_TOKEN = 4.0
"""Prompt bytes a token: English text under the tokenizers in use."""
EXPECTED_OUTPUT_TOKENS = 256
"""Answer length assumed where the request sets no lower limit."""
DECODE_WEIGHT = 0.25
"""Seconds of decoding count a quarter: they are shared with the rest of the batch."""


def prompt_tokens(request: RoutingRequest) -> int:
    """Prompt length, estimated from its bytes; at least 1."""
    return max(1, round(request.prompt_bytes / BYTES_PER_TOKEN))


def output_tokens(request: RoutingRequest) -> int:
    """Answer length expected: the request's limit, if that is under the usual length."""
    limit = request.max_tokens
    return EXPECTED_OUTPUT_TOKENS if limit is None else max(1, min(limit, EXPECTED_OUTPUT_TOKENS))


def service_s(node: Node, request: RoutingRequest) -> float:
    """Seconds of the node's work that the request takes: its prefill, and its share of decoding."""
    shape = model_shape(node.config.engine_model(request.model))  # the public name may tell no size
    prompt, output = prompt_tokens(request), output_tokens(request)
    step = decode_step_s(node.profile, shape, node.in_flight + 1, prompt + output / 2)
    return prefill_s(node.profile, shape, prompt) + DECODE_WEIGHT * output * step


def cost_s(node: Node, own_s: float, now_s: float) -> float:
    """Seconds until the node would be done with the request, over its weight.

    Requests that others sent are assumed to be like this one. Nodes of weight 0 are only compared with
    each other, as equals.
    """
    load_s = node.booked_s + node.foreign_requests(now_s) * own_s
    return (load_s + own_s) / (node.config.weight or 1.0)
