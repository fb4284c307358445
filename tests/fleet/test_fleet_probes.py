"""Probes: what makes a node healthy, degraded or offline, and what is said of it."""

import asyncio
import logging
import socket
import struct

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from fleet_support import (
    LONG_S,
    Changes,
    Clock,
    Engine,
    hang,
    make_node,
    node_of,
    running_engine,
    watching,
)

from extproc.engines.client import EngineClient, NoAnswerError, open_session
from extproc.fleet import Pace
from extproc.routing.node import Health

HASTY_PROBE = Pace(probe_period_s=0.02, probe_timeout_s=0.1, scrape_period_s=0.02, scrape_timeout_s=5)


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


async def test_connections_are_kept(engine: Engine) -> None:
    async with watching(node_of(engine), changes=Changes()):
        for _ in range(3):
            await engine.answered("/health")
    peers = {request.transport.get_extra_info("peername") for request in engine.requests if request.transport}
    assert len(peers) <= 2


async def test_two_failed_probes_take_a_node_offline_and_good_ones_bring_it_back(
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
        assert await changes.next() is Health.DEGRADED
        while node.limit is not None:  # it gets more requests with each
            assert await changes.next() in (Health.DEGRADED, Health.HEALTHY)
        assert node.health is Health.HEALTHY
        assert node.last_error is None
    assert [record.getMessage() for record in caplog.records] == [
        "node n is healthy: its probes succeed",
        "node n is degraded: GET /health answered 503",
        "node n is offline: GET /health answered 503",
        "node n is degraded: it answers again",
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


async def test_an_engine_that_resets_connections_may_speak_something_else() -> None:
    def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.close()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        node, changes = make_node(server.sockets[0].getsockname()[1]), Changes()
        async with watching(node, changes=changes):
            assert await changes.next() is Health.OFFLINE
    assert node.last_error is not None and node.last_error.startswith("GET /health: ")
    assert "reset; is it an HTTP server?" in node.last_error


async def test_the_first_probes_can_be_awaited(engine: Engine) -> None:
    nodes = [node_of(engine), make_node(unused_port(), "gone")]
    async with watching(*nodes, changes=Changes()) as fleet:
        await fleet.first_probes(limit_s=LONG_S)
        assert [node.health for node in nodes] == [Health.HEALTHY, Health.OFFLINE]


async def test_the_first_probes_are_not_awaited_for_ever(engine: Engine) -> None:
    engine.health = hang
    async with watching(node_of(engine), changes=Changes()) as fleet, asyncio.timeout(LONG_S):
        await fleet.first_probes(limit_s=0.05)
