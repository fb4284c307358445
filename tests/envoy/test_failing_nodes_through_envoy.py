"""Nodes that fail under load, on the real Envoy: clients do not notice, and the nodes get no more traffic."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from envoy_stack import MODEL, Stack, running_stack, until

from extproc.fleet import Pace
from extproc.routing.health import FEWEST_ERRORS
from extproc.routing.node import Health
from extproc.simulator.faults import Fault, FaultKind

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

QUICK = Pace(scrape_period_s=0.2)
"""Scrapes often enough to tell a hang within a timeout of a second."""
CLIENTS = 4
SLACK_S = 1.0
"""The log takes a quarter of a second; a busy machine adds to that."""
STREAM = {"model": MODEL, "messages": [{"role": "user", "content": "tell me"}], "stream": True}


def health(stack: Stack) -> dict[str, str]:
    return {node.id: node.health.value for node in stack.service.router.nodes.values()}


def asked(stack: Stack, name: str) -> int:
    """Requests that arrived at an engine."""
    return sum(stack.sims[name].stats.attempts.values())


@contextlib.asynccontextmanager
async def load(stack: Stack, clients: int, **members: Any) -> AsyncIterator[Counter[int]]:
    """So many clients that ask one question after the other; how often they got each status."""
    statuses: Counter[int] = Counter()
    stopped = asyncio.Event()

    async def client(number: int) -> None:
        while not stopped.is_set():
            statuses[(await stack.chat(f"client {number}", **members)).status_code] += 1

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        yield statuses
    finally:
        stopped.set()
        await asyncio.gather(*tasks)


async def offline(stack: Stack, name: str, limit_s: float = 5.0) -> float:
    """Wait until a node is; the seconds that it took."""
    started_s = time.monotonic()
    await until(lambda: stack.service.router.nodes[name].health is Health.OFFLINE, limit_s)
    return time.monotonic() - started_s


async def test_a_node_that_answers_500_to_everything_is_offline_within_two_seconds() -> None:
    async with running_stack() as stack, load(stack, clients=8) as statuses:
        stack.sims["a"].faults.arm([Fault(FaultKind.ERROR_500)])
        took_s = await offline(stack, "a")
        before = asked(stack, "a")
        served = sum(statuses.values())
        await until(lambda: sum(statuses.values()) > served + 100)
        assert took_s < 2.0
        assert asked(stack, "a") - before <= 8, "only what was on its way then"
        assert set(statuses) == {200}, "no client noticed"
        assert (health(stack)["b"], health(stack)["c"]) == ("healthy", "healthy")
        assert "did better" in (stack.service.router.nodes["a"].last_error or "")


@pytest.mark.parametrize("names", ["a", "abc"], ids=["on the only node", "on every node"])
async def test_requests_that_fail_everywhere_take_nothing_offline(names: str) -> None:
    async with running_stack(tuple(names)) as stack:
        for sim in stack.sims.values():
            sim.faults.arm([Fault(FaultKind.ERROR_500)])
        async with load(stack, clients=4) as statuses:
            await until(lambda: sum(statuses.values()) > 20 * FEWEST_ERRORS)
        assert set(statuses) == {500}
        assert set(health(stack).values()) == {"healthy"}


async def test_two_of_four_nodes_killed_under_200_requests() -> None:
    sims = {name: {"token_interval_s": 0.02, "speed": 1.0} for name in "abcd"}
    async with running_stack(sims) as stack:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=stack.url, timeout=30, trust_env=False, limits=limits
        ) as client:
            stack.client, shared = client, stack.client
            requests = [asyncio.create_task(stack.chat(f"{at}", max_tokens=20)) for at in range(200)]
            await until(lambda: min(stack.in_flight().values()) > 20)
            await asyncio.gather(stack.sims["a"].kill(), stack.sims["b"].kill())
            answers = await asyncio.gather(*requests)
            stack.client = shared
        assert Counter(answer.status_code for answer in answers) == {200: 200}
        assert {answer.headers["x-inferact-node"] for answer in answers} == {"c", "d"}
        await until(lambda: sum(stack.in_flight().values()) == 0)
        assert (health(stack)["a"], health(stack)["b"]) == ("offline", "offline")


async def test_a_node_that_hangs_costs_a_client_its_share_of_the_time_once() -> None:
    limit = {"request_timeout_ms": 4500}
    async with running_stack(pace=QUICK, scheduler=limit) as stack:
        node = stack.service.router.nodes["a"]
        stack.sims["a"].faults.arm([Fault(FaultKind.HANG)])

        async def client() -> int:
            """How often the client was kept waiting until the node was known to hang."""
            waits = 0
            while node.last_error is None:
                answer = await stack.client.post("/v1/chat/completions", json=STREAM)
                assert answer.status_code == 200
                if answer.headers["x-inferact-attempts"] != "1":
                    waits += 1
                    await asyncio.sleep(SLACK_S)
            return waits

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        await offline(stack, "a")
        assert node.last_error == "it hung"
        before = asked(stack, "a")
        answers = await asyncio.gather(*(stack.chat() for _ in range(20)))
        assert {answer.headers["x-inferact-attempts"] for answer in answers} == {"1"}
        assert asked(stack, "a") == before
        assert max(await asyncio.gather(*clients)) == 1


async def test_a_node_that_hangs_on_answers_that_are_no_streams_is_offline_after_one() -> None:
    limit = {"request_timeout_ms": 1000}
    async with running_stack(("a", "b"), pace=QUICK, scheduler=limit) as stack:
        stack.sims["a"].faults.arm([Fault(FaultKind.HANG)])
        answers = await asyncio.gather(*(stack.chat(f"{at}") for at in range(4)))
        assert {answer.status_code for answer in answers} == {200, 504}
        assert await offline(stack, "a") < 0.5
        assert {(await stack.chat()).status_code for _ in range(20)} == {200}


async def test_an_honest_long_answer_that_runs_out_of_time_is_no_hang() -> None:
    limit = {"request_timeout_ms": 1000}
    sims = {name: {"token_interval_s": 0.05, "speed": 1.0} for name in "ab"}
    async with running_stack(sims, pace=QUICK, scheduler=limit) as stack:
        answers = await asyncio.gather(*(stack.chat(f"{at}", max_tokens=100) for at in range(4)))
        assert {answer.status_code for answer in answers} == {504}
        for _ in answers:
            await stack.outcome()
        assert set(health(stack).values()) == {"healthy"}


async def test_a_node_that_breaks_every_stream_is_offline_soon() -> None:
    async with running_stack() as stack:
        stack.sims["a"].faults.arm([Fault(FaultKind.ERROR_MID_STREAM)])
        number = 0
        async with load(stack, clients=4, **{"x-inferact": {"node_affinity": "b"}}):
            while health(stack)["a"] != "offline":
                number += 1
                assert number < 20 * FEWEST_ERRORS
                messages = [{"role": "user", "content": f"question {number}"}]
                body = STREAM | {"messages": messages, "x-inferact": {"node_affinity": "a"}}
                await stack.client.post("/v1/chat/completions", json=body)
                await asyncio.sleep(0.05)
        assert health(stack)["b"] == "healthy"


async def test_running_out_of_memory_is_made_good_counted_and_followed_by_caution() -> None:
    sims = {name: {"token_interval_s": 0.02, "speed": 1.0} for name in "abc"}
    async with running_stack(sims) as stack:
        for sim in stack.sims.values():
            sim.faults.arm([Fault(FaultKind.OUT_OF_MEMORY_TGI, count=4, contains="question")])
        stack.sims["c"].faults.clear()
        to_a = {"x-inferact": {"node_affinity": "a"}}
        running = [asyncio.create_task(stack.chat(f"long {at}", max_tokens=100, **to_a)) for at in range(8)]
        await until(lambda: stack.in_flight()["a"] == 8)
        answers = await asyncio.gather(*(stack.chat(f"question {at}") for at in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        await until(lambda: len(stack.outcomes) >= 8)
        lost = [name for name in "ab" if await stack.metric("inferact_oom_events_total", node=name)]
        assert lost, "at least the cheapest node had some of the questions"
        for name in lost:
            assert await stack.metric("inferact_oom_events_total", node=name) == 1, "a batch is one event"
            node = stack.service.router.nodes[name]
            assert (node.health, node.last_error) == (Health.DEGRADED, "it ran out of memory")
            assert node.limit is not None
            assert node.cautious
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}


async def test_a_full_queue_is_no_fault_of_a_nodes_health(stack: Stack) -> None:
    for kind in (FaultKind.ERROR_503, FaultKind.ERROR_429):
        stack.sims["a"].faults.arm([Fault(kind)])
        async with load(stack, clients=4) as statuses:
            await until(lambda: sum(statuses.values()) > 20 * FEWEST_ERRORS)
        stack.sims["a"].faults.clear()
        assert set(statuses) == {200}
        assert health(stack) == dict.fromkeys("abc", "healthy")


async def test_a_prompt_that_kills_engines_takes_no_more_nodes_than_it_was_sent_to() -> None:
    async with running_stack(tuple("abcde")) as stack:
        for sim in stack.sims.values():
            sim.faults.arm([Fault(FaultKind.DIE, contains="poison", delay_s=0.1)])
        assert (await stack.chat("poison")).status_code in (500, 503)
        await until(lambda: [*health(stack).values()].count("offline") == 3)
        again = await stack.chat("poison")
        assert (again.status_code, again.json()["error"]["code"]) == (422, "poisonous_request")
        assert (await stack.chat("something else")).status_code == 200
        await asyncio.gather(*(stack.sims[name].stop() for name in "abcde"))
