"""What clients get from real engines, through Envoy and the service."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from engine_processes import BLOCK_TOKENS, BLOCKS, CONTEXT_TOKENS, GGUF_MODEL, MODEL, Engines
from envoy_stack import Stack, until

from extproc.engines.client import open_session
from extproc.engines.probe import probe
from extproc.routing.outcome import Ended

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

MESSAGES = [{"role": "user", "content": "tell me a story"}]


async def events(stack: Stack, path: str, **body: Any) -> list[str]:
    """The data of a stream's events."""
    async with stack.client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        return [
            line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")
        ]


async def last_outcome(stack: Stack) -> Any:
    """That of the request that was just answered."""
    await until(lambda: bool(stack.outcomes))
    return stack.outcomes[-1]


@pytest.fixture(autouse=True)
def no_outcomes(stack: Stack) -> None:
    stack.outcomes.clear()


async def test_a_chat_is_answered_and_its_tokens_are_counted(stack: Stack) -> None:
    answer = await stack.chat("hello", model=MODEL, max_tokens=5, ignore_eos=True)
    assert answer.status_code == 200 and answer.headers["x-inferact-node"] in ("a", "b")
    usage = answer.json()["usage"]
    counted = (await last_outcome(stack)).usage
    assert usage["completion_tokens"] == counted.output_tokens == 5
    assert usage["prompt_tokens"] == counted.prompt_tokens


@pytest.mark.parametrize("model", [MODEL, GGUF_MODEL])
async def test_a_completion_is_answered_by_a_node_with_the_model(stack: Stack, model: str) -> None:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4, "ignore_eos": True}
    answer = await stack.client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert (answer.headers["x-inferact-node"] == "gguf") is (model == GGUF_MODEL)
    assert answer.json()["choices"][0]["text"]
    assert (await last_outcome(stack)).usage.output_tokens == 4


@pytest.mark.parametrize("model", [MODEL, GGUF_MODEL])
async def test_a_stream_tells_its_usage_to_the_client_and_to_us(stack: Stack, model: str) -> None:
    wanted = {"stream_options": {"include_usage": True}, "max_tokens": 6, "ignore_eos": True}
    *chunks, done = await events(stack, "/v1/completions", model=model, prompt="one two three", **wanted)
    assert done == "[DONE]"
    usage = json.loads(chunks[-1])["usage"]
    outcome = await last_outcome(stack)
    assert outcome.ended is Ended.COMPLETE and outcome.ttft_s is not None and outcome.ttft_s > 0
    assert usage["completion_tokens"] == outcome.usage.output_tokens == 6
    assert usage["prompt_tokens"] == outcome.usage.prompt_tokens


async def test_a_stream_without_usage_is_whole_all_the_same(stack: Stack) -> None:
    *chunks, done = await events(stack, "/v1/chat/completions", model=MODEL, messages=MESSAGES, max_tokens=6)
    assert done == "[DONE]" and all("usage" not in json.loads(chunk) for chunk in chunks)
    assert (await last_outcome(stack)).ended is Ended.COMPLETE


async def test_prompts_are_tokenized_as_chat_uses_them(stack: Stack) -> None:
    counted = await stack.client.post("/tokenize", json={"model": MODEL, "messages": MESSAGES})
    answer = await stack.chat(MESSAGES[0]["content"], model=MODEL)
    assert counted.status_code == 200, counted.text
    assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]


async def test_probes_read_what_real_engines_tell(stack: Stack) -> None:
    async with open_session() as session:
        nodes = stack.service.router.nodes
        vllm, _, gguf = await asyncio.gather(*(probe(session, node.config) for node in nodes.values()))
    assert (vllm.version, vllm.kv_capacity_tokens) == ("0.32.0", BLOCKS * BLOCK_TOKENS)
    assert vllm.is_usable and vllm.tells_cached_tokens and vllm.caches_prefixes and vllm.kv_events
    assert gguf.is_usable and gguf.tells_cached_tokens and gguf.caches_prefixes and gguf.version
    assert not vllm.advice and not gguf.advice


# What is wrong with a request


def message_of(answer: httpx.Response) -> str:
    """An error in the shape that OpenAI clients expect."""
    error = answer.json()["error"]
    assert isinstance(error["message"], str) and "type" in error
    return str(error["message"])


async def test_an_unknown_model_never_reaches_an_engine(stack: Stack) -> None:
    answer = await stack.chat(model="no-such-model")
    assert (answer.status_code, answer.headers["x-inferact-reason"]) == (404, "model_not_found")
    assert "no-such-model" in message_of(answer)


async def test_a_prompt_over_the_context_is_the_engines_own_400_and_no_ones_fault(stack: Stack) -> None:
    answer = await stack.chat("word " * 2 * CONTEXT_TOKENS, model=MODEL)
    assert answer.status_code == 400 and answer.headers["x-inferact-attempts"] == "1"
    assert str(CONTEXT_TOKENS) in message_of(answer)
    assert {node.health.value for node in stack.service.router.nodes.values()} == {"healthy"}


@pytest.mark.parametrize("body", [b'{"model": "tiny", "messages": [', b"", b"[]", b'{"messages": []}'])
async def test_a_body_that_is_no_request_is_a_400(stack: Stack, body: bytes) -> None:
    header = {"content-type": "application/json"}
    answer = await stack.client.post("/v1/chat/completions", content=body, headers=header)
    assert answer.status_code == 400
    message_of(answer)


async def test_what_the_engine_alone_can_refuse_comes_through_as_it_says_it(
    stack: Stack, engines: Engines
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "temperature": -3}
    async with httpx.AsyncClient(trust_env=False) as direct:
        refused = await direct.post(f"{engines.a.url}/v1/chat/completions", json=body)
    answer = await stack.client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.content) == (refused.status_code, refused.content)
    assert answer.status_code == 400


async def test_parameters_that_kill_a_decoding_engine_are_cut_out(stack: Stack, engines: Engines) -> None:
    answer = await stack.chat(
        model=MODEL, kv_transfer_params={"do_remote_prefill": True, "remote_block_ids": 7}
    )
    assert answer.status_code == 200
    for engine in (engines.a, engines.b):
        await engine.ready()


# Clients that leave


async def test_a_client_that_leaves_frees_the_node_and_the_engine(stack: Stack, engines: Engines) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 7000, "ignore_eos": True, "stream": True}
    async with stack.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        node = answer.headers["x-inferact-node"]
        await anext(answer.aiter_lines())
        async with asyncio.timeout(20):  # its gauges are a step behind its answers
            while not await engines.of(node).metric("vllm:num_requests_running"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert (await last_outcome(stack)).ended is Ended.CLIENT_LEFT
    assert not any(stack.in_flight().values())
    async with asyncio.timeout(10):
        while await engines.of(node).metric("vllm:num_requests_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
