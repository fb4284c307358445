"""Thousands of mixed requests: nothing is counted twice, nothing is lost, nothing stays behind."""

import asyncio
import os
import random
import re
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from envoy_stack import MODEL, Stack, running_stack, serve_apart

from extproc.simulator.faults import Fault, FaultKind

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

REQUESTS = int(os.environ.get("INFERACT_LEDGER_REQUESTS", "30000"))
CLIENTS = 32
TEXTS = 2000
FLAT_BYTES = 5 * 1024 * 1024


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Scrape:
    """The service's metrics at one moment."""

    def __init__(self, text: str) -> None:
        self.text = text

    def total(self, name: str, **labels: str) -> float:
        """The sum over the samples of a metric that carry these labels."""
        found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", self.text, re.MULTILINE)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for given, value in found if all(label in given for label in wanted))


class Load:
    """Clients that ask, stream, leave and err, by a seeded plan."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        # So few that the prefix index knows them all half way: what grows after that is a leak.
        self.texts = [f"{self.random.random()} " * self.random.randrange(1, 40) for _ in range(TEXTS)]
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.failures: Counter[str] = Counter()

    async def run(self, requests: int) -> None:
        """Send this many requests, `CLIENTS` at a time."""
        left = iter(range(requests))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def client() -> None:
                for _ in left:
                    await self._one(session)

            await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        kind = self.random.choices(("plain", "stream", "abort", "bad", "unknown"), (60, 22, 8, 5, 5))[0]
        self.kinds[kind] += 1
        model = "nobody/knows" if kind == "unknown" else MODEL
        text = self.random.choice(self.texts)
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
        if kind in ("stream", "abort"):
            body |= {"stream": True, "max_tokens": 20 if kind == "abort" else 5}
        if kind == "bad":
            body["x-inferact"] = {"priority": "high"}
        try:
            async with session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
                self.statuses[answer.status] += 1
                if kind == "abort":
                    await answer.content.readany()
                    answer.close()
                else:
                    await answer.read()
        except aiohttp.ClientError as error:
            self.failures[type(error).__name__] += 1


async def settled(stack: Stack) -> Scrape:
    """The metrics once nothing is in flight and the last log entries have come."""
    for _ in range(200):
        await asyncio.sleep(0.1)
        scrape = Scrape((await stack.client.get("/metrics")).text)
        if scrape.total("inferact_requests_in_flight") == 0:
            await asyncio.sleep(0.5)
            return Scrape((await stack.client.get("/metrics")).text)
    raise AssertionError("requests stay in flight")


async def test_the_ledger_balances() -> None:
    sims = {name: {"speed": 1000.0, "record": False} for name in "abc"}
    async with running_stack(sims=sims) as stack:
        service = await serve_apart(stack)
        try:
            load = Load(stack.url, seed=7)
            stack.sims["a"].faults.arm([Fault(FaultKind.ERROR_503, probability=0.02)])
            stack.sims["b"].faults.arm([Fault(FaultKind.RESET, probability=0.01)])
            await load.run(REQUESTS // 2)
            half_bytes = resident_bytes(service.pid)
            await load.run(REQUESTS - REQUESTS // 2)
            scrape = await settled(stack)
            whole_bytes = resident_bytes(service.pid)
            status = (await stack.client.get("/status")).json()
        finally:
            service.terminate()
            await service.wait()
    attempts = sum(sum(sim.stats.attempts.values()) for sim in stack.sims.values())
    served, retried = scrape.total("inferact_requests_total"), scrape.total("inferact_retries_total")
    rejected = scrape.total("inferact_rejections_total")
    unarrived = served + retried - attempts
    print(
        f"\n{REQUESTS} requests {dict(load.kinds)}\n"
        f"statuses {dict(load.statuses)}, failures {dict(load.failures)}\n"
        f"served {served:.0f} + retried {retried:.0f} - attempts at the nodes {attempts} = "
        f"{unarrived:.0f} aborted before they arrived; rejected {rejected:.0f}\n"
        f"resident memory: {half_bytes / 2**20:.1f} MiB half way, {whole_bytes / 2**20:.1f} MiB at the end"
    )
    assert not load.failures
    assert {node["requests_in_flight"] for node in status["nodes"]} == {0}
    assert status["total_requests_routed"] == served
    assert rejected == load.kinds["bad"] + load.kinds["unknown"]
    assert served == REQUESTS - rejected
    assert retried > 0
    assert 0 <= unarrived <= load.kinds["abort"] * 0.01
    assert abs(whole_bytes - half_bytes) < FLAT_BYTES
