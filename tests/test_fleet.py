"""The fleet against real HTTP servers: what it asks, what it learns, and what it survives."""

import asyncio
import gc
import logging
import ssl
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from extproc.config.node import NodeConfig
from extproc.engines.client import EngineClient, NoAnswerError, open_session
from extproc.fleet import Fleet, Pace
from extproc.routing.health import METRICS_STALE_S
from extproc.routing.node import Health, Node

TLS = Path(__file__).parent / "data" / "tls"
BRISK = Pace(probe_period_s=0.02, probe_timeout_s=5, scrape_period_s=0.02, scrape_timeout_s=5)
HASTY_PROBE = Pace(probe_period_s=0.02, probe_timeout_s=0.1, scrape_period_s=0.02, scrape_timeout_s=5)
HASTY_SCRAPE = Pace(probe_period_s=0.02, probe_timeout_s=5, scrape_period_s=0.02, scrape_timeout_s=0.1)
KEY = "sk-never-to-be-seen"
LONG_S = 10.0

METRICS = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.25\n"


class Engine:
    """An HTTP server whose answers a test chooses: a status, a body, or a handler."""

    def __init__(self) -> None:
        self.health: int | Callable[[web.Request], Awaitable[web.StreamResponse]] = 200
        self.metrics: bytes | Callable[[web.Request], Awaitable[web.StreamResponse]] = METRICS
        self.asked: Counter[str] = Counter()
        self.asked_at_s: list[float] = []
        self.requests: list[web.Request] = []
        self._news = asyncio.Condition()
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self.server = TestServer(app, host="127.0.0.1")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        async with self._news:
            self.asked[request.path] += 1
            self.asked_at_s.append(time.monotonic())
            self.requests.append(request)
            self._news.notify_all()
        answer = self.metrics if request.path.endswith("/metrics") else self.health
        if isinstance(answer, int):
            return web.Response(status=answer, text="body text")
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        return await answer(request)

    async def answered(self, path: str) -> None:
        """Wait until a request that comes from now on has been asked, answered and taken in."""
        async with asyncio.timeout(LONG_S), self._news:
            wanted = self.asked[path] + 2
            await self._news.wait_for(lambda: self.asked[path] >= wanted)


@asynccontextmanager
async def running_engine(**server: Any) -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.server.start_server(shutdown_timeout=1, **server)
    try:
        yield engine
    finally:
        await engine.server.close()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with running_engine() as engine:
        yield engine


class Changes:
    """The fleet's `on_change`: remembers what health each change brought."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, Health]] = asyncio.Queue()

    def __call__(self, node: Node) -> None:
        self._queue.put_nowait((node.id, node.health))

    async def next(self) -> Health:
        return (await asyncio.wait_for(self._queue.get(), LONG_S))[1]

    def none_left(self) -> bool:
        return self._queue.empty()


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_node(
    port: int, node_id: str = "n", scheme: str = "http", base_path: str = "", **settings: Any
) -> Node:
    config = NodeConfig.model_validate(
        {
            "id": node_id,
            "hardware": "h100-80g",
            "backend": "vllm",
            "endpoint": f"{scheme}://127.0.0.1:{port}{base_path}",
            "models": ["m"],
            **settings,
        }
    )
    return Node(config=config, profile=config.profile)


def node_of(server: Engine, **settings: Any) -> Node:
    assert server.server.port is not None
    return make_node(server.server.port, **settings)


@asynccontextmanager
async def watching(
    *nodes: Node, changes: Changes, clock: Clock | None = None, pace: Pace = BRISK
) -> AsyncIterator[Fleet]:
    fleet = Fleet(nodes, changes, clock or time.monotonic, pace)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


async def test_a_good_engine_becomes_healthy_and_its_metrics_are_read(engine: Engine) -> None:
    node, changes, clock = node_of(engine), Changes(), Clock()
    async with watching(node, changes=changes, clock=clock):
        assert await changes.next() is Health.HEALTHY
        await engine.answered("/metrics")
    assert node.last_error is None
    assert node.report is not None
    assert (node.report.at_s, node.report.running, node.report.waiting) == (clock.now_s, 3, 1)
    assert node.report.kv_used_ratio == 0.25
    assert changes.none_left()


async def test_requests_carry_base_path_and_key_and_ask_for_no_compression(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    node = node_of(engine, base_path="/engine-a", api_key_env="ENGINE_KEY")
    async with watching(node, changes=Changes()):
        await engine.answered("/engine-a/metrics")
        await engine.answered("/engine-a/health")
    assert set(engine.asked) == {"/engine-a/health", "/engine-a/metrics"}
    headers = engine.requests[0].headers
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["Accept-Encoding"] == "identity"


async def test_connections_are_kept(engine: Engine) -> None:
    async with watching(node_of(engine), changes=Changes()):
        for _ in range(3):
            await engine.answered("/health")
    peers = {request.transport.get_extra_info("peername") for request in engine.requests if request.transport}
    assert len(peers) <= 2


async def test_two_failed_probes_take_a_node_offline_and_two_good_ones_bring_it_back(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="extproc.fleet")
    node, changes = node_of(engine), Changes()
    async with watching(node, changes=changes):
        assert await changes.next() is Health.HEALTHY
        engine.health = 503
        assert [await changes.next(), await changes.next()] == [Health.DEGRADED, Health.OFFLINE]
        assert node.last_error == "GET /health answered 503"
        engine.health = 200
        assert [await changes.next(), await changes.next()] == [Health.DEGRADED, Health.HEALTHY]
        assert node.last_error is None
    assert [record.getMessage() for record in caplog.records] == [
        "node n is healthy: its probes succeed",
        "node n is degraded: GET /health answered 503",
        "node n is offline: GET /health answered 503",
        "node n is degraded: GET /health answered 503",
        "node n is healthy: its probes succeed",
    ]


async def test_a_node_where_nobody_listens_any_more_is_offline_at_once() -> None:
    async with running_engine() as engine:
        node, changes = node_of(engine), Changes()
        async with watching(node, changes=changes):
            assert await changes.next() is Health.HEALTHY
            await engine.server.close()
            assert await changes.next() is Health.OFFLINE
    assert node.last_error == "GET /health: connection refused"


async def test_a_refusal_is_told_from_other_failures(engine: Engine) -> None:
    engine.health = 503
    async with open_session() as session:
        with pytest.raises(NoAnswerError) as refusal:
            await EngineClient(session, make_node(unused_port()).config).get("/health", LONG_S)
        with pytest.raises(NoAnswerError) as failure:
            await EngineClient(session, node_of(engine).config).get("/health", LONG_S)
    assert (refusal.value.refused, failure.value.refused) == (True, False)


async def test_a_probe_that_takes_too_long_has_failed(engine: Engine) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(LONG_S)
        return web.Response()

    engine.health = hang
    node, changes = node_of(engine), Changes()
    async with watching(node, changes=changes, pace=HASTY_PROBE):
        assert await changes.next() is Health.OFFLINE
    assert node.last_error == "GET /health: no answer within 0.1 s"


async def test_a_redirect_is_a_failure_and_is_not_followed(engine: Engine) -> None:
    async with running_engine() as other:

        async def redirect(_: web.Request) -> web.StreamResponse:
            raise web.HTTPFound(other.server.make_url("/health"))

        engine.health = redirect
        node, changes = node_of(engine), Changes()
        async with watching(node, changes=changes):
            assert await changes.next() is Health.OFFLINE
        assert node.last_error == "GET /health answered 302"
        assert not other.asked


async def test_an_engine_that_closes_without_an_answer_has_failed(engine: Engine) -> None:
    async def close(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    engine.health = close
    node, changes = node_of(engine), Changes()
    async with watching(node, changes=changes):
        assert await changes.next() is Health.OFFLINE
    assert node.last_error == "GET /health: it closed the connection without an answer"


async def test_a_wrong_key_is_named_as_the_likely_cause(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    engine.health = 401
    node, changes = node_of(engine, api_key_env="ENGINE_KEY"), Changes()
    async with watching(node, changes=changes):
        assert await changes.next() is Health.OFFLINE
    assert node.last_error == "GET /health answered 401: check the node's api_key_env"


async def test_a_key_that_no_header_can_carry_fails_the_probe_and_is_not_shown(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ENGINE_KEY", f"{KEY}\r\nx: y")
    node, changes = node_of(engine, api_key_env="ENGINE_KEY"), Changes()
    async with watching(node, changes=changes):
        assert await changes.next() is Health.OFFLINE
    assert node.last_error == "GET /health: ValueError"
    assert KEY not in caplog.text


async def test_a_missing_key_is_named_by_its_variable(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    node, changes = node_of(engine, api_key_env="ENGINE_KEY"), Changes()
    async with watching(node, changes=changes):
        assert await changes.next() is Health.OFFLINE
    assert node.last_error == "the environment variable ENGINE_KEY holds no API key"
    assert not engine.asked


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"# filler\n" * 8192)


async def dripping(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(METRICS)
        await asyncio.sleep(0.01)


async def too_large(_: web.Request) -> web.StreamResponse:
    return web.Response(body=METRICS + b"#" * (5 << 20))


async def compressed(_: web.Request) -> web.StreamResponse:
    response = web.Response(body=METRICS)
    response.enable_compression(web.ContentCoding.gzip)
    return response


async def missing(_: web.Request) -> web.StreamResponse:
    return web.Response(status=404, body=METRICS)


@pytest.mark.parametrize(
    ("metrics", "pace", "error"),
    [
        (endless, BRISK, "GET /metrics answered more than 4 MiB"),
        (too_large, BRISK, "GET /metrics answered more than 4 MiB"),
        (dripping, HASTY_SCRAPE, "GET /metrics: no answer within 0.1 s"),
        (missing, BRISK, "GET /metrics answered 404"),
        (compressed, BRISK, "GET /metrics answered none of the metrics of vLLM"),
        (b"<html>\xff\x00", BRISK, "GET /metrics answered none of the metrics of vLLM"),
        (b"", BRISK, "GET /metrics answered none of the metrics of vLLM"),
    ],
)
async def test_unreadable_metrics_are_an_error_and_degrade_a_node_only_once_stale(
    engine: Engine,
    metrics: bytes | Callable[[web.Request], Awaitable[web.StreamResponse]],
    pace: Pace,
    error: str,
) -> None:
    engine.metrics = metrics
    node, changes, clock = node_of(engine), Changes(), Clock()
    async with watching(node, changes=changes, clock=clock, pace=pace):
        assert await changes.next() is Health.HEALTHY
        await engine.answered("/metrics")
        assert (node.health, node.last_error, node.report) == (Health.HEALTHY, error, None)
        clock.now_s += METRICS_STALE_S + 1
        assert await changes.next() is Health.DEGRADED
        engine.metrics = METRICS
        assert await changes.next() is Health.HEALTHY
    assert node.last_error is None


async def test_of_an_engine_started_without_metrics_the_option_is_named(engine: Engine) -> None:
    async def unsupported(_: web.Request) -> web.StreamResponse:
        return web.Response(status=501)

    engine.metrics = unsupported
    node = node_of(engine, backend="llamacpp")
    async with watching(node, changes=Changes()):
        await engine.answered("/metrics")
    assert node.last_error == "GET /metrics answered 501: start the engine with --metrics"


async def test_a_custom_engine_without_metrics_is_only_probed(engine: Engine) -> None:
    node, changes, clock = (
        node_of(engine, backend="custom", engine={"health_path": "/up"}),
        Changes(),
        Clock(),
    )
    async with watching(node, changes=changes, clock=clock):
        assert await changes.next() is Health.HEALTHY
        clock.now_s += METRICS_STALE_S + 1
        await engine.answered("/up")
    assert set(engine.asked) == {"/up"}
    assert changes.none_left()


async def test_the_last_report_stays_when_scrapes_fail(engine: Engine) -> None:
    node = node_of(engine)
    async with watching(node, changes=Changes()):
        await engine.answered("/metrics")
        engine.metrics = b"nonsense"
        await engine.answered("/metrics")
    assert node.report is not None
    assert node.report.running == 3


async def test_the_prefix_hit_ratio_comes_from_the_engines_counters(engine: Engine) -> None:
    def counters(queries: int, hits: int) -> bytes:
        return f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n".encode()

    engine.metrics = counters(1000, 0)
    node = node_of(engine)
    async with watching(node, changes=Changes()):
        await engine.answered("/metrics")
        assert node.prefix_hit_ratio is None
        engine.metrics = counters(1200, 150)
        await engine.answered("/metrics")
    assert node.prefix_hit_ratio == 0.75


async def test_nodes_that_hang_do_not_hold_up_the_others(engine: Engine) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(LONG_S)
        return web.Response()

    async with running_engine() as stuck:
        stuck.health = stuck.metrics = hang
        hanging = [node_of(stuck, node_id=f"stuck-{i}") for i in range(60)]
        good = node_of(engine)
        patient = Pace(probe_period_s=0.02, probe_timeout_s=60, scrape_period_s=0.02, scrape_timeout_s=60)
        async with watching(*hanging, good, changes=Changes(), pace=patient), asyncio.timeout(LONG_S):
            while sum(stuck.asked.values()) < 2 * len(hanging):
                await engine.answered("/health")
            assert good.health is Health.HEALTHY


async def test_first_requests_of_many_nodes_spread_over_the_period(engine: Engine) -> None:
    period_s = 0.4
    nodes = [node_of(engine, node_id=f"n{i}", backend="custom") for i in range(64)]
    async with watching(*nodes, changes=Changes(), pace=Pace(probe_period_s=period_s)):
        while len(engine.asked_at_s) < len(nodes):
            await engine.answered("/v1/models")
    first = engine.asked_at_s[: len(nodes)]
    assert first[-1] - first[0] > period_s / 2


async def test_nodes_come_and_go_while_the_fleet_runs(engine: Engine) -> None:
    changes = Changes()
    async with running_engine() as second, watching(node_of(engine), changes=changes) as fleet:
        assert await changes.next() is Health.HEALTHY
        fleet.add(node_of(second, node_id="second"))
        assert await changes.next() is Health.HEALTHY
        fleet.remove("n")
        await second.answered("/health")
        asked = engine.asked.total()
        await second.answered("/health")
        assert engine.asked.total() == asked
        with pytest.raises(ValueError, match="second is watched already"):
            fleet.add(node_of(second, node_id="second"))
        with pytest.raises(KeyError):
            fleet.remove("n")
        fleet.add(node_of(engine))
        assert await changes.next() is Health.HEALTHY


async def test_an_error_in_on_change_does_not_end_the_watch(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Node) -> None:
        raise RuntimeError

    node = node_of(engine)
    fleet = Fleet([node], fail, pace=BRISK)
    await fleet.start()
    try:
        await engine.answered("/health")
        await engine.answered("/health")
    finally:
        await fleet.stop()
    assert node.health is Health.HEALTHY
    assert "node n: a watch step failed; watching goes on" in caplog.text


async def test_stop_is_quick_leaves_nothing_behind_and_may_be_repeated(engine: Engine) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(LONG_S)
        return web.Response()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.metrics = hang
        fleet = Fleet([node_of(engine), make_node(unused_port(), "gone")], Changes(), pace=BRISK)
        await fleet.stop()
        await fleet.start()
        await engine.answered("/health")
        began_s = time.monotonic()
        await fleet.stop()
        await fleet.stop()
        assert time.monotonic() - began_s < LONG_S / 2
        assert not [task for task in asyncio.all_tasks() if "_Watch" in repr(task)]
        gc.collect()
    assert not [warning for warning in caught if issubclass(warning.category, ResourceWarning)]


async def tls_engine(stack: AsyncExitStack, client_certificate: bool = False) -> Engine:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "engine.pem")
    if client_certificate:
        context.load_verify_locations(TLS / "authority.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    return await stack.enter_async_context(running_engine(ssl=context))


CERTIFICATE = {"cert_file": TLS / "engine.pem", "key_file": TLS / "engine.pem"}
TRUST = {"ca_file": TLS / "authority.pem", "sni": "engine.test"}


async def test_tls_trusts_the_nodes_authority_and_checks_the_name_in_sni() -> None:
    async with AsyncExitStack() as stack:
        engine, changes = await tls_engine(stack), Changes()
        async with watching(node_of(engine, scheme="https", tls=TRUST), changes=changes):
            assert await changes.next() is Health.HEALTHY
            await engine.answered("/metrics")


async def test_tls_shows_the_nodes_certificate() -> None:
    async with AsyncExitStack() as stack:
        engine, changes = await tls_engine(stack, client_certificate=True), Changes()
        async with watching(node_of(engine, scheme="https", tls=TRUST | CERTIFICATE), changes=changes):
            assert await changes.next() is Health.HEALTHY


@pytest.mark.parametrize(
    ("tls", "error"),
    [
        ({}, "unable to get local issuer certificate"),
        ({"ca_file": TLS / "authority.pem"}, "IP address mismatch"),
        ({"ca_file": TLS / "absent.pem"}, "the files of `tls` cannot be read: No such file or directory"),
        (
            {"cert_file": TLS / "authority.pem", "key_file": TLS / "authority.pem"},
            "no unencrypted key",
        ),
    ],
)
async def test_tls_that_cannot_be_trusted_or_loaded_says_why(tls: dict[str, object], error: str) -> None:
    async with AsyncExitStack() as stack:
        engine, changes = await tls_engine(stack), Changes()
        node = node_of(engine, scheme="https", tls=tls)
        async with watching(node, changes=changes):
            assert await changes.next() is Health.OFFLINE
    assert error in (node.last_error or "")
