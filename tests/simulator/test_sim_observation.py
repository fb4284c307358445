"""What a simulated engine tells of itself: metrics, counts, recorded requests."""

import asyncio
import base64
import hashlib

import aiohttp
from sim_support import CHAT, Simulate, chat, post, stream, until

from extproc.simulator.engine import RunningSimulator


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
