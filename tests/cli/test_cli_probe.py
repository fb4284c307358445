"""`inferact check --probe`: what simulated engines, and servers that are none, answer."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cli_support import Outcome, free_ports, inferact, write_config

from extproc.simulator.engine import RunningSimulator, start
from extproc.simulator.options import SimulatorOptions

MODEL = "my-8b"
FAST: dict[str, Any] = {"models": (MODEL,), "speed": float("inf")}
EVENTS: dict[str, Any] = {"kv_events": "tcp://127.0.0.1:*", "kv_topic": "kv@my-8b"}


@contextmanager
def beside(make: Callable[[], Any]) -> Iterator[RunningSimulator]:
    """An engine on an event loop of its own, since the command has one, too."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        engine = asyncio.run_coroutine_threadsafe(make(), loop).result(20)
        yield engine
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def simulator(**options: Any) -> Any:
    """A simulated engine."""
    return beside(lambda: start(SimulatorOptions(**FAST | options)))


@contextmanager
def server(**answers: Any) -> Iterator[str]:
    """A server with these JSON answers by path (`_` for `/`), and 404 for all else; its URL."""

    async def answer(request: web.Request) -> web.Response:
        name = request.path.strip("/").replace("/", "_")
        return web.json_response(answers[name]) if name in answers else web.Response(status=404)

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return _Server(runner, f"http://127.0.0.1:{site.port}")

    with beside(run) as running:
        yield running.url


class _Server:
    def __init__(self, runner: web.AppRunner, url: str) -> None:
        self.url = url
        self._runner = runner

    async def stop(self) -> None:
        await self._runner.cleanup()


def node(url: str, node_id: str = "a", **members: Any) -> dict[str, Any]:
    return {
        "id": node_id,
        "hardware": "a100-80g",
        "backend": "vllm",
        "endpoint": url,
        "models": [MODEL],
        **members,
    }


def probe(folder: Path, *nodes: dict[str, Any]) -> tuple[Outcome, list[dict[str, Any]]]:
    """What the command says with `--json`."""
    outcome = inferact("check", "--probe", "-c", write_config(folder, *nodes), "--json")
    return outcome, json.loads(outcome.out)["nodes"]


def test_an_engine_tells_all_about_itself(tmp_path: Path) -> None:
    with simulator(num_blocks=500, **EVENTS) as engine:
        events = {"endpoint": engine.kv_endpoints[0], "topic": "kv@"}
        outcome, [found] = probe(tmp_path, node(engine.url, kv_events=events))
    assert outcome.code == 0
    assert found.pop("version")
    assert found == {
        "node": "a",
        "engine": "vLLM",
        "error": None,
        "serves": [MODEL],
        "not_served": [],
        "has_metrics": True,
        "kv_capacity_tokens": 500 * 16,
        "tells_cached_tokens": True,
        "caches_prefixes": True,
        "kv_events": True,
        "advice": [],
    }


def test_the_table_has_a_row_for_each_node_and_advice_below(tmp_path: Path) -> None:
    (closed,) = free_ports(1)
    with simulator() as engine:
        path = write_config(tmp_path, node(engine.url, "here"), node(f"http://127.0.0.1:{closed}", "gone"))
        outcome = inferact("check", "--probe", "-c", path)
    assert outcome.code == 1
    here, gone = (line for line in outcome.out.splitlines() if line.strip().startswith(("here ", "gone ")))
    assert MODEL in here and "no" in gone
    assert "gone: GET /health: connection refused" in outcome.out
    assert "here: with --kv-events-config, and `kv_events` here" in outcome.out


def test_a_model_that_the_engine_has_not_is_named_with_what_it_has(tmp_path: Path) -> None:
    with simulator() as engine:
        outcome, [found] = probe(tmp_path, node(engine.url, models=[MODEL, "other-70b"]))
    assert outcome.code == 1 and found["not_served"] == ["other-70b"]
    assert "it serves my-8b, not other-70b: correct `models`" in found["advice"][0]


def test_an_alias_is_asked_for_by_the_engines_name(tmp_path: Path) -> None:
    with simulator() as engine:
        outcome, [found] = probe(tmp_path, node(engine.url, models=["gpt"], model_aliases={"gpt": MODEL}))
    assert outcome.code == 0 and not found["not_served"] and found["tells_cached_tokens"]


def test_an_engine_that_answers_to_any_name_is_usable_under_another(tmp_path: Path) -> None:
    listed = {"data": [{"id": "gemma"}]}
    with server(health={}, v1_models=listed, props={"build_info": "b1"}) as url:
        outcome, [found] = probe(tmp_path, node(url, backend="llamacpp"))
    assert outcome.code == 0 and found["version"] == "b1"
    assert found["advice"] == [
        "it calls its model gemma, not my-8b, and answers to any name: is it the right one?",
        "it has no metrics: start it with --metrics",
    ]


def test_an_engine_that_does_not_tell_cached_tokens_is_to_be_told_to(tmp_path: Path) -> None:
    answer = {"usage": {"prompt_tokens": 400, "completion_tokens": 1, "prompt_tokens_details": None}}
    with server(health={}, v1_models={"data": [{"id": MODEL}]}, v1_completions=answer) as url:
        outcome, [found] = probe(tmp_path, node(url))
    assert outcome.code == 0 and found["tells_cached_tokens"] is False and found["caches_prefixes"] is None
    assert any("--enable-prompt-tokens-details" in advice for advice in found["advice"])


def test_an_engine_whose_events_are_not_configured_here_is_named(tmp_path: Path) -> None:
    sources = {"0": {"enable_kv_cache_events": True}}
    with server(health={}, v1_models={"data": [{"id": MODEL}]}, kv_event_sources=sources) as url:
        _, [found] = probe(tmp_path, node(url))
    assert found["kv_events"] is True
    assert any("name where in `kv_events`" in advice for advice in found["advice"])


def test_events_that_do_not_come_are_missed(tmp_path: Path) -> None:
    (closed,) = free_ports(1)
    with simulator() as engine:
        events = {"endpoint": f"tcp://127.0.0.1:{closed}"}
        outcome, [found] = probe(tmp_path, node(engine.url, kv_events=events))
    assert outcome.code == 0 and found["kv_events"] is False
    assert any("no KV event came" in advice for advice in found["advice"])


@pytest.mark.parametrize("answer", [[], 1, {"data": 1}, {"data": [{"id": 7}]}, {"usage": 5, "version": []}])
def test_nonsense_is_unknown(answer: Any, tmp_path: Path) -> None:
    paths = ("version", "v1_models", "v1_completions", "kv_event_sources", "metrics")
    with server(health={}, **dict.fromkeys(paths, answer)) as url:
        outcome, [found] = probe(tmp_path, node(url))
    assert outcome.code == 0
    assert (found["version"], found["serves"], found["kv_capacity_tokens"]) == (None, None, None)


def test_a_file_that_does_not_check_is_not_probed(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("nodes: []\n")
    checked = inferact("check", "--probe", "-c", "bad.yaml", folder=tmp_path)
    assert checked.code == 1 and "nodes:" in checked.err and not checked.out
