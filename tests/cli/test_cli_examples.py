"""Every example of every `--help` page, run as it stands there."""

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from cli_support import KEY, LIMIT_S, free_ports, inferact, inferact_process, running, url_of, write_config
from test_cli_replay import write_trace

from extproc.cli import app

MODEL = "meta-llama/Llama-3-8B-Instruct"
EXAMPLES = [
    line.split()[1:]
    for command in app.registered_commands
    for line in (command.epilog or "").splitlines()
    if line.startswith("inferact ")
]
REQUEST_ID = next(words[1] for words in EXAMPLES if words[0] == "explain")
STARTED = {"up": "Inferact is ready", "serve": "ready: ", "sim": "http://", "status": "node-a100-01"}
"""What a command that goes on until Ctrl-C says when it runs."""
ENDS_WITH = {"up": 130, "serve": 130, "sim": 0, "status": 0}

pytestmark = [pytest.mark.envoy, pytest.mark.xdist_group("inferact examples")]


@dataclass(frozen=True)
class Fleet:
    """A folder with the files of the examples, where `inferact up` runs."""

    folder: Path
    url: str
    engine: int
    """The port of its engine."""


def prepared(folder: Path, engine: int) -> Path:
    """The files that the examples name."""
    node = {"id": "node-a100-01", "hardware": "a100-80g", "backend": "vllm", "models": [MODEL]}
    config = write_config(folder, node | {"endpoint": f"http://127.0.0.1:{engine}"})
    write_trace(folder)
    (folder / "request.json").write_text(json.dumps({"model": MODEL, "prompt": "Hello"}))
    return config


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One request, with the id of the example, has been answered."""
    folder, (engine,) = tmp_path_factory.mktemp("fleet"), free_ports(1)
    config = prepared(folder, engine)
    with contextlib.ExitStack() as stack:
        sim = ("sim", "--port", engine, "--model", MODEL)
        stack.enter_context(running(*sim, folder=tmp_path_factory.mktemp("engine")))
        up = running("up", "-c", config, folder=folder, INFERACT_ADMIN_KEY=KEY)
        stack.enter_context(up).wait_for("node node-a100-01 is healthy")
        port = yaml.safe_load(config.read_text())["scheduler"]["port"]
        ask(f"http://127.0.0.1:{port}")
        (folder / ".inferact").mkdir()
        shutil.copy(folder / "run" / "access.log", folder / ".inferact")
        yield Fleet(folder, url_of(config), engine)


def ask(url: str) -> None:
    """The request, and one more a second later, for a replay needs two; its log line is there then."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    for request_id in (REQUEST_ID, "another"):
        headers = {"x-request-id": request_id}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body, headers=headers, timeout=LIMIT_S, trust_env=False
        )
        assert answer.status_code == 200


def test_there_is_one_for_every_command() -> None:
    assert {words[0] for words in EXAMPLES} == {command.name for command in app.registered_commands}


def goes_on(words: list[str]) -> bool:
    return words[0] in {"up", "serve", "sim"} or "--watch" in words


@pytest.mark.parametrize("words", [words for words in EXAMPLES if not goes_on(words)], ids=" ".join)
def test_an_example_works(fleet: Fleet, words: list[str]) -> None:
    done = inferact_process(*words, folder=fleet.folder, INFERACT_ADMIN_KEY=KEY, INFERACT_URL=fleet.url)
    assert (done.code, bool(done.out or done.err)) == (0, True), done
    inferact("restore", "node-a100-01", INFERACT_ADMIN_KEY=KEY, INFERACT_URL=fleet.url)


@pytest.mark.parametrize("words", [words for words in EXAMPLES if goes_on(words)], ids=" ".join)
def test_an_example_that_goes_on_runs_until_ctrl_c(fleet: Fleet, words: list[str], tmp_path: Path) -> None:
    (port,) = free_ports(1)
    prepared(tmp_path, fleet.engine)
    ports = ("--port", port) if words[0] == "sim" or "--demo" in words else ()  # this machine's may be taken
    with running(*words, *ports, folder=tmp_path, INFERACT_ADMIN_KEY=KEY, INFERACT_URL=fleet.url) as command:
        command.wait_for(STARTED[words[0]])
        command.signal(signal.SIGINT)
        assert command.wait() == ENDS_WITH[words[0]], command.out + command.err


@pytest.mark.parametrize(
    ("typed", "expected"), [("inferact dr", "drain"), ("inferact drain ", "node-a100-01")]
)
def test_the_shell_completes_commands_and_nodes(fleet: Fleet, typed: str, expected: str) -> None:
    words = typed.split(" ")
    completing = {
        "_INFERACT_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = inferact_process(INFERACT_URL=fleet.url, **completing)
    assert done.out.split() == [expected]


def test_without_a_service_the_shell_completes_no_nodes() -> None:
    completing = {"_INFERACT_COMPLETE": "complete_bash", "COMP_WORDS": "inferact drain ", "COMP_CWORD": "2"}
    done = inferact_process(INFERACT_URL="http://127.0.0.1:1", **completing)
    assert (done.out.split(), done.err) == ([], "")
