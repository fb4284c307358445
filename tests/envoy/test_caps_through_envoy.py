"""`max_batch_size` as the nodes see it, while clients leave, attempts fail, and requests go on elsewhere."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator

import aiohttp
import pytest
from envoy_stack import MODEL, Stack, running_stack, serve_apart

from extproc.simulator.faults import Fault, FaultKind
from extproc.simulator.journal import Outcome, Passage

pytestmark = pytest.mark.envoy

REQUESTS = int(os.environ.get("INFERACT_CAPS_REQUESTS", "2000"))
CAP = 4
CLIENTS = 40
ABORT_AGE_S = 0.5
"""So long a node may still have a request whose client has gone."""


class Clients:
    """Ask, at all priorities; some leave, in the queue or in the middle of their answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.random = random.Random(5)
        self.statuses: Counter[int] = Counter()
        self.left_s: dict[str, float] = {}

    async def run(self, requests: int) -> None:
        left = iter(range(requests))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def client() -> None:
                for number in left:
                    await self._one(session, f"request-{number}")

            await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _one(self, session: aiohttp.ClientSession, request_id: str) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": request_id}],
            "max_tokens": self.random.randint(1, 8),
            "stream": self.random.random() < 0.3,
            "x-inferact": {"priority": self.random.randint(0, 10)},
        }
        patience_s = self.random.uniform(0.0, 0.05) if self.random.random() < 0.1 else None
        try:
            async with (
                asyncio.timeout(patience_s),
                session.post(
                    f"{self.url}/v1/chat/completions", json=body, headers={"x-request-id": request_id}
                ) as answer,
            ):
                await answer.read()
                self.statuses[answer.status] += 1
        except TimeoutError:
            self.left_s[request_id] = time.monotonic()


def first_attempts_over_time(passages: list[Passage], left_s: dict[str, float]) -> Iterator[int]:
    """How many first attempts a node has, whenever one comes; not those whose client has just left."""
    changes = []
    for passage in passages:
        if passage.attempt == 1:
            ended_s = passage.ended_s
            if passage.outcome is Outcome.ABORTED and passage.request_id in left_s:
                gone_s = left_s[passage.request_id]
                assert ended_s - gone_s < ABORT_AGE_S
                ended_s = max(passage.began_s, min(ended_s, gone_s))
            changes += [(passage.began_s, 1), (ended_s, -1)]
    running = 0
    for _, change in sorted(changes):
        running += change
        yield running


def most_at_once(passages: list[Passage]) -> int:
    """The most requests that a node had at once."""
    changes = sorted(
        change for passage in passages for change in ((passage.began_s, 1), (passage.ended_s, -1))
    )
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


async def idle(stack: Stack) -> None:
    """Wait until nothing runs or waits any more, and the log has come."""
    for _ in range(400):
        await asyncio.sleep(0.05)
        running = await stack.metric("inferact_requests_in_flight")
        if not running and not await stack.metric("inferact_queue_depth"):
            await asyncio.sleep(0.5)
            return
    raise AssertionError("requests stay")


async def test_first_attempts_never_exceed_the_cap() -> None:
    sims = {name: {"speed": 1.0, "token_interval_s": 0.003, "max_num_seqs": 64} for name in "abc"}
    async with running_stack(sims=sims, batching={"max_batch_size": CAP}) as stack:
        service = await serve_apart(stack)
        try:
            stack.sims["a"].faults.arm([Fault(FaultKind.ERROR_503, probability=0.01)])
            stack.sims["b"].faults.arm([Fault(FaultKind.RESET, probability=0.01)])
            clients = Clients(stack.url)
            await clients.run(REQUESTS)
            await idle(stack)
            retried = await stack.metric("inferact_retries_total")
            failed_open = await stack.metric("inferact_failopen_requests_total")
            waited = await stack.metric("inferact_queue_wait_seconds_count")
        finally:
            service.terminate()
            await service.wait()
    passages = {name: list(sim.stats.passages) for name, sim in stack.sims.items()}
    retries = sum(passage.attempt > 1 for listed in passages.values() for passage in listed)
    firsts = {name: max(first_attempts_over_time(one, clients.left_s)) for name, one in passages.items()}
    print(
        f"\n{REQUESTS} requests, {dict(clients.statuses)}, {len(clients.left_s)} left; {waited:.0f} waited\n"
        f"first attempts at once, at most {firsts} (cap {CAP}); with all others "
        f"{ {name: most_at_once(listed) for name, listed in passages.items()} }\n"
        f"second attempts at the nodes {retries}, counted {retried:.0f}; failed open {failed_open:.0f}"
    )
    assert set(clients.statuses) == {200}
    assert waited > REQUESTS / 2
    assert max(firsts.values()) == CAP
    assert failed_open == 0
    assert 0 < retries <= retried
