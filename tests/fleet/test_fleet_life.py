"""Many nodes at a time, and the end of it all."""

import asyncio
import gc
import time
import warnings

import pytest
from aiohttp.test_utils import unused_port
from fleet_support import BRISK, LONG_S, Changes, Engine, hang, make_node, node_of, running_engine, watching

from extproc.fleet import Fleet, Pace
from extproc.routing.health import Event
from extproc.routing.node import Health, Node


async def test_nodes_that_hang_do_not_hold_up_the_others(engine: Engine) -> None:
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


async def test_an_error_in_on_change_does_not_end_the_watch(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Node) -> None:
        raise RuntimeError

    node = node_of(engine)
    fleet = Fleet([node], fail, lambda _: None, pace=BRISK)
    await fleet.start()
    try:
        await engine.answered("/health")
        await engine.answered("/health")
    finally:
        await fleet.stop()
    assert node.health is Health.HEALTHY
    assert "node n: a watch step failed; watching goes on" in caplog.text


async def test_stop_is_quick_leaves_nothing_behind_and_may_be_repeated(engine: Engine) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.metrics = hang
        fleet = Fleet(
            [node_of(engine), make_node(unused_port(), "gone")], Changes(), lambda _: None, pace=BRISK
        )
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


async def test_nodes_that_come_are_watched_and_those_that_went_are_not(engine: Engine) -> None:
    stays, goes = node_of(engine), make_node(unused_port(), "goes")
    async with running_engine() as other, watching(stays, goes, changes=Changes()) as fleet:
        await engine.answered("/health")
        comes = node_of(other, node_id="comes")
        fleet.set_nodes([stays, comes])
        await other.answered("/health")
        assert (stays.health, comes.health) == (Health.HEALTHY, Health.HEALTHY)
        await engine.answered("/health")
        goes.health = Health.HEALTHY
        fleet.happened("goes", Event.PROBE_REFUSED)
        assert goes.health is Health.HEALTHY, "nobody cares any more"


async def test_another_engine_under_the_same_id_is_watched_in_its_place(engine: Engine) -> None:
    before = node_of(engine)
    async with running_engine() as other, watching(before, changes=Changes()) as fleet:
        after = node_of(other)
        fleet.set_nodes([after])
        await other.answered("/health")
        assert after.health is Health.HEALTHY
