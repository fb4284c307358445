"""Drain and restore: no later decision names the node, and the state lasts."""

import asyncio
import errno
import logging
from pathlib import Path

import pytest
from admin_app import KEY, LLAMA, App

from extproc.drains import DrainStore
from extproc.openai.errors import ApiError, ErrorCode
from extproc.routing.admission import Waiter
from extproc.routing.loads import Work
from extproc.routing.router import Decision

A100, RTX = "node-a100-01", "node-rtx-01"


async def test_the_answer_is_the_nodes_state(app: App) -> None:
    app.context.router.book(app.nodes[A100], Work(100.0, 10.0, 1.0), app.now_s)
    response = await app.drain(A100)
    state = await response.json()
    assert response.status == 200
    assert (state["id"], state["drained"], state["requests_in_flight"]) == (A100, True, 1)
    listed = await (await app.client.get("/status")).json()
    assert listed["nodes"][0] == state


async def test_drains_and_restores_are_logged(app: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="admin")
    await app.drain(A100)
    await app.restore(A100)
    await app.drain("unknown")
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [("INFO", f"node {A100} is drained"), ("INFO", f"node {A100} is restored")]


async def test_repeated_calls_are_harmless(app: App) -> None:
    for _ in range(2):
        assert (await (await app.drain(A100)).json())["drained"] is True
    for _ in range(2):
        assert (await (await app.restore(A100)).json())["drained"] is False
    assert await app.context.drains.load() == set()


async def test_a_drained_node_gets_no_request_and_a_restored_one_does(app: App) -> None:
    await app.drain(A100)
    with pytest.raises(ApiError) as refused:
        app.context.router.decide(app.request(LLAMA), app.now_s)
    assert refused.value.code is ErrorCode.NO_AVAILABLE_NODE
    await app.restore(A100)
    decision = app.context.router.decide(app.request(LLAMA), app.now_s)
    assert decision is not None
    assert decision.node.id == A100


async def test_no_decision_names_the_node_even_before_the_answer(app: App) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        reached.set()
        await go_on.wait()

    app.before_routes = hold
    answer = asyncio.create_task(app.drain(A100))
    await reached.wait()
    with pytest.raises(ApiError):
        app.context.router.decide(app.request(LLAMA), app.now_s)
    assert await app.context.drains.load() == {A100}  # on the disk before Envoy is told
    assert not answer.done()
    go_on.set()
    assert (await answer).status == 200


async def test_requests_in_flight_stay_booked(app: App) -> None:
    booking = app.context.router.book(app.nodes[A100], Work(100.0, 10.0, 1.0), app.now_s)
    await app.drain(A100)
    assert app.nodes[A100].in_flight == 1
    assert booking.release(app.now_s)


async def test_envoys_routes_are_written_before_the_answer(app: App) -> None:
    await app.drain(A100)
    await app.drain(RTX)
    await app.restore(A100)
    assert app.routes == [{A100}, {A100, RTX}, {RTX}]


async def test_calls_that_cross_end_with_the_last_one_everywhere(app: App) -> None:
    async def switch() -> None:
        await asyncio.sleep(0)

    app.before_routes = switch
    calls = [call(node) for _ in range(10) for node in (A100, RTX) for call in (app.drain, app.restore)]
    responses = await asyncio.gather(*calls)
    assert {response.status for response in responses} == {200}
    drained = {node.id for node in app.nodes.values() if node.drained}
    assert await app.context.drains.load() == drained
    assert app.routes[-1] == drained


async def test_routes_are_never_written_twice_at_a_time(app: App) -> None:
    writing = 0

    async def count() -> None:
        nonlocal writing
        writing += 1
        assert writing == 1
        await asyncio.sleep(0)
        writing -= 1

    app.before_routes = count
    responses = await asyncio.gather(*(app.drain(node) for node in (A100, RTX) * 5))
    assert {response.status for response in responses} == {200}


async def test_a_drain_survives_a_restart(app: App, tmp_path: Path) -> None:
    await app.drain(A100)
    await app.drain(RTX)
    await app.restore(RTX)
    assert await DrainStore(tmp_path / "drains.sqlite").load() == {A100}


async def test_a_drain_that_cannot_be_kept_holds_and_says_so(app: App, tmp_path: Path) -> None:
    await asyncio.to_thread((tmp_path / "drains.sqlite").mkdir)
    response = await app.drain(A100)
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (500, "internal_error")
    assert error["message"].startswith(f"The node `{A100}` is drained now, but a restart undoes that: ")
    assert app.nodes[A100].drained
    assert app.routes == [{A100}]


async def test_a_drain_that_envoy_cannot_be_told_of_holds_and_says_so(app: App, tmp_path: Path) -> None:
    async def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    app.before_routes = full
    response = await app.drain(A100)
    message = (await response.json())["error"]["message"]
    assert response.status == 500
    assert "is drained now, but Envoy does not know of it" in message
    assert "No space left on device" in message
    assert app.nodes[A100].drained
    assert await app.context.drains.load() == {A100}


async def test_a_call_that_failed_can_be_repeated(app: App, tmp_path: Path) -> None:
    in_the_way = tmp_path / "drains.sqlite"
    await asyncio.to_thread(in_the_way.mkdir)
    assert (await app.drain(A100)).status == 500
    await asyncio.to_thread(in_the_way.rmdir)
    assert (await app.drain(A100)).status == 200
    assert await app.context.drains.load() == {A100}


async def test_routes_that_cannot_be_written_fail_the_call(app: App) -> None:
    async def fail() -> None:
        raise OSError("disk full")

    app.before_routes = fail
    response = await app.drain(A100)
    assert response.status == 500
    assert app.nodes[A100].drained
    assert await app.context.drains.load() == {A100}


@pytest.mark.parametrize("node_id", ["node-x", "NODE-RTX-01", "..%2Fnode-rtx-01", "%00", "é", "a" * 5000])
async def test_an_unknown_node_is_not_found_and_the_known_ones_are_named(app: App, node_id: str) -> None:
    for response in (await app.drain(node_id), await app.restore(node_id)):
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "not_found")
        assert f"{A100}, {RTX}" in error["message"]
    assert await app.context.drains.load() == set()
    assert app.routes == []


@pytest.mark.parametrize("body", [b"", b"{", b"x" * 100_000])
async def test_a_body_is_ignored(app: App, body: bytes) -> None:
    headers = {"x-inferact-admin-key": KEY}
    response = await app.client.post(f"/admin/nodes/{A100}/drain", data=body, headers=headers)
    assert response.status == 200


async def test_a_percent_escape_in_the_id_is_the_character(app: App) -> None:
    assert (await app.drain("node%2Da100%2D01")).status == 200
    assert app.nodes[A100].drained


async def test_waiters_stay_in_the_queue_for_the_callback_to_serve(app: App) -> None:
    first = app.context.admission.submit(app.request(LLAMA), 10, app.now_s, lambda: None)
    second = app.context.admission.submit(app.request(LLAMA), 10, app.now_s, lambda: None)
    assert isinstance(first, Decision)
    assert isinstance(second, Waiter)
    await app.drain(A100)
    assert second.outcome is None
