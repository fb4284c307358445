"""A configuration that changes while requests run through the real Envoy."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from envoy_stack import MODEL, STREAM, Stack, node_entry, running_stack, until

from extproc.envoyconfig import told
from extproc.rundir import RunDir
from extproc.simulator.engine import start
from extproc.simulator.options import SimulatorOptions

pytestmark = pytest.mark.envoy

SLOW = {"token_interval_s": 0.4, "speed": 1.0, "max_num_seqs": 512}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """Nodes a and b, whose streams take their time, and a file that nobody watches: a test says when."""
    async with running_stack(sims={"a": SLOW, "b": SLOW}) as running:
        running.service.reloader._watching.cancel()
        yield running


@contextlib.asynccontextmanager
async def one_more(stack: Stack, name: str) -> AsyncIterator[dict[str, Any]]:
    """A running engine that the configuration does not know yet; its entry there."""
    options = SimulatorOptions(**{"name": name, "models": (MODEL,), "record": True} | SLOW)
    sim = await start(options, "127.0.0.1", 0)
    stack.sims[name] = sim
    try:
        yield node_entry(name, sim.url)
    finally:
        await sim.stop()


def written(stack: Stack) -> dict[str, Any]:
    return yaml.safe_load(stack.config_file.read_text())


def write(stack: Stack, data: dict[str, Any]) -> None:
    stack.config_file.write_text(yaml.safe_dump(data))


async def clusters(stack: Stack) -> set[str]:
    """Nodes that Envoy knows."""
    admin = f"http://127.0.0.1:{stack.service.config.scheduler.envoy_admin_port}"
    answer = (await stack.client.get(f"{admin}/clusters", params={"format": "json"})).json()
    return {one["name"] for one in answer["cluster_statuses"]} & {"a", "b", "c"}


async def until_clusters(stack: Stack, wanted: set[str]) -> None:
    async with asyncio.timeout(5):
        while True:
            if await clusters(stack) == wanted:
                return
            await asyncio.sleep(0.02)


class Streams:
    """A hundred clients that read streams: one each, or one after the other until `stop`."""

    def __init__(self, stack: Stack) -> None:
        self.ends: Counter[str] = Counter()
        self.nodes: Counter[str] = Counter()
        self.begun = 0
        self._asked = 0
        self._stack = stack
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, count: int, tokens: int, again: bool = False) -> None:
        """Returns once each of them gets tokens."""
        wanted = self.begun + count
        self._tasks += [asyncio.create_task(self._read(tokens, again)) for _ in range(count)]
        await until(lambda: self.begun >= wanted, 60)

    async def over(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _read(self, tokens: int, again: bool) -> None:
        while True:
            await self._read_one(tokens)
            if self._stopping or not again:
                return

    async def _read_one(self, tokens: int) -> None:
        last, lines = "nothing", 0
        self._asked += 1
        question = [{"role": "user", "content": f"question {self._asked}"}]
        body = STREAM | {"messages": question, "max_tokens": tokens}
        async with self._stack.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            self.nodes[answer.headers.get("x-inferact-node", "none")] += 1
            async for line in answer.aiter_lines():
                lines += 1
                if lines == 1:
                    self.begun += 1
                last = line or last
        self.ends[f"{answer.status_code} {last}"] += 1


async def test_a_node_comes_one_goes_and_a_weight_changes_under_a_hundred_streams(stack: Stack) -> None:
    streams = Streams(stack)
    gone = stack.service.router.nodes["b"]
    async with one_more(stack, "c") as entry:
        await streams.begin(60, tokens=40)
        await streams.begin(40, tokens=4, again=True)
        on_gone = gone.in_flight
        assert on_gone > 10, stack.in_flight()
        data = written(stack)
        data["nodes"] = [data["nodes"][0] | {"weight": 0.5}, entry]
        write(stack, data)
        answer = await stack.admin("/admin/reload")
        assert answer.status_code == 200, answer.text
        changes = answer.json()
        assert (changes["added"], changes["removed"]) == (["c"], ["b"])
        assert changes["changed"] == [{"node": "a", "keys": ["weight"], "starts_anew": False}]
        assert gone.in_flight > 10, "its streams go on"
        assert await clusters(stack) == {"a", "b", "c"}
        before = streams.nodes["b"]
        await until(lambda: streams.nodes["c"] > 20, 30)
        assert streams.nodes["b"] == before
        await streams.over()
        assert set(streams.ends) == {"200 data: [DONE]"}
        await until(lambda: gone.slot < 0, 10)
        assert gone.in_flight == 0
        await until_clusters(stack, {"a", "c"})
    assert stack.service.router.nodes["a"].config.weight == 0.5
    assert 'node="b"' not in (await stack.client.get("/metrics")).text
    assert await stack.metric("inferact_requests_total") == stack.service.telemetry.requests_routed - before


async def test_a_broken_file_under_load_changes_nothing(stack: Stack) -> None:
    streams = Streams(stack)
    await streams.begin(20, tokens=4, again=True)
    router, config = dict(stack.service.router.nodes), stack.service.config
    text = stack.config_file.read_text()
    stack.service.reloader.start()
    stack.config_file.write_text(text.replace("a100-80g", "a100-90g", 1))
    errors: list[str] = []
    async with asyncio.timeout(10):
        while not errors:
            errors = (await stack.client.get("/status")).json()["config_errors"]
            await asyncio.sleep(0.05)
    (error,) = errors
    line = text[: text.index("a100-80g")].count("\n") + 1
    assert error.startswith(f"{stack.config_file}:{line}: nodes[0].hardware: ")
    assert stack.service.config is config
    assert all(stack.service.router.nodes[name] is node for name, node in router.items())
    refused = await stack.admin("/admin/reload")
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_configuration")
    await streams.over()
    assert set(streams.ends) == {"200 data: [DONE]"}
    stack.config_file.write_text(text)
    assert not any((await stack.admin("/admin/reload")).json().values())
    assert (await stack.client.get("/status")).json()["config_errors"] == []


async def test_a_node_that_moves_is_found_at_its_new_address(stack: Stack) -> None:
    async with one_more(stack, "c") as entry:
        data = written(stack)
        data["nodes"] = [data["nodes"][0] | {"endpoint": entry["endpoint"]}]
        write(stack, data)
        (change,) = (await stack.admin("/admin/reload")).json()["changed"]
        assert change == {"node": "a", "keys": ["endpoint"], "starts_anew": True}
        answers = [await stack.chat(max_tokens=1) for _ in range(5)]
        assert {answer.status_code for answer in answers} == {200}
        assert sum(stack.sims["c"].stats.attempts.values()) == 5


async def test_a_drained_node_is_still_drained_when_it_comes_back(stack: Stack) -> None:
    await stack.drain("b")
    data = written(stack)
    write(stack, data | {"nodes": data["nodes"][:1]})
    assert (await stack.admin("/admin/reload")).json()["removed"] == ["b"]
    write(stack, data)
    assert (await stack.admin("/admin/reload")).json()["added"] == ["b"]
    assert stack.service.router.nodes["b"].drained
    answers = [await stack.chat(max_tokens=1) for _ in range(10)]
    assert {answer.headers["x-inferact-node"] for answer in answers} == {"a"}


async def test_a_dry_run_tells_and_changes_nothing(stack: Stack) -> None:
    data = written(stack)
    data["nodes"] = data["nodes"][:1]
    data["kv_cache"] = {"policy": "lru"}
    data["scheduler"] |= {"port": 1, "max_queue": 7}
    config = stack.service.config
    write(stack, data)
    answer = (await stack.admin("/admin/reload?dry_run=true")).json()
    assert answer["removed"] == ["b"]
    assert [setting["key"] for setting in answer["settings"]] == ["scheduler.max_queue", "kv_cache.policy"]
    assert [setting["key"] for setting in answer["needs_restart"]] == ["scheduler.port"]
    assert stack.service.config is config


async def test_what_envoy_does_not_take_is_refused_and_taken_back(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told, "CLUSTERS_LIMIT_S", 1.0)
    data = written(stack)
    no_certificate = stack.folder / "ca.pem"
    no_certificate.write_text("this is no certificate")
    entry = node_entry("c", "https://127.0.0.1:1", tls={"ca_file": str(no_certificate)})
    clusters_before = RunDir(stack.service.config.scheduler.run_dir).clusters.read_text()
    write(stack, data | {"nodes": [data["nodes"][0], entry]})
    refused = await stack.admin("/admin/reload")
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_configuration")
    assert "Envoy has not taken the new clusters" in refused.json()["error"]["message"]
    assert list(stack.service.router.nodes) == ["a", "b"]
    assert RunDir(stack.service.config.scheduler.run_dir).clusters.read_text() == clusters_before
    assert (await stack.chat(max_tokens=1)).status_code == 200
    write(stack, data)
    assert (await stack.admin("/admin/reload")).status_code == 200
