"""The official `openai` client, unchanged but for its base URL."""

import asyncio

import openai
import pytest
from envoy_stack import MODEL, Stack

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_async_client(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client:
        pinned = {"x-inferact": {"node_affinity": "a"}}
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, extra_body=pinned
        )
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens == 8
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=pinned,
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 8
        assert (await client.completions.create(model=MODEL, prompt="hi", max_tokens=3)).choices[0].text
        assert len((await client.embeddings.create(model=MODEL, input=["a", "b"])).data) == 2
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        assert (await client.responses.create(model=MODEL, input="hi", max_output_tokens=4)).output_text


async def test_sync_client(stack: Stack) -> None:
    def talk() -> None:
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client:
            assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4).choices
            stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True)
            assert list(stream)[-1].choices[0].finish_reason == "length"
            assert client.completions.create(model=MODEL, prompt="hi", max_tokens=3).choices
            assert client.embeddings.create(model=MODEL, input="a").data[0].embedding
            assert [model.id for model in client.models.list()] == [MODEL]

    await asyncio.to_thread(talk)


async def test_hints_go_in_the_extra_body(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=2, extra_body={"x-inferact": {"node_affinity": "c"}}
        )
        assert raw.headers["x-inferact-node"] == "c"


async def test_errors_are_the_clients_own_classes(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nobody/knows", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, extra_body={"x-inferact": {"priority": 99}}
            )
        assert bad.value.code == "invalid_hint"
