"""What is valid and hardly meant, and what would keep a service from starting: noted, with its line."""

from pathlib import Path

import pytest
from config_files import NODE, load, marked_line, node, scheduler

from extproc.config import Problem


def notes(folder: Path, text: str) -> list[Problem]:
    found: list[Problem] = []
    load(folder, text, environ={}, note=found.append, serving=False)
    return found


SECOND = NODE.removeprefix("nodes:\n").replace("n1", "n2")
OURS = "is Inferact's own address"
DOUBTS = [
    (node("endpoint: http://engine # here"), "nodes[0].endpoint", "names no port: 80 is assumed"),
    (node("endpoint: https://engine/a # here"), "nodes[0].endpoint", "names no port: 443 is assumed"),
    (NODE + SECOND.replace(":8000", ":8000/ # here"), "nodes[1].endpoint", "is that of node `n1`"),
    (node("endpoint: http://127.0.0.1:9000 # here"), "nodes[0].endpoint", f"{OURS} (`scheduler.port`)"),
    (node("endpoint: http://localhost:9001 # here"), "nodes[0].endpoint", f"{OURS} (`scheduler.admin_port`)"),
    (
        scheduler("# above", "host: 10.0.0.1", "port: 8000").replace("1:8000", "1:8000 # here"),
        "nodes[0].endpoint",
        f"{OURS} (`scheduler.port`)",
    ),
    (
        scheduler("request_timeout_ms: 999 # here"),
        "scheduler.request_timeout_ms",
        "gives requests 999 ms in all",
    ),
    (node("api_key_env: KEY # here"), "nodes[0].api_key_env", "the variable KEY, for the API key of node"),
    (
        node("endpoint: https://x:1", "tls: {ca_file: none.pem} # here"),
        "nodes[0].tls.ca_file",
        "cannot be read: No such file",
    ),
    (scheduler("run_dir: inferact.yaml/run # here"), "scheduler.run_dir", "inferact.yaml is not a folder"),
]


@pytest.mark.parametrize(("text", "key", "message"), DOUBTS)
def test_a_doubt_is_noted_with_its_line(tmp_path: Path, text: str, key: str, message: str) -> None:
    [note] = notes(tmp_path, text)
    assert (note.line, note.key) == (marked_line(text), key)
    assert message in note.message


@pytest.mark.parametrize(
    "text",
    [
        NODE,
        node("endpoint: http://engine:80"),
        node("endpoint: http://10.0.0.1:9000"),
        node("model_aliases: {public: a-model-of-no-list}"),
        NODE + SECOND.replace(":8000", ":8000/engine-b"),
        scheduler("request_timeout_ms: 1000", "run_dir: not/yet/there"),
    ],
)
def test_nothing_is_said_of_what_is_usual(tmp_path: Path, text: str) -> None:
    assert notes(tmp_path, text) == []
