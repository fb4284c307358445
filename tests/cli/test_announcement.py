"""What `inferact up` says once it runs, by the state of its nodes."""

from pathlib import Path

import pytest

from extproc.cli.announcement import announcement
from extproc.config import Config
from extproc.routing.node import Health, Node


def said(*healths: Health, drained: tuple[str, ...] = (), admin: bool = True, key: str | None = None) -> str:
    """The text for nodes `n0`, `n1`, ... of these healths; each serves the model `m-` and its id."""
    entries = [
        {
            "id": f"n{index}",
            "hardware": "a100-80g",
            "backend": "vllm",
            "endpoint": f"http://127.0.0.1:{8000 + index}",
            "models": [f"m-n{index}"],
        }
        for index in range(len(healths))
    ]
    config = Config.model_validate({"nodes": entries})
    nodes = [Node(config=each, profile=each.profile) for each in config.nodes]
    for node, node.health in zip(nodes, healths, strict=True):
        node.drained = node.id in drained
    return announcement(config, Path("inferact.yaml"), nodes, admin, key)


@pytest.mark.parametrize(
    ("healths", "count"),
    [
        ([Health.OFFLINE], "0 of 1 node answer"),
        ([Health.OFFLINE, Health.DEGRADED, Health.OFFLINE], "0 of 3 nodes answer"),
    ],
)
def test_without_a_node_that_answers_it_does_not_say_ready(healths: list[Health], count: str) -> None:
    text = said(*healths)
    assert f"Inferact is listening at http://127.0.0.1:9000; {count}: see `inferact status`" in text
    assert "ready" not in text and "curl" not in text


@pytest.mark.parametrize(
    ("healths", "count"),
    [
        ([Health.HEALTHY], "1 of 1 node answers"),
        ([Health.OFFLINE, Health.HEALTHY], "1 of 2 nodes answers"),
        ([Health.HEALTHY, Health.HEALTHY], "2 of 2 nodes answer"),
    ],
)
def test_how_many_nodes_answer_is_said(healths: list[Health], count: str) -> None:
    assert f"Inferact is ready at http://127.0.0.1:9000 ({count})." in said(*healths)


def test_the_question_is_for_a_model_that_can_answer() -> None:
    text = said(Health.OFFLINE, Health.HEALTHY, Health.HEALTHY, drained=("n1",))
    assert "m-n2" in text and "m-n0" not in text and "m-n1" not in text


def test_drained_nodes_are_named_and_offered_for_restoring_alone() -> None:
    text = said(Health.HEALTHY, Health.HEALTHY, drained=("n0",))
    assert "  drained   n0\n" in text
    assert "drain n1 --wait" in text and "restore n0" in text
    assert "drain n0" not in text


def test_where_all_are_drained_no_drain_is_offered() -> None:
    text = said(Health.HEALTHY, drained=("n0",))
    assert "1 of 1 node answers, and all that do are drained" in text
    assert "restore n0" in text and "--wait" not in text


def test_commands_show_where_the_admin_key_goes() -> None:
    assert "INFERACT_ADMIN_KEY=... " in said(Health.HEALTHY)
    assert "INFERACT_ADMIN_KEY=made " in said(Health.HEALTHY, key="made")
    assert "INFERACT_ADMIN_KEY=" not in said(Health.HEALTHY, admin=False)
