"""Which nodes prefill and which decode: as written, or by their hardware."""

from pathlib import Path
from typing import Any

import pytest
from config_files import NODE, load, node

from extproc.config import NodeConfig, Problem, Role
from extproc.config.roles import one_role, roles

MODEL = "m"


def made(name: str, hardware: str = "a100-80g", **settings: Any) -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "id": name,
            "hardware": hardware,
            "backend": "vllm",
            "endpoint": f"http://10.0.0.1:8000/{name}",
            "models": [MODEL],
            **settings,
        }
    )


def halves(*nodes: NodeConfig, model: str = MODEL) -> dict[str, str]:
    return {name: role.value for name, role in roles(nodes)[model].items()}


def test_roles_in_the_file_count_and_a_node_without_one_does_both() -> None:
    nodes = made("a", role="prefill"), made("b"), made("c", role="decode")
    assert halves(*nodes) == {"a": "prefill", "b": "both", "c": "decode"}


@pytest.mark.parametrize(("count", "prefilling"), [(2, 1), (3, 1), (5, 1), (6, 2), (8, 2), (9, 3)])
def test_without_roles_a_third_prefills_but_never_none_and_never_all(count: int, prefilling: int) -> None:
    found = halves(*(made(f"n{at}") for at in range(count)))
    assert list(found.values()).count("prefill") == prefilling
    assert list(found.values()).count("decode") == count - prefilling


def test_a_node_alone_does_both() -> None:
    assert halves(made("a")) == {"a": "both"}


def test_those_prefill_that_compute_fastest() -> None:
    nodes = made("slow", "a6000"), made("fast", "h100-80g"), made("many", "a100-80g", gpu_count=4)
    assert halves(*nodes) == {"slow": "decode", "fast": "decode", "many": "prefill"}


def test_engines_without_a_protocol_take_whole_requests_only() -> None:
    nodes = made("tgi", "h100-80g", backend="tgi"), made("a"), made("b")
    assert halves(*nodes) == {"tgi": "both", "a": "prefill", "b": "decode"}


def test_no_half_is_derived_for_sglang_which_is_told_at_its_start() -> None:
    assert halves(made("a", backend="sglang"), made("b", backend="sglang")) == {"a": "both", "b": "both"}


def test_a_custom_engine_counts_by_the_protocol_that_it_names() -> None:
    custom = {"backend": "custom", "engine": {"protocol": "vllm"}}
    assert halves(made("a", **custom), made("b", **custom)) == {"a": "prefill", "b": "decode"}


def test_a_node_may_differ_from_model_to_model() -> None:
    nodes = made("a", models=["m", "n"]), made("b", "a6000"), made("c", "h100-80g", models=["n"])
    found = roles(nodes)
    assert halves(*nodes) == {"a": "prefill", "b": "decode"}
    assert halves(*nodes, model="n") == {"a": "decode", "c": "prefill"}
    assert one_role(found, "a") is None
    assert one_role(found, "b") is Role.DECODE


def split(text: str, value: str = "true") -> str:
    return f"{text}batching: {{prefill_decode_split: {value}}}\n"


def second(text: str) -> str:
    return text + NODE.removeprefix("nodes:\n").replace("n1", "n2").replace(":8000", ":8001")


def test_the_effective_configuration_shows_the_roles_in_force(tmp_path: Path) -> None:
    shown = load(tmp_path, split(second(NODE))).effective()["nodes"]
    assert [entry["role"] for entry in shown] == ["prefill", "decode"]
    assert all("role" not in entry for entry in load(tmp_path, second(NODE)).effective()["nodes"])


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        (
            node("role: prefill"),
            "nodes[0].role",
            "has no effect without `batching.prefill_decode_split: true`",
        ),
        (split(NODE), "batching.prefill_decode_split", "needs two nodes with a prefill/decode protocol"),
        (
            split(second(NODE), "true, strategy: static, max_batch_size: 8"),
            "batching.prefill_decode_split",
            "has no effect with `strategy: static`",
        ),
    ],
)
def test_a_role_or_a_split_that_changes_nothing_is_noted(
    tmp_path: Path, text: str, key: str, said: str
) -> None:
    found: list[Problem] = []
    load(tmp_path, text, note=found.append)
    assert [(note.key, said in note.message) for note in found] == [(key, True)]
