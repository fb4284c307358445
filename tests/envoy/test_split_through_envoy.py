"""Split requests on the real Envoy: the same answers, and none lost, whatever fails on the way."""

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml
from aiohttp import web
from envoy_stack import MODEL, Stack, node_entry, stack_over, until

from bench.pd_engine import Handovers, Network
from extproc.routing.node import Health
from extproc.simulator.engine import RunningSimulator
from extproc.simulator.faults import Fault, FaultKind
from extproc.simulator.journal import Outcome
from extproc.simulator.options import SimulatorOptions

pytestmark = pytest.mark.envoy

CHAOS_S = float(os.environ.get("INFERACT_SPLIT_CHAOS_S", "6"))
ROLES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
LONG = "a long story " * 1000
"""Some 3,000 tokens."""


@dataclass
class Pools:
    """Two nodes that prefill and two that decode, behind Envoy."""

    stack: Stack
    network: Network
    handovers: dict[str, Handovers]

    @property
    def sims(self) -> dict[str, RunningSimulator]:
        return self.stack.sims

    def total(self, name: str) -> int:
        """A count over all engines."""
        return sum(getattr(one, name) for one in self.handovers.values())

    async def idle(self) -> None:
        """Wait until nothing is booked."""
        await until(lambda: not any(self.stack.in_flight().values()))

    async def decision(self, answer: httpx.Response) -> dict[str, Any]:
        """The receipt of an answer."""
        path = f"/admin/decisions/{answer.headers['x-request-id']}"
        return dict((await self.stack.admin(path, "GET")).json())

    async def restart(self, name: str) -> None:
        """A new engine in the place of one that was killed."""
        port = self.stack.service.router.nodes[name].config.port
        self.sims[name], self.handovers[name] = await self.network.start(options(), port)

    def is_spared(self, name: str) -> bool:
        """Whether the others can do without a node: those that fell often are slow to come back."""
        others = [node for node in self.stack.service.router.nodes.values() if node.id != name]
        return sum(node.health is not Health.OFFLINE for node in others) >= 2


def options(speed: float = 200.0) -> SimulatorOptions:
    """Engines that all say the same."""
    return SimulatorOptions(name="sim", models=(MODEL,), speed=speed, record=True)


@contextlib.asynccontextmanager
async def pools(splits: bool = True, speed: float = 200.0, **sections: Any) -> AsyncIterator[Pools]:
    """Start it all, and wait until the nodes are healthy."""
    network, sims, handovers = Network(), {}, {}
    async with contextlib.AsyncExitStack() as stack:
        for name in ROLES:
            sims[name], handovers[name] = await network.start(options(speed))
        entries = [node_entry(name, sim.url, role=ROLES[name]) for name, sim in sims.items()]
        batching = {"prefill_decode_split": splits}
        whole = await stack.enter_async_context(stack_over(entries, batching=batching, **sections))
        whole.sims = sims
        try:
            yield Pools(whole, network, handovers)
        finally:
            for sim in sims.values():
                await sim.stop()


async def told(stack: Stack, number: int, stream: bool = False) -> str:
    """What an answer to a long prompt says."""
    answer = await stack.chat(f"{number} {LONG}", max_tokens=50, temperature=0, stream=stream)
    assert answer.status_code == 200
    if not stream:
        return str(answer.json()["choices"][0]["message"]["content"])
    assert answer.text.rstrip().endswith("data: [DONE]")
    return "".join(part.split('"content":"')[1].split('"')[0] for part in answer.text.split("\n\n")[1:-3])


async def test_answers_are_those_of_whole_requests() -> None:
    async with pools(splits=False) as one:
        whole = [await told(one.stack, number) for number in range(8)]
        streamed = [await told(one.stack, number, stream=True) for number in range(8, 12)]
        assert one.total("prefills") == 0
    async with pools() as one:
        assert [await told(one.stack, number) for number in range(8)] == whole
        assert [await told(one.stack, number, stream=True) for number in range(8, 12)] == streamed
        assert (one.total("prefills"), one.total("fetched"), one.total("failed")) == (12, 12, 0)
        assert not any(each.held for each in one.handovers.values()), "no block is left behind"
        assert one.handovers["d1"].prefills == one.handovers["d2"].prefills == 0
        await one.idle()
        assert await one.stack.metric("inferact_prefill_legs_total") == 12
        assert await one.stack.metric("inferact_prefill_fallbacks_total") == 0
        assert await one.stack.metric("inferact_prompt_tokens_total", source="transferred") > 8 * 3000


async def test_the_receipt_shows_both_legs() -> None:
    async with pools() as one:
        answer = await one.stack.chat(LONG)
        receipt = await one.decision(answer)
        leg = receipt["prefill"]
        assert leg["node"] in ("p1", "p2")
        assert (leg["failure"], receipt["candidates"][0]["node"]) == (None, answer.headers["x-inferact-node"])
        assert leg["took_s"] > 0 < leg["saved_s"]
        assert f"{leg['node']} computed the prompt first" in receipt["why"]
        status = (await one.stack.client.get("/status")).json()
        assert {node["id"]: node["role"] for node in status["nodes"]} == ROLES


FAILING = {
    FaultKind.ERROR_500: "engine_death",
    FaultKind.ERROR_503: "overloaded",
    FaultKind.ERROR_429: "overloaded",
    FaultKind.RESET: "lost",
    FaultKind.HANG: "timed_out",
}


@pytest.mark.parametrize("kind", FAILING)
async def test_a_prefill_node_that_fails_costs_nobody_an_answer(kind: FaultKind) -> None:
    async with pools(scheduler={"request_timeout_ms": 3000}) as one:
        for name in ("p1", "p2"):
            one.sims[name].faults.arm([Fault(kind)])
        answer = await one.stack.chat(LONG)
        assert answer.status_code == 200
        assert answer.headers["x-inferact-attempts"] == "1"
        assert (await one.decision(answer))["prefill"]["failure"] == FAILING[kind]
        assert one.total("fetched") == 0
        await one.idle()
        assert await one.stack.metric("inferact_prefill_fallbacks_total") == 1
        assert await one.stack.metric("inferact_prefill_leg_failures_total", reason=FAILING[kind]) == 1


async def test_a_prefill_node_that_errs_again_and_again_goes_offline() -> None:
    async with pools() as one:
        for name in ("p1", "p2"):
            one.sims[name].faults.arm([Fault(FaultKind.ERROR_500)])
        nodes = one.stack.service.router.nodes
        for number in range(40):
            assert (await one.stack.chat(f"{number} {LONG}")).status_code == 200
            if all(nodes[name].health is Health.OFFLINE for name in ("p1", "p2")):
                break
        assert {nodes[name].health for name in ("p1", "p2")} == {Health.OFFLINE}
        assert {nodes[name].health for name in ("d1", "d2")} == {Health.HEALTHY}


async def test_a_prompt_that_the_engines_refuse_ends_in_their_own_words() -> None:
    async with pools() as one:
        answer = await one.stack.chat(LONG, temperature=-1)
        assert answer.status_code == 400
        assert "temperature" in answer.json()["error"]["message"]
        assert answer.headers["x-inferact-node"] in ("d1", "d2")
        assert await one.stack.metric("inferact_prefill_leg_failures_total", reason="refused") == 1
        assert one.stack.service.router.nodes["p1"].health is Health.HEALTHY


@pytest.mark.parametrize("kind", [FaultKind.ERROR_500, FaultKind.RESET, FaultKind.OUT_OF_MEMORY])
async def test_a_decode_node_that_fails_is_followed_by_one_that_computes_the_prompt(kind: FaultKind) -> None:
    async with pools() as one:
        for name in ("d1", "d2"):
            one.sims[name].faults.arm([Fault(kind, count=1)])
        answers = [await one.stack.chat(f"{number} {LONG}") for number in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert max(int(answer.headers["x-inferact-attempts"]) for answer in answers) >= 2
        assert one.total("failed") == 0, "nobody fetches what may belong to others by now"
        bodies = [recorded.body for sim in one.sims.values() for recorded in sim.stats.recorded]
        retried = [body for body in bodies if body.startswith(b"{   ")]
        assert retried
        assert all(b"kv_transfer_params" not in body for body in retried)
        await one.idle()


async def test_a_client_that_leaves_while_its_prompt_is_computed_cancels_that() -> None:
    async with pools(speed=1.0) as one:
        asking = asyncio.create_task(one.stack.chat(LONG * 8))
        await until(lambda: sum(one.stack.in_flight()[name] for name in ("p1", "p2")) == 1)
        assert sum(one.stack.in_flight()[name] for name in ("d1", "d2")) == 1
        asking.cancel()
        await one.idle()
        prefilling = [one.sims[name].stats.outcomes for name in ("p1", "p2")]
        await until(lambda: sum(outcomes[Outcome.ABORTED] for outcomes in prefilling) == 1)
        assert sum(one.sims[name].stats.attempts.total() for name in ("d1", "d2")) == 0


async def test_a_drained_prefill_node_takes_no_legs_and_ends_those_it_has() -> None:
    async with pools(speed=1.0) as one:
        asking = asyncio.create_task(one.stack.chat(LONG * 8))
        await until(lambda: one.stack.in_flight()["p1"] + one.stack.in_flight()["p2"] == 1)
        busy = next(name for name in ("p1", "p2") if one.stack.in_flight()[name])
        state = (await one.stack.admin(f"/admin/nodes/{busy}/drain")).json()
        assert state["requests_in_flight"] == 1
        assert (await asking).status_code == 200
        assert one.handovers[busy].prefills == 1
        other = "p2" if busy == "p1" else "p1"
        await one.stack.chat("another " + LONG)
        assert (one.handovers[busy].prefills, one.handovers[other].prefills) == (1, 1)
        await one.idle()


async def test_a_reload_turns_it_on_and_off_and_changes_roles() -> None:
    async with pools(splits=False) as one:
        config = yaml.safe_load(one.stack.config_file.read_text())

        async def reload(splits: bool, **roles: str) -> None:
            config["batching"]["prefill_decode_split"] = splits
            for node in config["nodes"]:
                node["role"] = roles.get(node["id"], node["role"])
            one.stack.config_file.write_text(yaml.safe_dump(config))
            assert (await one.stack.admin("/admin/reload")).status_code == 200

        async def prefills() -> dict[str, int]:
            assert (await one.stack.chat(f"{random.random()} {LONG}")).status_code == 200
            return {name: each.prefills for name, each in one.handovers.items() if each.prefills}

        assert await prefills() == {}
        await reload(True, p2="decode")
        assert await prefills() == {"p1": 1}
        await reload(True, p1="decode", p2="prefill")
        assert await prefills() == {"p1": 1, "p2": 1}
        await reload(False)
        assert await prefills() == {"p1": 1, "p2": 1}
        await one.idle()


class Rooms:
    """Engines of SGLang's, as far as this goes: the halves of a request meet in a room, or wait for ever."""

    def __init__(self) -> None:
        self.rooms: dict[int, asyncio.Event] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.runners: list[web.AppRunner] = []

    async def start(self, name: str) -> str:
        """One engine; its URL."""

        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            self.asked.append((name, body))
            if body.get("bootstrap_room") is None:
                return web.json_response({"object": "error", "message": "no room"}, status=400)
            met = self.rooms.setdefault(body["bootstrap_room"], asyncio.Event())
            if [one["bootstrap_room"] for _, one in self.asked].count(body["bootstrap_room"]) == 2:
                met.set()
            await met.wait()
            return web.json_response({"choices": [], "by": name})

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": []})

        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_both_halves_of_sglang_get_the_request_at_once_and_meet() -> None:
    rooms = Rooms()
    entries = [
        node_entry(name, await rooms.start(name), backend="sglang", role=role) for name, role in ROLES.items()
    ]
    try:
        async with stack_over(entries, healthy=False, batching={"prefill_decode_split": True}) as stack:
            for text in ("short", LONG):
                answer = await stack.chat(text, bootstrap_room=7)
                assert answer.status_code == 200
                assert answer.json()["by"] in ("d1", "d2")
            await until(lambda: not any(stack.in_flight().values()))
    finally:
        for runner in rooms.runners:
            await runner.cleanup()
    assert len(rooms.asked) == 4
    assert len(rooms.rooms) == 2
    assert 7 not in rooms.rooms, "that was the client's"
    for name, body in rooms.asked:
        assert body["bootstrap_host"] == "127.0.0.1"
        assert body["max_tokens"] == (1 if name in ("p1", "p2") else 4)


class Clients:
    """Clients that ask for long and short prompts, streamed or not, until they are told to stop."""

    def __init__(self, one: Pools, seed: int) -> None:
        self.one = one
        self.random = random.Random(seed)
        self.stopped = asyncio.Event()
        self.ends: Counter[str] = Counter()

    async def run(self) -> None:
        """One client."""
        number = self.random.randrange(10**9)
        while not self.stopped.is_set():
            number += 1
            text = f"{number} {LONG if self.random.random() < 0.6 else 'short'}"
            stream = self.random.random() < 0.4
            try:
                answer = await self.one.stack.chat(text, max_tokens=30, stream=stream)
            except httpx.HTTPError:
                self.ends["stream broken" if stream else "lost"] += 1
                continue
            whole = not stream or answer.text.rstrip().endswith("data: [DONE]")
            dead = stream and '"error"' in answer.text
            end = "stream broken" if dead or not whole else str(answer.status_code)
            self.ends[end] += 1


ENOUGH = 50
"""Answers, however slow the machine."""


async def test_nothing_is_lost_while_nodes_of_both_pools_are_killed() -> None:
    """A stream breaks when its node dies under it. Nothing else may happen to anybody."""
    async with pools(speed=20.0) as one:
        clients, chance = Clients(one, seed=3), random.Random(4)
        running = [asyncio.create_task(clients.run()) for _ in range(12)]
        loop = asyncio.get_running_loop()
        until_s, kills = loop.time() + CHAOS_S, 0
        while loop.time() < until_s or (loop.time() < until_s + 60 and clients.ends["200"] <= ENOUGH):
            await asyncio.sleep(chance.uniform(0.3, 1.5))
            victim = chance.choice(sorted(ROLES))
            if not one.is_spared(victim):
                continue
            await one.sims[victim].kill()
            kills += 1
            await asyncio.sleep(chance.uniform(0.0, 1.5))
            await one.restart(victim)
        clients.stopped.set()
        await asyncio.gather(*running)
        legs = await one.stack.metric("inferact_prefill_legs_total")
        whole = await one.stack.metric("inferact_prefill_fallbacks_total")
        print(f"\n{kills} kills, {legs:.0f} legs, {whole:.0f} went on whole, ends {dict(clients.ends)}")
        assert set(clients.ends) <= {"200", "stream broken"}
        assert clients.ends["stream broken"] <= 12 * kills
        assert clients.ends["200"] > ENOUGH
        assert one.total("failed") == 0
        await one.idle()
