"""What is known of real engines' caches, and what routing by it is worth: the engines' own counters tell."""

import asyncio
import time

import pytest
from engine_processes import BLOCK_TOKENS, BLOCKS, GGUF_MODEL, MODEL, EngineProcess, Engines
from envoy_stack import Stack, until
from live_sessions import SESSIONS, TURNS, Turn, converse

from extproc.routing.node import REPORT_FRESH_S

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

LEAST_OF_ONE_CACHE = 0.95
"""The hit ratio over that of one engine with as much cache as all together."""
MOST_WRONG = 0.05
"""Matched tokens that decisions counted on, against those the engine found, over the prompt tokens."""
LIMIT_S = 40.0
KV_USED = "vllm:kv_cache_usage_perc"
OLDEST_S = 2 * REPORT_FRESH_S
"""A report may be as old, and have taken as long."""
DIFFERENT = 6
"""Numbers to see: the stream fills more and more of the cache."""
ROUNDED = 0.1
"""`/status` shows a tenth of a percent."""


class Counters:
    """How many prompt tokens engines looked up in their caches and found there, since this was made."""

    def __init__(self, *engines: EngineProcess) -> None:
        self._engines = engines
        self._before = (0.0, 0.0)

    async def begin(self) -> "Counters":
        """Count from now on."""
        self._before = await self._now()
        return self

    async def hit_ratio(self) -> float:
        """The share that was found."""
        queries, hits = await self._now()
        return (hits - self._before[1]) / (queries - self._before[0])

    async def _now(self) -> tuple[float, float]:
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        queries, hits = [[await engine.metric(name) for engine in self._engines] for name in names]
        return sum(queries), sum(hits)


async def status(stack: Stack, node_id: str) -> dict[str, object]:
    """A node in `/status`."""
    answer = (await stack.client.get("/status")).json()
    return next(node for node in answer["nodes"] if node["id"] == node_id)


async def test_the_events_of_both_engines_are_followed(stack: Stack) -> None:
    for node_id in ("a", "b"):
        assert (await status(stack, node_id))["knowledge_level"] == "events"
    assert (await status(stack, "gguf"))["knowledge_level"] != "events"


async def test_the_capacity_of_an_engine_is_what_it_was_told(stack: Stack) -> None:
    reports = [stack.service.router.nodes[node_id].report for node_id in ("a", "b")]
    assert [report and report.kv_capacity_tokens for report in reports] == [BLOCKS * BLOCK_TOKENS] * 2


async def test_a_prompt_goes_where_it_was_before_and_is_cached_there(stack: Stack) -> None:
    prompt = "where was I " * 60
    first = await stack.chat(prompt, model=MODEL)
    node_id = first.headers["x-inferact-node"]
    for _ in range(3):
        again = await stack.chat(prompt, model=MODEL)
        assert again.headers["x-inferact-node"] == node_id
        usage = again.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]


async def test_llamacpp_tells_its_cached_tokens_too(stack: Stack) -> None:
    body = {"model": GGUF_MODEL, "prompt": "Once upon a time there was a king. " * 20, "max_tokens": 2}
    for _ in range(2):
        answer = await stack.client.post("/v1/completions", json=body)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]


async def test_kv_use_is_what_the_engine_says(stack: Stack, engines: Engines) -> None:
    """A stream fills the cache: what is shown is what the engine said within the last seconds."""
    body = {"model": MODEL, "max_tokens": 7900, "ignore_eos": True, "stream": True, "prompt": "count to ten"}
    said: list[tuple[float, float]] = []
    seen: set[float] = set()
    async with stack.client.stream("POST", "/v1/completions", json=body) as answer:
        node_id = answer.headers["x-inferact-node"]
        async with asyncio.timeout(LIMIT_S):
            while len(seen) < DIFFERENT:
                await asyncio.sleep(0.1)
                shown = (await status(stack, node_id))["kv_cache_used_pct"]
                if shown is None:  # the engine has not told for some seconds
                    continue
                shown_pct = float(str(shown))
                asked_s, used_ratio = time.monotonic(), await engines.of(node_id).metric(KV_USED)
                said.append((asked_s, used_ratio * 100))
                old = [pct for at_s, pct in said if at_s < asked_s - OLDEST_S]
                assert max(old, default=0.0) - ROUNDED <= shown_pct <= used_ratio * 100 + ROUNDED
                seen.add(shown_pct)


async def predicted(stack: Stack, turn: Turn) -> int:
    """Tokens that the decision on a request counted on."""
    receipt = (await stack.admin(f"/admin/decisions/{turn.request_id}", "GET")).json()
    chosen = next(candidate for candidate in receipt["candidates"] if candidate["role"] == "chosen")
    return int(chosen["matched_tokens"])


async def test_forty_sessions_find_as_much_in_two_caches_as_in_one_of_the_same_size(
    stack: Stack, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = await Counters(engines.whole).begin(), await Counters(engines.a, engines.b).begin()
    await converse(engines.whole.url, seed=1)
    turns = await converse(stack.url, seed=1)
    assert len(turns) == SESSIONS * TURNS
    in_one, in_two = await one.hit_ratio(), await two.hit_ratio()

    missed = [abs(await predicted(stack, turn) - turn.cached_tokens) for turn in turns]
    wrong = sum(missed) / sum(turn.prompt_tokens for turn in turns)
    told = sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)
    with capsys.disabled():
        print(
            f"\nhit ratio of two {in_two:.1%} (usage: {told:.1%}), of one {in_one:.1%}; wrong by {wrong:.1%}"
        )
    assert abs(told - in_two) < 0.02, "usage and counters tell the same"
    assert in_two >= LEAST_OF_ONE_CACHE * in_one
    assert wrong <= MOST_WRONG
    for node_id in ("a", "b"):
        assert (await status(stack, node_id))["knowledge_level"] == "events"


async def test_every_event_was_read(stack: Stack) -> None:
    for node_id in ("a", "b"):
        feed = stack.service.router.nodes[node_id].events
        assert feed.messages > 0 and not feed.unreadable and not feed.gaps


async def test_a_service_that_starts_later_gets_the_past_repeated(stack: Stack) -> None:
    known = {
        node_id: stack.service.router.exact.blocks(stack.service.router.nodes[node_id]) for node_id in "ab"
    }
    await stack.restart_service()
    nodes = stack.service.router.nodes
    await until(lambda: all(nodes[node_id].events.exact for node_id in "ab"), LIMIT_S)
    assert {node_id: stack.service.router.exact.blocks(nodes[node_id]) for node_id in "ab"} == known
