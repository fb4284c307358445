"""What can be made to go wrong with a simulated engine, and how that looks from outside."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from sim_support import Simulate, until

from extproc.simulator.engine import RunningSimulator, start
from extproc.simulator.faults import Fault, FaultKind, Faults
from extproc.simulator.options import SimulatorOptions

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


async def status(http: aiohttp.ClientSession, simulator: RunningSimulator, body: Any = BODY) -> int:
    async with http.post(simulator.url + CHAT, json=body) as answer:
        await answer.read()
        return answer.status


async def arm(http: aiohttp.ClientSession, simulator: RunningSimulator, fault: Any) -> None:
    async with http.post(simulator.url + "/sim/faults", json=fault) as answer:
        assert answer.status == 200, await answer.text()


@pytest.mark.parametrize(
    ("kind", "code", "kind_of_error"),
    [
        ("error-500", 500, "InternalServerError"),
        ("error-503", 503, "ServiceUnavailableError"),
        ("error-429", 429, "TooManyRequestsError"),
        ("out-of-memory", 500, "InternalServerError"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_comes_in_vllms_shape_before_any_work(
    simulate: Simulate, http: aiohttp.ClientSession, kind: str, code: int, kind_of_error: str, stream: bool
) -> None:
    simulator = await simulate(faults=(Fault(FaultKind(kind)),))
    async with http.post(simulator.url + CHAT, json=BODY | {"stream": stream}) as answer:
        assert answer.status == code
        error = (await answer.json())["error"]
    assert (error["code"], error["type"]) == (code, kind_of_error)
    assert simulator.stats.failed == 1


async def test_out_of_memory_can_come_as_vllm_or_tgi_say_it(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    kinds = (FaultKind.OUT_OF_MEMORY, FaultKind.OUT_OF_MEMORY_TGI)
    simulator = await simulate(faults=tuple(Fault(kind, count=1) for kind in kinds))
    async with http.post(simulator.url + CHAT, json=BODY) as answer:
        assert "EngineCore encountered an issue" in (await answer.json())["error"]["message"]
    async with http.post(simulator.url + CHAT, json=BODY) as answer:
        assert answer.status == 424
        body = await answer.json()
    assert body["error_type"] == "generation"
    assert "CUDA out of memory" in body["error"]


async def test_a_fault_with_a_count_strikes_that_often(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(faults=(Fault(FaultKind.ERROR_503, count=2),))
    assert [await status(http, simulator) for _ in range(3)] == [503, 503, 200]


def test_a_fault_with_a_probability_strikes_that_share_and_the_same_ones_again() -> None:
    def struck(seed: int) -> list[bool]:
        faults = Faults([Fault(FaultKind.ERROR_500, probability=0.3)], seed)
        return [faults.strike_request(b"", stream=False) is not None for _ in range(1000)]

    assert 250 < sum(struck(1)) < 350
    assert struck(1) == struck(1) != struck(2)


def test_engines_do_not_use_up_each_others_faults() -> None:
    armed = (Fault(FaultKind.ERROR_500, count=1),)
    for faults in (Faults(armed), Faults(armed)):
        assert faults.strike_request(b"", stream=False) is not None
        assert faults.strike_request(b"", stream=False) is None


async def test_a_fault_can_be_meant_for_one_prompt(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate(faults=(Fault(FaultKind.ERROR_500, contains="poison"),))
    assert await status(http, simulator) == 200
    poisoned = {"messages": [{"role": "user", "content": "poison"}]}
    assert await status(http, simulator, poisoned) == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hanging_request_gets_no_head_until_its_client_leaves(
    simulate: Simulate, http: aiohttp.ClientSession, stream: bool
) -> None:
    simulator = await simulate(faults=(Fault(FaultKind.HANG, count=1),))
    request = asyncio.create_task(status(http, simulator, BODY | {"stream": stream}))
    done, _ = await asyncio.wait([request], timeout=0.1)
    assert not done
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert await status(http, simulator) == 200
    assert simulator.stats.aborted == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reset_before_the_head_leaves_no_answer(
    simulate: Simulate, http: aiohttp.ClientSession, stream: bool
) -> None:
    simulator = await simulate(faults=(Fault(FaultKind.RESET, count=1),))
    with pytest.raises(aiohttp.ClientOSError, match="reset by peer"):
        await status(http, simulator, BODY | {"stream": stream})
    assert await status(http, simulator) == 200
    assert simulator.stats.failed == 1


async def read_tokens(answer: aiohttp.ClientResponse) -> tuple[list[str], bool]:
    """The content chunks that arrived, and whether the stream ended in order."""
    seen = b""
    try:
        async for part in answer.content.iter_any():
            seen += part
    except aiohttp.ClientError:
        return _contents(seen), False
    return _contents(seen), True


def _contents(events: bytes) -> list[str]:
    contents = []
    for event in events.split(b"\n\n"):
        if event.startswith(b'data: {"id"'):
            delta = json.loads(event[6:])["choices"][0]["delta"]
            contents += [delta["content"]] if "role" not in delta else []
    return contents


@pytest.mark.parametrize("after", [0, 2, 99])
async def test_a_reset_in_mid_stream_comes_after_as_many_tokens_as_asked(
    simulate: Simulate, http: aiohttp.ClientSession, after: int
) -> None:
    simulator = await simulate(
        faults=(Fault(FaultKind.RESET_MID_STREAM, after_chunks=after),), speed=1, token_interval_s=0.02
    )
    async with http.post(simulator.url + CHAT, json=BODY | {"stream": True}) as answer:
        assert answer.status == 200
        contents, in_order = await read_tokens(answer)
    assert not in_order
    assert len(contents) == min(after, 4)
    assert (simulator.stats.failed, simulator.stats.running) == (1, 0)


async def test_a_stream_that_hangs_says_nothing_more_and_frees_its_slot_when_left(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(faults=(Fault(FaultKind.HANG_MID_STREAM, after_chunks=1),))
    async with http.post(simulator.url + CHAT, json=BODY | {"stream": True}) as answer:
        first = await answer.content.readuntil(b'"content":"Simu"')
        assert first
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await answer.content.readuntil(b"[DONE]")
    await until(lambda: simulator.stats.aborted == 1)
    assert simulator.stats.running == 0


async def test_an_error_inside_a_stream_is_followed_by_done(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(faults=(Fault(FaultKind.ERROR_MID_STREAM, after_chunks=2),))
    async with http.post(simulator.url + CHAT, json=BODY | {"stream": True}) as answer:
        assert answer.status == 200
        *_, second, error, done, end = (await answer.text()).split("\n\n")
    assert json.loads(second[6:])["choices"][0]["delta"]["content"] == "late"
    assert json.loads(error[6:])["error"]["code"] == 500
    assert (done, end) == ("data: [DONE]", "")
    assert simulator.stats.failed == 1


async def test_mid_stream_faults_wait_for_a_stream(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate(faults=(Fault(FaultKind.ERROR_MID_STREAM, count=1),))
    assert await status(http, simulator) == 200
    async with http.post(simulator.url + CHAT, json=BODY | {"stream": True}) as answer:
        assert "EngineCore" in await answer.text()


async def test_slow_steps_take_as_many_times_as_long(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate(
        speed=1, token_interval_s=0.01, faults=(Fault(FaultKind.SLOW, factor=10, count=2),)
    )
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await status(http, simulator) == 200
    assert loop.time() - began >= 0.2 + 0.02


async def test_a_request_that_kills_fails_all_in_flight_and_then_nothing_listens(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(
        speed=1, token_interval_s=0.01, faults=(Fault(FaultKind.DIE, contains="poison", delay_s=1.0),)
    )
    waiting = asyncio.create_task(status(http, simulator, BODY | {"max_tokens": 10_000}))
    async with http.post(simulator.url + CHAT, json=BODY | {"max_tokens": 10_000, "stream": True}) as stream:
        assert await stream.content.readuntil(b'"content":"Simu"')
        assert await status(http, simulator, {"messages": [{"role": "user", "content": "poison"}]}) == 500
        rest = (await stream.content.read()).split(b"\n\n")
    assert b"EngineCore" in rest[-3]
    assert rest[-2:] == [b"data: [DONE]", b""]
    assert await waiting == 500
    assert await status(http, simulator) == 500
    assert await status(http, simulator, BODY | {"stream": True}) == 500
    assert sum(simulator.stats.attempts.values()) == simulator.stats.failed == 5
    async with http.get(simulator.url + "/health") as answer:
        assert answer.status == 503
    await asyncio.wait_for(simulator.died.wait(), 10)
    with pytest.raises(aiohttp.ClientConnectorError):
        await status(http, simulator)


async def test_killing_resets_every_connection_and_closes_the_listener(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate(speed=1, token_interval_s=3600)
    async with http.post(simulator.url + CHAT, json=BODY | {"stream": True}) as answer:
        await simulator.kill()
        _, in_order = await read_tokens(answer)
    assert not in_order
    assert simulator.died.is_set()
    with pytest.raises(aiohttp.ClientConnectorError):
        await status(http, simulator)


async def test_a_killed_engine_can_start_again_on_its_port(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate()
    assert await status(http, simulator) == 200
    await simulator.kill()
    port = int(simulator.url.rpartition(":")[2])
    again = await start(SimulatorOptions(speed=float("inf")), port=port)
    try:
        assert await status(http, again) == 200
    finally:
        await again.stop()


async def test_health_and_metrics_have_faults_of_their_own(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    kinds = (FaultKind.HEALTH_DOWN, FaultKind.METRICS_GARBAGE)
    simulator = await simulate(faults=tuple(Fault(kind, count=1) for kind in kinds))
    assert await status(http, simulator) == 200
    codes = []
    for _ in range(2):
        async with http.get(simulator.url + "/health") as answer:
            codes.append(answer.status)
    assert codes == [503, 200]
    async with http.get(simulator.url + "/metrics") as answer:
        assert b"# TYPE" not in await answer.read()
    async with http.get(simulator.url + "/metrics") as answer:
        assert b"# TYPE" in await answer.read()


async def test_slow_metrics_come_late(simulate: Simulate, http: aiohttp.ClientSession) -> None:
    simulator = await simulate(faults=(Fault(FaultKind.METRICS_SLOW, delay_s=3600),))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), http.get(simulator.url + "/metrics"):
            pass


async def test_faults_are_armed_listed_and_cleared_over_http(
    simulate: Simulate, http: aiohttp.ClientSession
) -> None:
    simulator = await simulate()
    await arm(http, simulator, {"kind": "error-503"})
    await arm(http, simulator, [{"kind": "slow", "factor": 3}, {"kind": "reset", "count": 2}])
    async with http.get(simulator.url + "/sim/faults") as answer:
        assert await answer.json() == [
            {"kind": "error-503"},
            {"kind": "slow", "factor": 3.0},
            {"kind": "reset", "count": 2},
        ]
    assert await status(http, simulator) == 503
    async with http.delete(simulator.url + "/sim/faults") as answer:
        assert await answer.json() == []
    assert await status(http, simulator) == 200


@pytest.mark.parametrize(
    "fault",
    [
        {},
        {"kind": "explode"},
        {"kind": "reset", "probability": 1.5},
        {"kind": "reset", "count": 0},
        {"kind": "reset", "often": True},
        [{"kind": "reset"}, 7],
        "reset",
    ],
)
async def test_a_fault_that_makes_no_sense_is_refused_and_nothing_is_armed(
    simulate: Simulate, http: aiohttp.ClientSession, fault: Any
) -> None:
    simulator = await simulate()
    async with http.post(simulator.url + "/sim/faults", json=fault) as answer:
        assert answer.status == 400
    async with http.get(simulator.url + "/sim/faults") as answer:
        assert await answer.json() == []
