"""`inferact drain --wait`: what it waits for, and what it says meanwhile."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_support import KEY, LIMIT_S, free_ports, inferact, running, url_of, write_config
from demo_support import until

from extproc.cli.operate import awaited, left_s

IDLE = {
    "status": "healthy",
    "requests_in_flight": 0,
    "engine_running": 0,
    "queue_depth": 0,
    "report_age_s": 0.2,
}
SILENT = {"engine_running": None, "queue_depth": None, "report_age_s": None}
MODEL = "simulated-8b"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, None),
        ({"requests_in_flight": 1}, "1 request"),
        ({"requests_in_flight": 2, "engine_running": 2}, "2 requests"),
        ({"requests_in_flight": 1, "engine_running": 2, "queue_depth": 1}, "3 requests (1 of them from this"),
        ({"engine_running": 1}, "1 request (0 of them from this service)"),
        ({"queue_depth": 1}, "1 request (0 of them from this service)"),
        ({"report_age_s": 3.0}, "its engine's next report"),
        (SILENT, "its engine's next report"),
        (SILENT | {"status": "offline"}, None),
        (SILENT | {"status": "offline", "requests_in_flight": 1}, "1 request"),
    ],
)
def test_a_node_that_was_drained_two_seconds_ago(state: dict[str, Any], expected: str | None) -> None:
    said = awaited(IDLE | state, drained_for_s=2.0)
    assert said == expected or (expected is not None and said is not None and said.startswith(expected))


def test_an_engine_that_never_reports_is_not_waited_for_for_ever() -> None:
    assert awaited(IDLE | SILENT, drained_for_s=60.0) is None


@pytest.mark.parametrize(
    ("running", "ended", "drained_for_s", "p99_s", "expected_s"),
    [
        (4, 2, 10.0, None, 20.0),  # five seconds each, as until now
        (4, 0, 10.0, 30.0, 20.0),  # the slowest answers took 30 s, and 10 s are over
        (4, 0, 40.0, 30.0, None),  # slower than all before
        (4, 0, 10.0, None, None),
        (4, -1, 10.0, None, None),  # one more came, from somebody else
        (0, 2, 10.0, 30.0, None),
    ],
)
def test_how_long_the_rest_takes(
    running: int, ended: int, drained_for_s: float, p99_s: float | None, expected_s: float | None
) -> None:
    assert left_s(running, ended, drained_for_s, p99_s) == expected_s


@contextmanager
def request_of_somebody_else(port: int) -> Iterator[list[int]]:
    """A request to the engine itself, of about three seconds; the list gets its status when it has ended."""
    statuses: list[int] = []
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 60, "ignore_eos": True}

    def ask() -> None:
        url = f"http://127.0.0.1:{port}/v1/completions"
        statuses.append(httpx.post(url, json=body, timeout=LIMIT_S, trust_env=False).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield statuses
    finally:
        thread.join(LIMIT_S)


def engine_running(config: Path) -> object:
    """What the service knows of its only engine."""
    (node,) = json.loads(inferact("status", "--json", "--url", url_of(config)).out)["nodes"]
    return node["engine_running"]


def test_requests_that_this_service_did_not_send_are_waited_for_too(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    node = {
        "id": "a",
        "hardware": "a100-80g",
        "backend": "vllm",
        "endpoint": f"http://127.0.0.1:{port}",
        "models": [MODEL],
    }
    config = write_config(tmp_path, node)
    (tmp_path / "engine").mkdir()
    engine = ("sim", "--port", port, "--token-interval-s", 0.05)
    with (
        running(*engine, folder=tmp_path / "engine"),
        running("serve", "-c", config, folder=tmp_path, INFERACT_ADMIN_KEY=KEY) as service,
    ):
        service.wait_for("node a is healthy")
        with request_of_somebody_else(port) as statuses:
            until(lambda: engine_running(config) == 1)
            drain = ("drain", "a", "--wait", "--json", "--url", url_of(config))
            drained = inferact(*drain, INFERACT_ADMIN_KEY=KEY)
            assert statuses == [200], "the wait ends after the request"
    assert "a is drained; waiting for 1 request (0 of them from this service)" in drained.err
    state = json.loads(drained.out)
    assert (state["engine_running"], state["requests_in_flight"]) == (0, 0)


def test_that_nothing_is_known_of_the_engine_is_said(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with running("serve", "-c", config, folder=tmp_path, INFERACT_ADMIN_KEY=KEY) as service:
        service.wait_for("node node-0 is offline")
        drained = inferact("drain", "node-0", "--wait", "--url", url_of(config), INFERACT_ADMIN_KEY=KEY)
    assert drained.out == "node-0 is drained; 0 requests running\n"
    assert "the engine of node-0 reports nothing" in drained.err
