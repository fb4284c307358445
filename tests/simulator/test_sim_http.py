"""What a simulated engine answers over HTTP."""

import asyncio
import base64
import json
import struct
from typing import Any

import aiohttp
import pytest
from sim_support import CHAT, Simulate, chat, post, stream


async def test_every_answer_names_the_node_and_says_it_is_a_simulator(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(name="node-a100-01")
    for path in ("/health", "/metrics", "/nowhere", CHAT):
        async with http.get(simulator.url + path) as answer:
            assert answer.headers["x-sim-node"] == "node-a100-01"
            assert answer.headers["server"] == "inferact-simulator"


async def test_a_chat_answer_has_the_tokens_asked_for_and_tells_its_usage(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(name="n1")
    answer = await post(http, simulator, CHAT, chat("x" * 400, max_tokens=20))
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("Simulated by n1: no language model wrote this.")
    usage = answer["usage"]
    assert usage["completion_tokens"] == 20
    assert usage["prompt_tokens"] > 100
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20
    assert usage["prompt_tokens_details"] is None, "nothing was cached"


async def test_without_max_tokens_the_length_depends_on_the_prompt_alone(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    first, second = await simulate(), await simulate()
    lengths = []
    for content in ("a", "b", "c", "d"):
        one = await post(http, first, CHAT, chat(content))
        other = await post(http, second, CHAT, chat(content))
        assert one["choices"][0]["finish_reason"] == "stop"
        assert one["usage"] == other["usage"]
        lengths.append(one["usage"]["completion_tokens"])
    assert len(set(lengths)) > 1
    assert all(16 <= length <= 128 for length in lengths)


async def test_the_newer_name_of_max_tokens_counts_first(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate()
    body = chat(max_tokens=50, max_completion_tokens=3)
    assert (await post(http, simulator, CHAT, body))["usage"]["completion_tokens"] == 3


async def test_a_cache_salt_keeps_the_cache_apart(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    for salt, expected in (("a", False), ("b", False), ("a", True)):
        body = chat("x" * 4000, max_tokens=1, cache_salt=salt)
        usage = (await post(http, simulator, CHAT, body))["usage"]
        assert bool(usage["prompt_tokens_details"]) is expected


async def test_a_stream_is_a_role_then_tokens_then_usage_then_done(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(name="n1")
    body = chat(max_tokens=5, stream_options={"include_usage": True})
    *events, done = await stream(http, simulator, CHAT, body)
    assert done == "[DONE]"
    role, *chunks, usage = map(json.loads, events)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == [
        "Simu",
        "late",
        "d by",
        " n1:",
        " no ",
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert len({event["id"] for event in (role, *chunks, usage)}) == 1


async def test_a_stream_tells_no_usage_unless_asked(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    *events, done = await stream(http, simulator, CHAT, chat(max_tokens=2))
    assert done == "[DONE]"
    assert all(json.loads(event)["choices"] for event in events)


async def test_the_head_of_a_stream_comes_before_its_first_token(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(speed=1, token_interval_s=3600)
    async with http.post(simulator.url + CHAT, json=chat(stream=True)) as answer:
        assert answer.status == 200
        assert simulator.stats.running == 1


async def test_tokens_come_at_the_interval_asked_for(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate(speed=1, token_interval_s=0.02)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await stream(http, simulator, CHAT, chat(max_tokens=10))
    assert loop.time() - began >= 0.2


async def test_speed_divides_simulated_time(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate(speed=1000, token_interval_s=100)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await post(http, simulator, CHAT, chat(max_tokens=3))
    assert 0.3 <= loop.time() - began < 30


@pytest.mark.parametrize(
    ("prompt", "count"), [("hello", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)]
)
async def test_completions_take_prompts_in_every_form(
    simulate: Simulate, http: aiohttp.ClientSession, prompt: Any, count: int
) -> None:
    simulator = await simulate()
    answer = await post(http, simulator, "/v1/completions", {"prompt": prompt, "max_tokens": 3, "n": 2})
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    assert answer["usage"]["completion_tokens"] == 3 * 2 * count


async def test_a_text_and_its_token_ids_are_the_same_prompt(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate()
    text = "the quick brown fox " * 50
    ids = (await post(http, simulator, "/tokenize", {"prompt": text}))["tokens"]
    await post(http, simulator, "/v1/completions", {"prompt": text, "max_tokens": 1})
    again = await post(http, simulator, "/v1/completions", {"prompt": ids, "max_tokens": 1})
    assert again["usage"]["prompt_tokens"] == len(ids)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > len(ids) - 17


async def test_several_prompts_stream_side_by_side(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    *events, done = await stream(http, simulator, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4})
    assert done == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert sorted(choice["index"] for choice in choices) == [0] * 4 + [1] * 4
    assert all(choice["text"] for choice in choices)


async def test_tokenize_counts_messages_as_chat_does(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    answer = await post(http, simulator, CHAT, chat("how many?", max_tokens=1))
    counted = await post(http, simulator, "/tokenize", chat("how many?"))
    assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]


async def test_detokenize_gives_back_what_was_tokenized(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate()
    ids = (await post(http, simulator, "/tokenize", {"prompt": "grüße, 世界"}))["tokens"]
    assert await post(http, simulator, "/detokenize", {"tokens": ids}) == {"prompt": "grüße, 世界"}


async def test_embeddings_are_unit_vectors_of_their_input(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    first, second = await simulate(), await simulate()
    body = {"input": ["a", "b"], "dimensions": 8}
    answer = await post(http, first, "/v1/embeddings", body)
    one, other = (item["embedding"] for item in answer["data"])
    assert one != other
    assert sum(value * value for value in one) == pytest.approx(1, abs=1e-5)
    packed = await post(http, second, "/v1/embeddings", body | {"encoding_format": "base64"})
    assert list(struct.unpack("<8f", base64.b64decode(packed["data"][0]["embedding"]))) == one


async def test_rerank_puts_the_document_with_the_most_common_words_first(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate()
    body = {"query": "red fox", "documents": ["a blue whale", "the red fox", "a fox"], "top_n": 2}
    results = (await post(http, simulator, "/v1/rerank", body))["results"]
    assert [result["index"] for result in results] == [1, 2]
    assert results[0]["document"] == {"text": "the red fox"}


async def test_score_compares_one_text_with_many(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    answer = await post(http, simulator, "/v1/score", {"text_1": "red fox", "text_2": ["red fox", "whale"]})
    assert [item["score"] for item in answer["data"]] == [1.0, 0.0]


async def test_a_response_can_go_on_only_where_it_was_made(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    here, elsewhere = await simulate(), await simulate()
    first = await post(http, here, "/v1/responses", {"input": "tell me " * 50, "max_output_tokens": 40})
    assert first["status"] == "incomplete"
    more = {"input": "and then?", "previous_response_id": first["id"]}
    second = await post(http, here, "/v1/responses", more)
    assert second["status"] == "completed"
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"]
    async with http.post(elsewhere.url + "/v1/responses", json=more) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["param"] == "previous_response_id"


async def test_models_tell_the_context_length(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate(models=("big-70b-awq", "alias"), max_model_len=4096)
    async with http.get(simulator.url + "/v1/models") as answer:
        models = (await answer.json())["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [
        ("big-70b-awq", 4096),
        ("alias", 4096),
    ]


async def test_a_body_over_64_mib_is_read(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    body = chat(max_tokens=1, ignored="x" * (65 << 20))
    assert (await post(http, simulator, CHAT, body))["usage"]["completion_tokens"] == 1


async def test_a_request_id_becomes_the_answers_id(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    async with http.post(
        simulator.url + CHAT, json=chat(max_tokens=1), headers={"x-request-id": "mine"}
    ) as answer:
        assert (await answer.json())["id"] == "chatcmpl-mine"
