"""Scrapes: what is read in an engine's metrics, and what becomes of a node whose metrics fail."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from fleet_support import BRISK, METRICS, Changes, Clock, Engine, book, hang, node_of, watching

from extproc.fleet import Pace
from extproc.routing.health import METRICS_STALE_S
from extproc.routing.node import Health, Node

HASTY_SCRAPE = Pace(probe_period_s=0.02, probe_timeout_s=5, scrape_period_s=0.02, scrape_timeout_s=0.1)


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


async def test_each_report_is_told_with_what_others_sent(engine: Engine) -> None:
    node = node_of(engine)
    told: list[tuple[int | None, int]] = []

    def on_report(which: Node) -> None:
        assert which is node and which.report is not None
        told.append((which.report.running, which.foreign))

    async with watching(node, changes=Changes(), on_report=on_report):
        await engine.answered("/metrics")
        engine.metrics = b"nonsense"
        await engine.answered("/metrics")
    assert set(told) == {(3, 4)}


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


async def test_what_others_sent_is_told_from_ours_when_the_engine_is_asked(engine: Engine) -> None:
    node = node_of(engine)
    ours = book(node, 3)
    async with watching(node, changes=Changes()):
        await engine.answered("/metrics")
    for booking in ours:
        booking.release(0.0)
    assert node.report is not None and node.report.requests == 4
    assert node.foreign_requests(node.report.at_s) == 1, "ours have ended, and were never foreign"


async def test_what_ends_while_the_engine_writes_its_metrics_is_not_foreign(engine: Engine) -> None:
    node = node_of(engine)
    ours = book(node, 4)

    async def slow(_: web.Request) -> web.StreamResponse:
        while ours:
            ours.pop().release(0.0)
        engine.metrics = hang  # this report is the only one
        return web.Response(body=METRICS)

    engine.metrics = slow
    async with watching(node, changes=Changes()):
        await engine.answered("/metrics")
    assert node.report is not None and node.report.requests == 4
    assert node.foreign == 0
