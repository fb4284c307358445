"""Which nodes have the KV memory for a request."""

from typing import Final

from extproc.openai.request import RoutingRequest
from extproc.routing.lane import Lane
from extproc.routing.node import Node

CAUTION_RATIO: Final = 0.25
"""The part of its KV memory that one request may take on a node that ran out of memory not long ago."""
ROOM_MARGIN_TOKENS: Final = 16
"""What a chat template may add to a prompt, and a KV block rounds up."""


def fits_everywhere(lane: Lane, request: RoutingRequest, prompt_tokens: float) -> bool:
    """Whether every node that serves the model could hold the request, whatever its state."""
    return _needed_tokens(lane, request, prompt_tokens) < lane.least_room_tokens * CAUTION_RATIO


def with_room(nodes: list[Node], lane: Lane, request: RoutingRequest, prompt_tokens: float) -> list[Node]:
    """The nodes that could hold the request; all where none could: the engine's own 400 passes."""
    if fits_everywhere(lane, request, prompt_tokens):
        return nodes
    needed = _needed_tokens(lane, request, prompt_tokens)
    return [node for node in nodes if _room_tokens(lane, node) > needed] or nodes


def _needed_tokens(lane: Lane, request: RoutingRequest, prompt_tokens: float) -> float:
    output = request.max_tokens if request.max_tokens is not None else lane.output_tokens
    return prompt_tokens + output + ROOM_MARGIN_TOKENS


def _room_tokens(lane: Lane, node: Node) -> float:
    room_tokens = lane.room_tokens.item(node.slot)
    return room_tokens * CAUTION_RATIO if node.cautious else room_tokens
