"""What a simulated engine answers over HTTP."""

import asyncio
import base64
import gzip
import hashlib
import json
import struct
from typing import Any

import aiohttp
import pytest
from sim_support import Simulate, until

from extproc.simulator.engine import RunningSimulator

CHAT = "/v1/chat/completions"


def chat(content: str = "hello", **members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **members}


async def post(http: aiohttp.ClientSession, simulator: RunningSimulator, path: str, body: Any) -> Any:
    async with http.post(simulator.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def stream(http: aiohttp.ClientSession, simulator: RunningSimulator, path: str, body: Any) -> list[str]:
    """The data of each event."""
    async with http.post(simulator.url + path, json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        events = (await answer.text()).split("\n\n")
    assert events.pop() == ""
    return [event.partition("data: ")[2] for event in events]


async def metrics(http: aiohttp.ClientSession, simulator: RunningSimulator) -> dict[str, float]:
    """Values by name, without labels (those of one name added up)."""
    async with http.get(simulator.url + "/metrics") as answer:
        text = await answer.text()
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


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
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


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


async def test_the_same_prompt_twice_is_found_in_the_cache_and_in_the_metrics(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate()
    first = await post(http, simulator, CHAT, chat("x" * 4000, max_tokens=1))
    second = await post(http, simulator, CHAT, chat("x" * 4000, max_tokens=1))
    prompt = first["usage"]["prompt_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (prompt - 1) // 16 * 16
    values = await metrics(http, simulator)
    assert values["vllm:prefix_cache_queries_total"] == 2 * prompt
    assert values["vllm:prefix_cache_hits_total"] == cached


async def test_a_cache_salt_keeps_the_cache_apart(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    for salt, expected in (("a", 0), ("b", 0), ("a", 1)):
        body = chat("x" * 4000, max_tokens=1, cache_salt=salt)
        usage = (await post(http, simulator, CHAT, body))["usage"]
        assert min(usage["prompt_tokens_details"]["cached_tokens"], 1) == expected


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
    simulator = await simulate(speed=1000, token_interval_s=1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await post(http, simulator, CHAT, chat(max_tokens=100))
    assert 0.1 <= loop.time() - began < 10


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


async def test_metrics_show_running_waiting_and_used_blocks(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(speed=1, token_interval_s=3600, max_num_seqs=1, num_blocks=100)
    tasks = [asyncio.create_task(post(http, simulator, CHAT, chat("x" * 800))) for _ in range(2)]
    await until(lambda: simulator.stats.waiting == 1)
    values = await metrics(http, simulator)
    assert values["vllm:num_requests_running"] == 1
    assert values["vllm:num_requests_waiting"] == 1
    assert 0.1 < values["vllm:kv_cache_usage_perc"] < 0.2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_metrics_describe_every_name_and_tell_the_block_count(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(models=('odd "name" \\ 8b',), num_blocks=123)
    await post(http, simulator, CHAT, chat(max_tokens=7))
    async with http.get(simulator.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    names = {line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")}
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == names
    assert {line.split()[2] for line in lines if line.startswith("# HELP")} == names
    (config,) = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in config
    assert 'num_gpu_blocks="123"' in config
    assert r'vllm:generation_tokens_total{engine="0",model_name="odd \"name\" \\ 8b"} 7.0' in lines


async def test_a_client_that_leaves_frees_its_slot_and_blocks(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(speed=1, token_interval_s=3600)
    leaving = asyncio.create_task(post(http, simulator, CHAT, chat()))
    await until(lambda: simulator.stats.running == 1)
    async with http.post(simulator.url + CHAT, json=chat(stream=True)):
        assert simulator.stats.waiting == 1
    leaving.cancel()
    await until(lambda: simulator.stats.aborted == 2)
    assert (simulator.stats.running, simulator.stats.waiting) == (0, 0)
    assert (await metrics(http, simulator))["vllm:kv_cache_usage_perc"] == 0


BAD_REQUESTS = {
    "nothing": (b"", "body"),
    "not JSON": (b'{"messages": [', "body"),
    "not UTF-8": (b'{"messages": [{"role": "\xff"}]}', "body"),
    "not an object": (b"[1]", "body"),
    "endless nesting": (b'{"a":' * 50_000, "body"),
    "no messages": (b'{"model": "simulated-8b"}', "body.messages"),
    "a message without role": (b'{"messages": [{"content": "x"}]}', "body.messages.0.role"),
    "a role of another type": (b'{"messages": [{"role": 7}]}', "body.messages.0.role"),
    "a hot temperature": (b'{"messages": [], "temperature": "hot"}', "body.temperature"),
    "a cold temperature": (b'{"messages": [], "temperature": -3}', "temperature"),
    "no tokens": (b'{"messages": [], "max_tokens": 0}', "max_tokens"),
    "too many tokens": (b'{"messages": [], "max_tokens": 100000}', "max_tokens"),
    "absurdly many tokens": (b'{"messages": [], "max_tokens": 1e400}', "body.max_tokens"),
    "tokens beyond the context": (b'{"messages": [], "max_tokens": 2047}', "input_tokens"),
    "no choices": (b'{"messages": [], "n": 0}', "n"),
}


@pytest.mark.parametrize(("body", "param"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
async def test_a_bad_request_is_told_what_is_wrong_in_the_engines_way(
    simulate: Simulate, http: aiohttp.ClientSession, body: bytes, param: str
) -> None:
    simulator = await simulate(max_model_len=2048)
    headers = {"content-type": "application/json"}
    async with http.post(simulator.url + CHAT, data=body, headers=headers) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["param"] == param
    assert error["code"] == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert simulator.stats.failed == 1


@pytest.mark.parametrize("prompt", [[], [""], [[]], ["a", 1], [-1], [2**32]])
async def test_a_bad_prompt_is_refused(simulate: Simulate, http: aiohttp.ClientSession, prompt: Any) -> None:
    simulator = await simulate()
    async with http.post(simulator.url + "/v1/completions", json={"prompt": prompt}) as answer:
        assert answer.status == (200 if prompt == [""] else 400)


async def test_an_over_long_prompt_is_refused_like_vllm_does(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(max_model_len=2048)
    async with http.post(simulator.url + CHAT, json=chat("x" * 9000)) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["message"].startswith("This model's maximum context length is 2048 tokens.")
    assert error["type"] == "BadRequestError"


async def test_the_context_is_no_longer_than_the_cache(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(num_blocks=10)
    async with http.post(simulator.url + CHAT, json=chat("x" * 1000)) as answer:
        assert answer.status == 400
    assert (await post(http, simulator, CHAT, chat(max_tokens=150)))["usage"]["total_tokens"] <= 160


async def test_an_unknown_model_is_not_found(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate(models=("tiny-1b", "tiny-alias"))
    async with http.post(simulator.url + CHAT, json=chat(model="nope")) as answer:
        assert answer.status == 404
        assert await answer.json() == {
            "error": {
                "message": "The model `nope` does not exist. Valid aliases: tiny-1b, tiny-alias.",
                "type": "NotFoundError",
                "param": "model",
                "code": 404,
            }
        }


async def test_unknown_paths_and_methods_get_the_frameworks_bodies(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate()
    async with http.get(simulator.url + "/nowhere") as answer:
        assert (answer.status, await answer.json()) == (404, {"detail": "Not Found"})
    async with http.get(simulator.url + CHAT) as answer:
        assert (answer.status, await answer.json()) == (405, {"detail": "Method Not Allowed"})
        assert answer.headers["allow"] == "POST"


async def test_only_json_is_accepted(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    async with http.post(simulator.url + CHAT, data=b"{}", headers={"content-type": "text/plain"}) as answer:
        assert answer.status == 400
        assert "Unsupported Media Type" in (await answer.json())["error"]["message"]


async def test_a_compressed_body_is_not_understood_as_vllm_does_not(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(record=True)
    body = gzip.compress(json.dumps(chat()).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with http.post(simulator.url + CHAT, data=body, headers=headers) as answer:
        assert answer.status == 400
    assert simulator.stats.recorded[0].body == body


async def test_a_body_over_64_mib_is_read(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    body = chat(max_tokens=1, ignored="x" * (65 << 20))
    assert (await post(http, simulator, CHAT, body))["usage"]["completion_tokens"] == 1


async def test_recorded_requests_come_back_byte_for_byte(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(record=True)
    body = b'{ "messages":[ ], "max_tokens":1, "x":1.0e2, "x":"\\u00e9" }'
    headers = {"content-type": "application/json", "X-Odd": "caf\xe9"}
    async with http.post(simulator.url + CHAT, data=body, headers=headers) as answer:
        assert answer.status == 200
    async with http.get(simulator.url + "/sim/requests") as answer:
        (recorded,) = await answer.json()
    assert base64.b64decode(recorded["body_base64"]) == body
    assert recorded["path"] == CHAT
    assert "X-Odd" in dict(recorded["headers"])
    async with http.get(simulator.url + "/sim/stats") as answer:
        stats = await answer.json()
    assert stats["recorded"][0]["sha256"] == hashlib.sha256(body).hexdigest()


async def test_nothing_is_recorded_unless_asked(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    await post(http, simulator, CHAT, chat())
    assert not simulator.stats.recorded


async def test_stats_count_attempts_by_path_and_outcomes(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate()
    await post(http, simulator, CHAT, chat())
    await stream(http, simulator, CHAT, chat())
    async with http.post(simulator.url + "/v1/completions", json={}):
        pass
    async with http.get(simulator.url + "/sim/stats") as answer:
        assert await answer.json() == {
            "attempts": {CHAT: 2, "/v1/completions": 1},
            "completed": 2,
            "aborted": 0,
            "failed": 1,
            "running": 0,
            "waiting": 0,
            "recorded": [],
        }


async def test_a_request_id_becomes_the_answers_id(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate()
    async with http.post(
        simulator.url + CHAT, json=chat(max_tokens=1), headers={"x-request-id": "mine"}
    ) as answer:
        assert (await answer.json())["id"] == "chatcmpl-mine"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"models": ()}, "at least one model"),
        ({"name": "näme"}, "printable ASCII"),
        ({"name": "a\r\nb"}, "printable ASCII"),
        ({"speed": 0}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"models": ("llama-405b",)}, "no memory for KV blocks"),
        ({"num_blocks": 0}, "no memory for KV blocks"),
    ],
)
async def test_an_impossible_engine_is_refused(
    simulate: Simulate, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        await simulate(**options)
