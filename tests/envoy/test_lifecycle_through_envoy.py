"""Drain, restore and restarts in the middle of traffic."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from envoy_stack import MODEL, Stack, running_stack, until

from extproc.simulator.faults import Fault, FaultKind

pytestmark = pytest.mark.envoy


@pytest.fixture
async def stack():
    """Three nodes that need about 20 ms for an answer."""
    sims = {name: {"token_interval_s": 0.005, "speed": 1.0, "max_num_seqs": 256} for name in "abc"}
    async with running_stack(sims=sims) as running:
        yield running


async def under_load(stack: Stack, work: Callable[[], Awaitable[None]], clients: int = 24) -> Counter[int]:
    """Do `work` while clients ask one question after the other; their statuses."""
    statuses: Counter[int] = Counter()
    done = asyncio.Event()

    async def ask(number: int) -> None:
        while not done.is_set():
            answer = await stack.chat(f"question {number}", max_tokens=4)
            statuses[answer.status_code] += 1

    asking = [asyncio.create_task(ask(number)) for number in range(clients)]
    await asyncio.sleep(0.3)
    try:
        await work()
        await asyncio.sleep(0.3)
    finally:
        done.set()
        await asyncio.gather(*asking)
    return statuses


async def test_a_drained_model_is_not_listed_and_answers_503(stack: Stack) -> None:
    for node in "abc":
        await stack.admin(f"/admin/nodes/{node}/drain")
    answer = await stack.chat()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_available_node"
    assert int(answer.headers["retry-after"]) >= 1
    assert (await stack.client.get("/v1/models")).json()["data"] == []
    assert (await stack.client.get("/readyz")).status_code == 503
    await stack.admin("/admin/nodes/a/restore")
    assert (await stack.chat()).status_code == 200


async def test_a_drain_survives_a_restart_of_the_service(stack: Stack) -> None:
    await stack.admin("/admin/nodes/b/drain")
    await stack.restart_service()
    await until(lambda: all(node.report for node in stack.service.router.nodes.values()))
    nodes = {(await stack.chat()).headers["x-inferact-node"] for _ in range(20)}
    assert nodes == {"a", "c"}


async def test_a_drained_node_is_not_used_while_the_service_is_away(stack: Stack) -> None:
    await stack.drain("b")
    await stack.service.stop(grace_s=0)
    answers = [await stack.chat() for _ in range(30)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-inferact-node"] for answer in answers} == {"a", "c"}
    assert await stack.envoy_stat("http.inferact.ext_proc.failure_mode_allowed") == len(answers)
    await stack.restart_service()
    assert await stack.metric("inferact_failopen_requests_total") == len(answers), "though it was away"


async def test_a_restart_of_the_service_is_not_noticed(stack: Stack) -> None:
    async def stream() -> list[str]:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "s"}],
            "stream": True,
            "max_tokens": 300,
        }
        async with stack.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            return [line async for line in answer.aiter_lines() if line]

    streams = [asyncio.create_task(stream()) for _ in range(5)]

    async def restart_twice() -> None:
        for _ in range(2):
            await stack.restart_service()
            await asyncio.sleep(0.3)

    statuses = await under_load(stack, restart_twice)
    assert set(statuses) == {200}
    for lines in await asyncio.gather(*streams):
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 300
    await until(lambda: set(stack.in_flight().values()) == {0})


async def test_a_request_goes_on_to_the_next_node_and_is_counted(stack: Stack) -> None:
    stack.sims["a"].faults.arm([Fault(FaultKind.ERROR_500, count=1)])
    stack.sims["b"].faults.arm([Fault(FaultKind.ERROR_503, count=1)])
    answers = [await stack.chat() for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    retried = sum(int(answer.headers["x-inferact-attempts"]) - 1 for answer in answers)
    assert retried == 2
    await until(lambda: "inferact_retries_total{" in stack.service.telemetry.render().decode())
    served = sum(node.requests_total for node in stack.service.router.nodes.values())
    await until(lambda: sum(n.requests_total for n in stack.service.router.nodes.values()) == 8, 2)
    assert stack.attempts() == 8 + retried, served
