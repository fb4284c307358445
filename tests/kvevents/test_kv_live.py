"""Events over real sockets: simulated engines that publish them, and a router that follows."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
from kv_support import make_node, recorded

from extproc.config.node import KvEvents
from extproc.engines.kvevents import LAST, read_message
from extproc.engines.kvsockets import KvSockets
from extproc.fleet import Fleet, Pace
from extproc.kvfeeds import KvFeeds
from extproc.learner import MAX_BODY_BYTES, MAX_WAITING, Learner
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing.blocks import PromptBlocks, prompt_blocks
from extproc.routing.node import Node
from extproc.routing.router import Decision, Router
from extproc.simulator.engine import RunningSimulator, start
from extproc.simulator.options import SimulatorOptions

LONG_S = 20.0
MODEL = "simulated-8b"
ANY = "tcp://127.0.0.1:*"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class System:
    """Simulated engines with events, and all of the service that has to do with them."""

    def __init__(self, simulators: list[RunningSimulator]) -> None:
        self.simulators = simulators
        self.nodes = [_node(f"n{i}", simulator) for i, simulator in enumerate(simulators)]
        self.router = Router(self.nodes, rng=random.Random(1))
        self.feeds = KvFeeds(self.nodes, self.router.exact)
        self.learner = Learner(self.nodes, self.router.exact)
        pace = Pace(probe_period_s=0.1, scrape_period_s=0.1)
        self.fleet = Fleet(self.nodes, lambda node: None, self.router.reported, pace=pace)
        self.http = aiohttp.ClientSession(headers={"Content-Type": "application/json"})

    async def ask(self, text: str, **members: Any) -> tuple[Decision, int]:
        """Route a chat and have it answered: the decision, and how many tokens the engine had cached."""
        decision, body = self.decide(text, **members)
        usage = (await self.post(decision.node, body))["usage"]
        decision.booking.release(time.monotonic())
        return decision, (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]

    async def post(self, node: Node, body: bytes) -> Any:
        async with self.http.post(node.config.endpoint + Api.CHAT_COMPLETIONS, data=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    def decide(self, text: str, **members: Any) -> tuple[Decision, bytes]:
        request, body = _chat(text, **members)
        decision = self.router.decide(request, time.monotonic())
        assert decision is not None
        assert self.learner.on_routed is not None
        self.learner.on_routed(decision, request, body)
        return decision, body

    def matched_bytes(self, node: Node, text: str, **members: Any) -> float:
        """What a decision on it would count on."""
        request, _ = _chat(text, **members)
        matched = self.router.caches.matched_bytes(request, self.blocks(request))
        return 0.0 if matched is None else float(matched[node.slot])

    def blocks(self, request: RoutingRequest) -> PromptBlocks:
        return prompt_blocks(request, self.router._secret)

    async def learned(self, text: str, **members: Any) -> None:
        blocks = self.blocks(_chat(text, **members)[0])
        await until(lambda: not self.router.exact.wants(self.nodes[0], blocks))


def _chat(text: str, **members: Any) -> tuple[RoutingRequest, bytes]:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **members}
    body = json.dumps(chat).encode()
    return parse(Api.CHAT_COMPLETIONS, body), body


def _node(node_id: str, simulator: RunningSimulator) -> Node:
    endpoint, replay = simulator.kv_endpoints
    events = {"endpoint": endpoint, "replay_endpoint": replay, "topic": "kv@"}
    return make_node(node_id, models=(MODEL,), endpoint=simulator.url, kv_events=events)


@asynccontextmanager
async def running(count: int = 1, **options: Any) -> AsyncIterator[System]:
    told = {"speed": float("inf"), "kv_events": ANY, "kv_replay": ANY, "kv_topic": "kv@sim", **options}
    simulators = [await start(SimulatorOptions(**told)) for _ in range(count)]
    system = System(simulators)
    await system.feeds.start()
    await system.learner.start()
    await system.fleet.start()
    try:
        for i, node in enumerate(system.nodes):  # engines speak once they have something to say
            await _say_something(system, node, i)
        yield system
    finally:
        await system.http.close()
        await system.learner.stop()
        await system.feeds.stop()
        await system.fleet.stop()
        for simulator in simulators:
            await simulator.stop()


async def _say_something(system: System, node: Node, number: int) -> None:
    before = node.events.messages
    await system.post(node, _chat(f"{number} hello " * 20)[1])
    await until(lambda: node.events.messages > before and node.events.exact)


def words(number: int, count: int = 400) -> str:
    """A prompt that shares nothing with those of other numbers."""
    chance = random.Random(number)
    return " ".join(f"{chance.randrange(10**6)}" for _ in range(count))


async def test_a_listener_gets_what_is_published_and_repeated() -> None:
    async with running(num_blocks=60) as system:
        await system.ask(words(1))
        await system.ask(words(2))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        assert system.nodes[0].config.kv_events is not None
        late = KvSockets(context, system.nodes[0].config.kv_events)
        late.ask(0)
        got = []
        async with asyncio.timeout(LONG_S):
            while (frames := late.repeated()) is None or frames[0] != LAST:
                got += [frames] if frames else []
                await asyncio.sleep(0.005)
        late.close()
        context.term()
    real = {event["type"]: set(event) for line in recorded() for event in line["batch"][1]}
    for _, payload in got:
        for event in msgspec.msgpack.decode(payload)[1]:
            assert set(event) == real[event["type"]]
    messages = [read_message(*frames) for frames in got]
    assert [message.number for message in messages if message] == list(range(len(got)))
    assert len(got) >= 2


@pytest.mark.parametrize("topic", [[], [b"kv@m"]], ids=["as before vLLM 0.32", "with the topic"])
async def test_repeated_messages_are_read_in_both_layouts(topic: list[bytes]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = context.socket(zmq.ROUTER)
    engine.bind(ANY)
    address = engine.get_string(zmq.LAST_ENDPOINT)
    listener = KvSockets(context, KvEvents(endpoint=address, replay_endpoint=address))
    listener.ask(7)
    await until(lambda: bool(engine.poll(0)))
    who, *asked = engine.recv_multipart()
    assert asked == [b"", (7).to_bytes(8, "big")]
    engine.send_multipart((who, b"", *topic, asked[1], b"payload"))
    engine.send_multipart((who, b"", *([b""] if topic else []), LAST, b""))
    got: list[tuple[bytes, bytes]] = []
    await until(lambda: bool((frames := listener.repeated()) and got.append(frames)) or len(got) == 2)
    assert got == [(asked[1], b"payload"), (LAST, b"")]
    listener.close()
    context.destroy(linger=0)


async def test_an_engine_says_so_where_it_cannot_publish() -> None:
    with pytest.raises(ValueError, match="set kv_events too"):
        SimulatorOptions(kv_replay=ANY)
    async with running() as system:
        endpoint, _ = system.simulators[0].kv_endpoints
        with pytest.raises(OSError, match="cannot publish KV events: Address already in use"):
            await start(SimulatorOptions(kv_events=endpoint))


async def test_what_the_engine_evicts_is_not_counted_on() -> None:
    async with running(num_blocks=60) as system:
        [node] = system.nodes
        await system.ask(words(1))
        await system.learned(words(1))
        assert system.matched_bytes(node, words(1)) > 2000
        before = node.events.messages
        await system.ask(words(2))
        await until(lambda: node.events.messages > before and system.matched_bytes(node, words(1)) < 2000)
        _, cached = await system.ask(words(1))
        assert cached * 4 < 2000


async def test_a_prompt_that_others_sent_to_another_node_is_found_there() -> None:
    async with running(2) as system:
        for node in system.nodes:
            await system.post(node, _chat(words(1))[1])
        await until(lambda: all(system.router.exact.blocks(node) > 40 for node in system.nodes))
        system.decide(words(1))
        await system.learned(words(1))
        assert all(system.matched_bytes(node, words(1)) > 2000 for node in system.nodes)


async def test_salted_prompts_are_learned_with_their_salt() -> None:
    async with running(num_blocks=60) as system:
        [node] = system.nodes
        await system.ask(words(1), cache_salt="mine")
        await system.learned(words(1), cache_salt="mine")
        assert system.matched_bytes(node, words(1), cache_salt="mine") > 2000
        await system.ask(words(2))
        await until(lambda: system.matched_bytes(node, words(1), cache_salt="mine") < 2000)


async def missed_ratio(system: System) -> float:
    """Tokens that decisions were wrong about, over those of all prompts; others use the engines, too."""
    chance = random.Random(3)
    missed, tokens = 0.0, 0
    for number in [chance.randrange(6) for _ in range(30)]:
        await system.post(chance.choice(system.nodes), _chat(words(chance.randrange(100, 200), 600))[1])
        decision, cached = await system.ask(words(number, 1000))
        missed += abs(decision.matched_bytes / 4 - cached)
        tokens += decision.blocks.total_bytes // 4
        await asyncio.sleep(0.15)  # time for the tokens to come, and for two looks at the feeds
    return missed / tokens


async def test_what_decisions_count_on_is_what_engines_find_cached() -> None:
    async with running(2, num_blocks=250) as system:
        followed = await missed_ratio(system)
    async with running(2, num_blocks=250) as system:
        await system.learner.stop()
        system.learner._waiting.extend([None] * MAX_WAITING)  # type: ignore[list-item]  # it is too busy
        alone = await missed_ratio(system)
    assert followed < 0.1 < alone / 2, (followed, alone)  # ends of prompts fill no block


async def test_an_engine_that_is_killed_and_comes_back_holds_nothing() -> None:
    async with running() as system:
        [node] = system.nodes
        await system.ask(words(1))
        await system.learned(words(1))
        endpoint, replay = system.simulators[0].kv_endpoints
        port = node.config.port
        await system.simulators[0].kill()
        told = SimulatorOptions(speed=float("inf"), kv_events=endpoint, kv_replay=replay, kv_topic="kv@sim")
        system.simulators[0] = again = await start(told, port=port)
        try:
            await until(lambda: system.matched_bytes(node, words(1)) == 0.0)
            await _say_something(system, node, 9)
            await system.ask(words(2))
            await until(lambda: system.router.exact.blocks(node) > 40)
            assert node.events.exact
        finally:
            await again.stop()


async def test_a_busy_learner_takes_no_more_and_never_long_prompts() -> None:
    async with running() as system:
        await system.learner.stop()
        waiting = system.learner._waiting
        system.decide("x" * MAX_BODY_BYTES)
        assert not waiting
        for number in range(MAX_WAITING + 5):
            system.decide(words(100 + number))
        assert len(waiting) == MAX_WAITING


async def test_prompts_with_images_are_not_sent_again() -> None:
    async with running() as system:
        parts = [
            {"type": "text", "text": words(1)},
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}},
        ]
        system.decide("", messages=[{"role": "user", "content": parts}])
        system.decide(words(2))
        await system.learned(words(2))
        image = system.blocks(_chat("", messages=[{"role": "user", "content": parts}])[0])
        assert system.router.exact.wants(system.nodes[0], image)


async def test_a_node_without_events_has_nothing_to_learn() -> None:
    assert Learner([make_node(kv_events=None)], Router([make_node()]).exact).on_routed is None
    feeds = KvFeeds([make_node(kv_events=None)], Router([make_node()]).exact)
    await feeds.start()
    await feeds.stop()


async def test_nodes_with_events_come_and_go() -> None:
    async with running() as system:
        before = system.nodes[0]
        for part in (system.router, system.feeds, system.learner):
            part.set_nodes([plain := make_node("plain", models=(MODEL,), kv_events=None)])
        assert system.learner.on_routed is None
        messages = before.events.messages
        fresh = _node("n0", system.simulators[0])
        for part in (system.router, system.feeds, system.learner):
            part.set_nodes([plain, fresh])
        system.nodes[:] = [fresh]
        await _say_something(system, fresh, 7)
        system.decide(words(1), **{"x-inferact": {"node_affinity": "n0"}})
        await system.learned(words(1))
        assert before.events.messages == messages
