"""What the service learns of answers through the real Envoy, from simulated engines."""

import json
from typing import Any

import httpx
import pytest
from envoy_stack import MODEL, Stack, running_stack, until

from extproc.exchange import Exchange
from extproc.openai.usage import Usage
from extproc.routing.outcome import Ended
from extproc.simulator.faults import Fault, FaultKind

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

MESSAGES = [{"role": "user", "content": "what was the weather like in Zürich? " * 8}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TO_A = {"x-inferact": {"node_affinity": "a"}}


@pytest.fixture(autouse=True)
async def settled(stack: Stack):
    """The entries of one test do not come in the next."""
    yield
    await until(lambda: sum(stack.in_flight().values()) == 0)
    for sim in stack.sims.values():
        sim.faults.clear()
    stack.outcomes.clear()


async def ask(stack: Stack, path: str, **body: Any) -> httpx.Response:
    """Any routed path."""
    return await stack.client.post(path, json={"model": MODEL, **body})


def usage_in(answer: httpx.Response) -> Usage:
    """The usage that a client finds in an answer of any kind."""
    texts = [line.removeprefix("data: ") for line in answer.text.splitlines() if '"usage"' in line]
    last = json.loads(texts[-1])
    usage = last.get("response", last)["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    output = usage.get("completion_tokens", usage.get("output_tokens", 0))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return Usage(prompt, output, details and details["cached_tokens"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12}),
        ("/v1/completions", {"prompt": "once upon a time " * 20, "max_tokens": 12}),
        ("/v1/responses", {"input": "tell me more " * 20, "max_output_tokens": 12}),
        ("/v1/embeddings", {"input": "a text"}),
    ],
)
async def test_the_usage_of_a_json_answer(stack: Stack, path: str, body: dict[str, Any]) -> None:
    answer = await ask(stack, path, **body)
    outcome = await stack.outcome()
    assert answer.status_code == 200
    assert outcome.usage == usage_in(answer)
    assert (outcome.node_id, outcome.status) == (answer.headers["x-inferact-node"], 200)
    assert (outcome.ended, outcome.attempts, outcome.ttft_s) == (Ended.COMPLETE, 1, None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, **WITH_USAGE}),
        ("/v1/completions", {"prompt": "once upon a time " * 20, "max_tokens": 12, **WITH_USAGE}),
        ("/v1/responses", {"input": "tell me more " * 20, "max_output_tokens": 12, "stream": True}),
    ],
)
async def test_the_usage_and_first_token_of_a_stream(stack: Stack, path: str, body: dict[str, Any]) -> None:
    answer = await ask(stack, path, **body)
    outcome = await stack.outcome()
    assert outcome.usage == usage_in(answer)
    assert outcome.ended is Ended.COMPLETE
    assert outcome.ttft_s is not None
    assert 0 < outcome.ttft_s <= outcome.duration_s


async def test_a_stream_without_usage_is_counted_and_nothing_is_invented(stack: Stack) -> None:
    before = await stack.metric("inferact_streams_without_usage_total")
    tokens = await stack.metric("inferact_prompt_tokens_total")
    await ask(stack, "/v1/chat/completions", **CHAT, stream=True)
    outcome = await stack.outcome()
    assert outcome.usage is None
    assert outcome.ttft_s is not None
    assert await stack.metric("inferact_streams_without_usage_total") == before + 1
    assert await stack.metric("inferact_prompt_tokens_total") == tokens


async def test_cached_tokens_are_counted_and_known_of_the_node(stack: Stack) -> None:
    for _ in range(2):
        await stack.chat("the same long question " * 40, **TO_A)
    usages = [(await stack.outcome()).usage for _ in range(2)]
    assert usages[1] is not None
    assert usages[1].cached_tokens
    cached = await stack.metric("inferact_prompt_tokens_total", node="a", source="cached")
    assert cached >= usages[1].cached_tokens
    assert await stack.metric("inferact_knowledge_level", node="a", level="usage") == 1
    assert await stack.metric("inferact_prediction_error_ratio", node="a") < 0.5


async def test_a_stream_counts_its_first_token(stack: Stack) -> None:
    before = await stack.metric("inferact_ttft_seconds_count")
    await ask(stack, "/v1/chat/completions", **CHAT)
    await ask(stack, "/v1/chat/completions", **CHAT, stream=True)
    await stack.outcome()
    await stack.outcome()
    assert await stack.metric("inferact_ttft_seconds_count") == before + 1


@pytest.mark.parametrize(
    ("kind", "ended"),
    [(FaultKind.RESET_MID_STREAM, Ended.BROKEN), (FaultKind.ERROR_MID_STREAM, Ended.ERROR)],
)
async def test_a_stream_that_fails_on_its_way_has_no_usage(
    stack: Stack, kind: FaultKind, ended: Ended
) -> None:
    stack.sims["a"].faults.arm([Fault(kind, count=1, after_chunks=3)])
    try:
        await ask(stack, "/v1/chat/completions", **CHAT, **WITH_USAGE, **TO_A)
    except httpx.RemoteProtocolError:
        assert kind is FaultKind.RESET_MID_STREAM
    outcome = await stack.outcome()
    assert (outcome.ended, outcome.usage) == (ended, None)
    assert outcome.ttft_s is not None


async def test_an_engines_error_is_the_outcome(stack: Stack) -> None:
    answer = await ask(stack, "/v1/chat/completions", **CHAT | {"max_tokens": -1}, **TO_A)
    outcome = await stack.outcome()
    assert answer.status_code == outcome.status == 400
    assert (outcome.ended, outcome.usage) == (Ended.ERROR, None)


async def test_the_numbers_belong_to_the_node_that_served(stack: Stack) -> None:
    for name in "abc":
        stack.sims[name].faults.arm([Fault(FaultKind.ERROR_503, count=1)])
    answers = [await ask(stack, "/v1/chat/completions", **CHAT, **WITH_USAGE) for _ in range(2)]
    outcomes = [await stack.outcome() for _ in range(2)]
    served = [answer.headers["x-inferact-node"] for answer in answers if answer.status_code == 200]
    assert served
    assert [outcome.node_id for outcome in outcomes if outcome.usage] == served
    retried = max(outcomes, key=lambda outcome: outcome.attempts)
    assert retried.attempts == 3


async def test_what_a_hint_found_is_reported(stack: Stack) -> None:
    system = {"role": "system", "content": "You are patient and always explain every step. " * 40}
    hints = {"x-inferact": {"node_affinity": "b", "kv_prefix_hint": "patience"}}
    for question in ("why?", "how?"):
        messages = [system, {"role": "user", "content": question}]
        await ask(stack, "/v1/chat/completions", **CHAT | {"messages": messages}, **hints)
    outcomes = [await stack.outcome() for _ in range(2)]
    assert outcomes[1].usage is not None
    known = stack.service.router.caches.hints._hints[MODEL, "patience"]
    reported_bytes = known.reports[stack.service.router.nodes["b"].slot]
    assert reported_bytes == pytest.approx((outcomes[1].usage.cached_tokens or 0) * 4, rel=0.3)


async def test_answers_teach_length_and_tokenizer_but_embeddings_do_not(stack: Stack) -> None:
    lane = stack.service.router._lanes[MODEL]
    before = lane.output_tokens
    await ask(stack, "/v1/embeddings", input="a text")
    await stack.outcome()
    assert lane.output_tokens == before
    await ask(stack, "/v1/chat/completions", **CHAT)
    await stack.outcome()
    assert lane.output_tokens == pytest.approx(before + 0.02 * (12 - before))


async def test_a_client_that_leaves_is_no_answer() -> None:
    sims = {"a": {"token_interval_s": 0.02, "speed": 1.0}}
    async with running_stack(sims=sims) as slow:
        lane = slow.service.router._lanes[MODEL]
        before = lane.output_tokens
        body = CHAT | {"stream": True, "max_tokens": 500}
        async with slow.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                break
        outcome = await slow.outcome()
        assert (outcome.ended, outcome.usage) == (Ended.CLIENT_LEFT, None)
        assert outcome.ttft_s is not None
        assert outcome.ttft_s >= 0.02
        assert lane.output_tokens == before
        assert await slow.metric("inferact_streams_without_usage_total") == 0


async def test_what_failed_open_is_counted_but_belongs_to_no_exchange(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = await stack.metric("inferact_prompt_tokens_total")

    def fails(*_: object) -> bytes:
        raise RuntimeError("as if the service were away")

    monkeypatch.setattr(Exchange, "receive", fails)
    answer = await ask(stack, "/v1/chat/completions", **CHAT, **WITH_USAGE)
    assert answer.status_code == 200
    expected = tokens + usage_in(answer).prompt_tokens
    for _ in range(100):
        if await stack.metric("inferact_prompt_tokens_total") == expected:
            break
    else:
        raise AssertionError("the usage was not counted")
    assert stack.outcomes == []


async def test_a_receipt_tells_what_was_expected_and_what_came(stack: Stack) -> None:
    long = [{"role": "user", "content": "what was the weather like in Zürich? " * 40}]
    for _ in range(2):
        answer = await stack.client.post("/v1/chat/completions", json=CHAT | WITH_USAGE | {"messages": long})
        await stack.outcome()
    receipt = (await stack.admin(f"/admin/decisions/{answer.headers['x-request-id']}", "GET")).json()
    node = answer.headers["x-inferact-node"]
    chosen, outcome = receipt["candidates"][0], receipt["outcome"]
    assert (chosen["node"], chosen["role"], outcome["node_id"]) == (node, "chosen", node)
    assert (outcome["status"], outcome["ended"], outcome["attempts"]) == (200, "complete", 1)
    assert chosen["matched_tokens"] > 0
    assert outcome["usage"]["cached_tokens"] > 0
    assert 0.0 < outcome["ttft_s"] <= outcome["duration_s"]
