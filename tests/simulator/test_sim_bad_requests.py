"""What a simulated engine refuses, and how it says so."""

import gzip
import json
from typing import Any

import aiohttp
import pytest
from sim_support import CHAT, Simulate, chat, post

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


@pytest.mark.parametrize("prompt", [[], [[]], ["a", []], ["a", 1], [-1], [2**32]])
async def test_a_bad_prompt_is_refused(simulate: Simulate, http: aiohttp.ClientSession, prompt: Any) -> None:
    simulator = await simulate()
    async with http.post(simulator.url + "/v1/completions", json={"prompt": prompt}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "prompt"


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
