"""Nodes and requests to route."""

import json
import random
from typing import Any

import pytest

from extproc.config import KvCache, NodeConfig
from extproc.openai.errors import ApiError
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing.loads import Work
from extproc.routing.node import Health, Node
from extproc.routing.router import Decision, Router

MODEL = "meta-llama/Llama-3-8B-Instruct"
WORK = Work(1000.0, 100.0, 1.0)
"""What is booked where it does not matter what."""
NOTHING = (0.0, 0.0, 0.0, 0.0)
"""What is booked on an idle node."""
SLOW_TO_FAST = ("a6000", "rtx-4090", "a100-40g", "a100-80g", "h100-80g")


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


def new_prompt(number: int, tokens: int = 4000, **members: Any) -> RoutingRequest:
    """A request that is all prefill, and shares nothing with those of other numbers."""
    text = f"{number:06} ".ljust(tokens * 4, "x")
    return make_request(prompt=text, **{"max_tokens": 1, **members})


def make_router(*nodes: Node, cap: int | None = None, **cache: Any) -> Router:
    """A router whose random choices repeat from run to run; `cache` is its `kv_cache`."""
    return Router(nodes, cap, random.Random(1), KvCache(**cache))


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


def booked(router: Router, node: Node, now_s: float = 0.0) -> tuple[float, float, float, float]:
    """Requests, tokens, context tokens and seconds of prefill that are booked on a node."""
    load = router.loads.on[node.slot]
    return load.requests, load.tokens, load.context_tokens, max(0.0, load.busy_until_s - now_s)
