"""Drains and restores at random under load: what is drained gets nothing, and nobody notices.

`INFERACT_DRAIN_CYCLES=1000` makes it the long run.
"""

import asyncio
import os
import random
import time
from dataclasses import dataclass, field

import pytest
from envoy_stack import Stack, running_stack

pytestmark = pytest.mark.envoy

CYCLES = int(os.environ.get("INFERACT_DRAIN_CYCLES", "30"))
RESTART_EVERY = 10
CLIENTS = 16
NODES = "abcd"


@dataclass
class Watch:
    """What clients saw, and which node was drained from when to when."""

    answers: list[tuple[float, float, int, str]] = field(default_factory=list)
    drained: list[tuple[float, float, str]] = field(default_factory=list)
    done: bool = False

    def wrong(self) -> list[tuple[float, float, str]]:
        """Requests that began and ended while a node was drained, and were served by it."""
        return [
            (began_s, ended_s, node)
            for began_s, ended_s, _, node in self.answers
            for since_s, until_s, drained in self.drained
            if node == drained and since_s <= began_s and ended_s <= until_s
        ]


async def keep_asking(stack: Stack, watch: Watch, number: int) -> None:
    while not watch.done:
        began_s = time.monotonic()
        answer = await stack.chat(f"question {number}", max_tokens=2)
        node = answer.headers.get("x-inferact-node", "")
        watch.answers.append((began_s, time.monotonic(), answer.status_code, node))


async def drain_and_restore(stack: Stack, watch: Watch, cycle: int, chance: random.Random) -> None:
    node = chance.choice(NODES)
    assert (await stack.admin(f"/admin/nodes/{node}/drain")).status_code == 200
    since_s = time.monotonic()
    await asyncio.sleep(chance.uniform(0.0, 0.1))
    if cycle % RESTART_EVERY == RESTART_EVERY - 1:  # while it is away, Envoy must know
        await stack.service.stop(grace_s=0)
        await asyncio.sleep(0.1)
        await stack.restart_service()
    watch.drained.append((since_s, time.monotonic(), node))
    assert (await stack.admin(f"/admin/nodes/{node}/restore")).status_code == 200
    await asyncio.sleep(chance.uniform(0.0, 0.05))


async def test_no_request_fails_or_goes_to_a_drained_node() -> None:
    sims = {name: {"token_interval_s": 0.005, "speed": 1.0, "max_num_seqs": 256} for name in NODES}
    async with running_stack(sims=sims) as stack:
        watch, chance = Watch(), random.Random(1)
        asking = [asyncio.create_task(keep_asking(stack, watch, number)) for number in range(CLIENTS)]
        try:
            for cycle in range(CYCLES):
                await drain_and_restore(stack, watch, cycle, chance)
        finally:
            watch.done = True
            await asyncio.gather(*asking)
        statuses = {status for _, _, status, _ in watch.answers}
        during = sum(
            since_s <= began_s and ended_s <= until_s
            for began_s, ended_s, _, _ in watch.answers
            for since_s, until_s, _ in watch.drained
        )
        print(f"{CYCLES} drains, {len(watch.answers)} answers, {during} of them within a drain")
        assert statuses == {200}
        assert watch.wrong() == []
        assert during > CYCLES, "too few requests to tell"
        assert {node for _, _, _, node in watch.answers} == set(NODES), "restored nodes are used again"
