"""The official client understands a simulated engine."""

import math

import openai
import pytest
from openai import AsyncOpenAI
from sim_support import Simulate

from extproc.simulator.engine import RunningSimulator
from extproc.simulator.faults import Fault, FaultKind

MODEL = "simulated-8b"
SAID = "Simulated by sim: no language model wrote this."


def client(simulator: RunningSimulator) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=simulator.url + "/v1", api_key="none", max_retries=0)


async def test_chat(simulate: Simulate) -> None:
    async with client(await simulate()) as api:
        answer = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=20
        )
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.content.startswith(SAID)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens_details is None, "nothing was cached"


async def test_chat_stream(simulate: Simulate) -> None:
    said, usage = "", None
    async with client(await simulate()) as api:
        stream = await api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert said.startswith(SAID)
    assert usage is not None
    assert usage.completion_tokens == 20


async def test_completions(simulate: Simulate) -> None:
    async with client(await simulate()) as api:
        answer = await api.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=20)
        stream = await api.completions.create(model=MODEL, prompt="a", max_tokens=20, stream=True)
        said = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text.startswith(SAID) for choice in answer.choices] == [True, True]
    assert said == answer.choices[0].text


async def test_responses(simulate: Simulate) -> None:
    async with client(await simulate()) as api:
        first = await api.responses.create(model=MODEL, input="hi", instructions="be brief")
        second = await api.responses.create(model=MODEL, input="more", previous_response_id=first.id)
    assert first.output_text.startswith(SAID)
    assert first.usage is not None
    assert second.previous_response_id == first.id


async def test_responses_stream(simulate: Simulate) -> None:
    async with client(await simulate()) as api, api.responses.stream(model=MODEL, input="hi") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    assert final.output_text.startswith(SAID)


async def test_embeddings_as_the_client_asks_for_them(simulate: Simulate) -> None:
    async with client(await simulate()) as api:
        packed = await api.embeddings.create(model=MODEL, input=["a", "b"])
        plain = await api.embeddings.create(model=MODEL, input="a", encoding_format="float")
    assert math.hypot(*plain.data[0].embedding) == pytest.approx(1, abs=1e-5)
    if isinstance(packed.data[0].embedding, list):
        assert packed.data[0].embedding == plain.data[0].embedding
    assert len(packed.data) == 2


async def test_models(simulate: Simulate) -> None:
    async with client(await simulate(models=("a-1b", "b"))) as api:
        assert [model.id async for model in await api.models.list()] == ["a-1b", "b"]


async def test_errors_are_the_clients_own(simulate: Simulate) -> None:
    async with client(await simulate()) as api:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await api.chat.completions.create(model="nope", messages=[])
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await api.chat.completions.create(model=MODEL, messages=[], max_tokens=-1)


async def test_an_error_inside_a_stream_is_raised(simulate: Simulate) -> None:
    async with client(await simulate(faults=(Fault(FaultKind.ERROR_MID_STREAM),))) as api:
        stream = await api.chat.completions.create(model=MODEL, messages=[], max_tokens=5, stream=True)
        with pytest.raises(openai.APIError, match="EngineCore"):
            async for _ in stream:
                pass
