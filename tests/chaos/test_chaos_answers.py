"""The clients' checks, on answers of a simulated engine, whole and damaged."""

import re
from collections.abc import AsyncIterator

import aiohttp
import pytest
from chaos_answers import BrokenError, Expected, GarbledError, check_stream, check_whole
from chaos_clients import Prompts
from chaos_schedule import Api, Ask

from extproc.simulator.engine import RunningSimulator, start
from extproc.simulator.options import SimulatorOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = Prompts(1)


@pytest.fixture(scope="module")
async def node() -> AsyncIterator[RunningSimulator]:
    simulator = await start(SimulatorOptions(name="a", models=("m",), speed=float("inf")))
    yield simulator
    await simulator.stop()


async def answer(
    node: RunningSimulator, api: Api, stream: bool, include_usage: bool = True
) -> tuple[Expected, bytes]:
    asked = Ask(
        id="chaos-1-2-3",
        at_s=0.0,
        api=api,
        model="m",
        document=3,
        prompt_bytes=5000,
        max_tokens=20,
        stream=stream,
        include_usage=include_usage,
        priority=None,
        leaves_after_s=None,
    )
    body, expected = PROMPTS.body(asked)
    sent = {"content-type": "application/json", "x-request-id": asked.id}
    async with (
        aiohttp.ClientSession() as session,
        session.post(node.url + api, data=body, headers=sent) as got,
    ):
        assert got.status == 200
        return expected, await got.read()


@pytest.mark.parametrize("api", Api)
async def test_a_right_answer_passes(node: RunningSimulator, api: Api) -> None:
    check_whole(*_with_node(*await answer(node, api, stream=False)))
    for include_usage in (True, False):
        check_stream(*_with_node(*await answer(node, api, stream=True, include_usage=include_usage)))


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize(
    ("text", "other"),
    [
        (rb'"model":"m"', b'"model":"n"'),
        (rb"Simulated", b"Simulatod"),
        (rb'"finish_reason":"length"', b'"finish_reason":"stop"'),
        (rb'"prompt_tokens":\d+', b'"prompt_tokens":1'),
        (rb'"completion_tokens":20', b'"completion_tokens":19'),
        (rb'"usage"', b'"usige"'),
        (rb"\}$", b""),
        (rb".*", b""),
    ],
)
async def test_a_whole_answer_with_a_fault_is_garbled(
    node: RunningSimulator, api: Api, text: bytes, other: bytes
) -> None:
    expected, body = await answer(node, api, stream=False)
    damaged = re.sub(text, other, body, count=1, flags=re.DOTALL)
    assert damaged != body
    with pytest.raises(GarbledError):
        check_whole(expected, "a", damaged)


async def test_the_answer_of_another_node_is_garbled(node: RunningSimulator) -> None:
    expected, body = await answer(node, Api.CHAT, stream=False)
    with pytest.raises(GarbledError):
        check_whole(expected, "b", body)


@pytest.mark.parametrize("api", Api)
async def test_a_stream_that_is_cut_anywhere_is_broken(node: RunningSimulator, api: Api) -> None:
    expected, body = await answer(node, api, stream=True)
    for kept in range(0, len(body), 37):
        with pytest.raises(BrokenError):
            check_stream(expected, "a", body[:kept])


@pytest.mark.parametrize("api", Api)
async def test_a_stream_that_lacks_an_event_is_garbled(node: RunningSimulator, api: Api) -> None:
    expected, body = await answer(node, api, stream=True)
    events = body.split(b"\n\n")
    lost = b"\n\n".join(events[:5] + events[6:])
    with pytest.raises(GarbledError):
        check_stream(expected, "a", lost)


async def test_an_error_event_before_the_end_breaks_a_stream(node: RunningSimulator) -> None:
    expected, body = await answer(node, Api.CHAT, stream=True)
    events = body.split(b"\n\n")
    events[5] = b'data: {"error":{"message":"the engine failed"}}'
    with pytest.raises(BrokenError, match="the engine failed"):
        check_stream(expected, "a", b"\n\n".join(events))


def _with_node(expected: Expected, body: bytes) -> tuple[Expected, str, bytes]:
    return expected, "a", body
