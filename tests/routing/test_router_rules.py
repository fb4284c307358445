"""Rules that every decision keeps, over random fleets and requests."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from routing_fleet import (
    SLOW_TO_FAST,
    make_node,
    make_request,
)

from extproc.openai.errors import ApiError
from extproc.routing.loads import Work
from extproc.routing.node import Health, Node
from extproc.routing.router import FALLBACKS, Router


@st.composite
def fleets(draw: st.DrawFn) -> list[Node]:
    """Nodes of every kind and in every state."""
    nodes = []
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)):
        node = make_node(
            name,
            *draw(st.lists(st.sampled_from(["m", "k"]), unique=True, min_size=1)),
            health=draw(st.sampled_from(Health)),
            weight=draw(st.sampled_from([0.0, 0.001, 0.5, 1.0])),
            hardware=draw(st.sampled_from(SLOW_TO_FAST)),
            model_aliases=draw(st.sampled_from([{}, {"alias": "m"}])),
        )
        node.drained = draw(st.booleans())
        nodes.append(node)
    return nodes


@settings(max_examples=300, deadline=None)
@given(
    nodes=fleets(),
    bookings=st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.0, 10.0)), max_size=12),
    model=st.sampled_from(["m", "k", "alias"]),
    affinity=st.none() | st.sampled_from("abcdef"),
    cap=st.none() | st.integers(1, 2),
    seed=st.integers(0, 3),
)
def test_every_decision_keeps_the_rules(
    nodes: list[Node],
    bookings: list[tuple[str, float]],
    model: str,
    affinity: str | None,
    cap: int | None,
    seed: int,
) -> None:
    router = Router(nodes, cap, random.Random(seed))
    for name, seconds in bookings:
        if name in router.nodes:
            router.book(router.nodes[name], Work(100.0, 10.0, seconds), 0.0)
    before = {node.id: node.in_flight for node in nodes}
    allowed = [
        node
        for node in nodes
        if model in node.config.serves
        and node.health is not Health.OFFLINE
        and not node.drained
        and affinity in (None, node.id)
    ]
    weighted = [node for node in allowed if node.config.weight > 0] or allowed
    try:
        decision = router.decide(make_request(model, affinity=affinity), 0.0)
    except ApiError:
        assert not allowed
        return
    assert allowed
    if decision is None:
        assert cap is not None
        assert all(node.in_flight >= cap for node in weighted)
        return
    chosen = (decision.node, *decision.fallbacks)
    assert decision.node in weighted
    assert set(map(id, chosen)) <= set(map(id, allowed))
    assert len(chosen) == len(set(map(id, chosen)))
    assert len(decision.fallbacks) <= (0 if affinity else FALLBACKS)
    assert len({node.config.engine_model(model) for node in chosen}) == 1
    full = [cap is not None and before[node.id] >= cap for node in chosen]
    assert not full[0]
    ranks = [(node.config.weight == 0, over) for node, over in zip(chosen, full, strict=True)]
    assert ranks == sorted(ranks)
    after = {node.id: node.in_flight for node in nodes}
    assert after == {**before, decision.node.id: before[decision.node.id] + 1}
