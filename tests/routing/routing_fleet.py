"""Nodes and requests to route."""

import json
import random
from typing import Any

import pytest

from extproc.config import NodeConfig
from extproc.openai.errors import ApiError
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing.node import Health, Node
from extproc.routing.router import Decision, Router

MODEL = "meta-llama/Llama-3-8B-Instruct"


def make_node(node_id: str, *models: str, health: Health = Health.HEALTHY, **settings: Any) -> Node:
    """An idle, healthy node; `settings` are those of its configuration."""
    config = NodeConfig(
        **{
            "id": node_id,
            "hardware": "a100-80g",
            "backend": "vllm",
            "endpoint": "http://10.0.0.1:8000",
            "models": models or (MODEL,),
            **settings,
        }
    )
    return Node(config=config, profile=config.profile, health=health)


def make_request(model: str = MODEL, prompt: str = "hello", **members: Any) -> RoutingRequest:
    """A completion request; `affinity` and `priority` go where the API has them."""
    hints = {
        name: members.pop(key)
        for key, name in {"affinity": "node_affinity", "priority": "priority"}.items()
        if key in members
    }
    body = {"model": model, "prompt": prompt, "x-inferact": hints, **members}
    return parse(Api.COMPLETIONS, json.dumps(body).encode())


def make_router(*nodes: Node, cap: int | None = None) -> Router:
    """A router whose random choices repeat from run to run."""
    return Router(nodes, cap, random.Random(1))


def decided(router: Router, request: RoutingRequest | None = None, now_s: float = 0.0) -> Decision:
    """The decision on a request that must get one."""
    decision = router.decide(request or make_request(), now_s)
    assert decision is not None
    return decision


def refusal(router: Router, request: RoutingRequest) -> ApiError:
    """The error for a request that must get one; nothing may be booked for it."""
    before = {node.id: node.in_flight for node in router.nodes.values()}
    with pytest.raises(ApiError) as raised:
        router.decide(request, 0.0)
    assert before == {node.id: node.in_flight for node in router.nodes.values()}
    return raised.value
