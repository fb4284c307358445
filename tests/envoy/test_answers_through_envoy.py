"""Answers pass the real Envoy untouched and at once, whatever they are, while it reads in them."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web
from envoy_stack import MODEL, until
from scripted_engine import EVENTS, JSON, ScriptedEngine, scripted_stack

from extproc.openai.usage import Usage
from extproc.routing.outcome import Ended

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "tell me"}], "stream": True}
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"w"}}]}\n\n'
USAGE = b'{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":48}}'
LAST = b'data: {"choices":[],"usage":' + USAGE + b"}\n\n"
DONE = b"data: [DONE]\n\n"
FOUND = Usage(100, 7, 48)


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_stack() as scripted:
        yield scripted
        assert "script log" not in scripted.stack.envoy.messages.read_text(), "the script itself failed"


async def whole_answer(engine: ScriptedEngine) -> bytes:
    """The bytes that a client gets."""
    async with engine.stack.client.stream("POST", "/v1/chat/completions", json=BODY) as answer:
        assert answer.status_code == 200
        return b"".join([piece async for piece in answer.aiter_raw()])


async def passes(engine: ScriptedEngine, *pieces: bytes, kind: dict[str, str]) -> Usage | None:
    """Let the engine answer with these pieces, see that they come as they are; what was found in them."""
    engine.says(*pieces, **kind)
    assert await whole_answer(engine) == b"".join(pieces)
    outcome = await engine.stack.outcome()
    assert outcome.ended is Ended.COMPLETE
    return outcome.usage


class TestEvents:
    @pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
    async def test_with_any_line_ends(self, engine: ScriptedEngine, line_end: bytes) -> None:
        pieces = [piece.replace(b"\n", line_end) for piece in (TOKEN, TOKEN, LAST, DONE)]
        assert await passes(engine, *pieces, kind=EVENTS) == FOUND

    async def test_cut_anywhere(self, engine: ScriptedEngine) -> None:
        stream = TOKEN + LAST + DONE
        pieces = [stream[at : at + 1] for at in range(len(stream))]
        assert await passes(engine, *pieces, kind=EVENTS) == FOUND

    async def test_all_in_one_piece_larger_than_what_is_kept(self, engine: ScriptedEngine) -> None:
        assert await passes(engine, TOKEN * 5000 + LAST + DONE, kind=EVENTS) == FOUND

    async def test_of_which_each_tells_its_usage(self, engine: ScriptedEngine) -> None:
        early = LAST.replace(b'"completion_tokens":7', b'"completion_tokens":1')
        assert await passes(engine, early, TOKEN, early, TOKEN, LAST, DONE, kind=EVENTS) == FOUND

    async def test_whose_usage_is_null_until_the_last(self, engine: ScriptedEngine) -> None:
        null = TOKEN.replace(b"}\n", b',"usage":null}\n')
        assert await passes(engine, null, null, LAST, DONE, kind=EVENTS) == FOUND
        assert await passes(engine, null, null, DONE, kind=EVENTS) is None

    async def test_that_speak_of_usage_in_their_text(self, engine: ScriptedEngine) -> None:
        text = json.dumps({"choices": [{"delta": {"content": '"usage": {"prompt_tokens": 9}, Grüße, 你好'}}]})
        spoken = b"data: " + text.encode() + b"\n\n"
        raw = 'data: {"choices":[{"delta":{"content":"Grüße, 你好"}}]}\n\n'.encode()
        assert await passes(engine, raw, spoken, DONE, kind=EVENTS) is None
        assert await passes(engine, raw, LAST, spoken, raw, DONE, kind=EVENTS) == FOUND

    @pytest.mark.parametrize(
        "usage",
        [
            b"[]",
            b'"text"',
            b"7",
            b"{}",
            b'{"prompt_tokens":"100"}',
            b'{"prompt_tokens":-1}',
            b'{"prompt_tokens":1e400}',
            b'{"prompt_tokens":1.5}',
            b'{"prompt_tokens":99999999999999999999}',
            b'{"prompt_tokens":{"prompt_tokens":{}}}',
            b'{"prompt_tokens":100,',
            b'{"prompt_tokens":100,"\xff\xfe":1}',
            b'{"prompt_tokens":100,"\x00":1}',
            b"{" * 3000 + b"}" * 3000,
            b"{" * 5000,
        ],
    )
    async def test_with_a_senseless_usage_pass_and_teach_nothing(
        self, engine: ScriptedEngine, usage: bytes
    ) -> None:
        event = b'data: {"usage":' + usage + b"}\n\n"
        assert await passes(engine, TOKEN, event, DONE, kind=EVENTS) is None

    async def test_with_some_senseless_numbers_teach_the_others(self, engine: ScriptedEngine) -> None:
        usage = b'{"prompt_tokens":100,"completion_tokens":"7","prompt_tokens_details":{"cached_tokens":-1}}'
        found = await passes(engine, TOKEN, LAST.replace(USAGE, usage), kind=EVENTS)
        assert found is not None
        assert (found.prompt_tokens, found.output_tokens) == (100, 0)

    @pytest.mark.parametrize("pieces", [(), (b"",), (b"\xff\x00\xfe",), (b"no events at all",)])
    async def test_that_are_none(self, engine: ScriptedEngine, pieces: tuple[bytes, ...]) -> None:
        assert await passes(engine, *(piece for piece in pieces if piece), kind=EVENTS) is None

    @pytest.mark.parametrize("space", [b" ", b""])
    async def test_that_end_in_an_error(self, engine: ScriptedEngine, space: bytes) -> None:
        error = b'data:%s{"error":{"message":"out of memory","code":500}}\n\n' % space
        engine.says(TOKEN, LAST, error, DONE, **EVENTS)
        assert await whole_answer(engine) == TOKEN + LAST + error + DONE
        outcome = await engine.stack.outcome()
        assert (outcome.ended, outcome.usage) == (Ended.ERROR, None)


class TestJson:
    async def test_of_5_megabytes(self, engine: ScriptedEngine) -> None:
        head = b'{"data":[{"embedding":[' + b",".join([b"0.0123456"] * 500_000) + b"]}]"
        assert await passes(engine, head, b',"usage":' + USAGE + b"}", kind=JSON) == FOUND

    async def test_whose_usage_is_not_near_its_end(self, engine: ScriptedEngine) -> None:
        rest = b',"results":[' + b"0," * 5000 + b"0]}"
        assert await passes(engine, b'{"usage":' + USAGE, rest, kind=JSON) is None

    async def test_with_white_space(self, engine: ScriptedEngine) -> None:
        pretty = json.dumps({"usage": json.loads(USAGE), "id": "ü"}, indent=2, ensure_ascii=False).encode()
        assert await passes(engine, pretty.replace(b":", b" \t:\r\n"), kind=JSON) == FOUND

    @pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b"\xff\xfe", b"null", b'{"usage":{"prompt_'])
    async def test_that_is_none(self, engine: ScriptedEngine, body: bytes) -> None:
        assert await passes(engine, *([body] if body else []), kind=JSON) is None

    @pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
    async def test_under_other_names(self, engine: ScriptedEngine, kind: str) -> None:
        body = b'{"usage":' + USAGE + b"}"
        assert await passes(engine, body, kind={"content_type": kind}) == FOUND


class TestOtherAnswers:
    async def test_compressed(self, engine: ScriptedEngine) -> None:
        body = gzip.compress(b'{"usage":' + USAGE + b"}")
        kind = {"content_type": "application/json", "content_encoding": "gzip"}
        assert await passes(engine, body, kind=kind) is None
        assert await passes(engine, body, kind=kind | {"content_type": "text/event-stream"}) is None

    async def test_said_to_be_plain(self, engine: ScriptedEngine) -> None:
        kind = {"content_type": "application/json", "content_encoding": "identity"}
        assert await passes(engine, b'{"usage":' + USAGE + b"}", kind=kind) == FOUND

    @pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", "application/x-ndjson"])
    async def test_of_another_type(self, engine: ScriptedEngine, kind: str) -> None:
        assert await passes(engine, b'{"usage":' + USAGE + b"}", kind={"content_type": kind}) is None


class TestNothingIsHeldBack:
    """The engine goes on only when the client has what came before."""

    async def in_step(self, engine: ScriptedEngine, kind: dict[str, str], pieces: list[bytes]) -> None:
        arrived = asyncio.Semaphore(0)

        async def write(answer: web.StreamResponse) -> None:
            for piece in pieces:
                await answer.write(piece)
                async with asyncio.timeout(5):
                    await arrived.acquire()

        engine.script, engine.headers = write, dict(kind)
        async with engine.stack.client.stream("POST", "/v1/chat/completions", json=BODY) as answer:
            got = b""
            async for piece in answer.aiter_raw():
                got += piece
                arrived.release()
        assert got == b"".join(pieces)
        assert (await engine.stack.outcome()).usage == FOUND

    async def test_of_a_stream(self, engine: ScriptedEngine) -> None:
        await self.in_step(engine, EVENTS, [TOKEN] * 50 + [LAST])

    async def test_of_json(self, engine: ScriptedEngine) -> None:
        await self.in_step(engine, JSON, [b'{"text":"', *[b"word "] * 50, b'","usage":' + USAGE + b"}"])


class TestTheFirstToken:
    PAUSE_S = 0.15

    async def ttft_s(self, engine: ScriptedEngine, *before: bytes, token: bytes = TOKEN) -> float:
        """When the token counted as come that follows `before` after a pause."""

        async def write(answer: web.StreamResponse) -> None:
            for piece in before:
                await answer.write(piece)
            await asyncio.sleep(self.PAUSE_S)
            await answer.write(token)

        engine.script, engine.headers = write, dict(EVENTS)
        await whole_answer(engine)
        outcome = await engine.stack.outcome()
        assert outcome.ttft_s is not None
        assert outcome.ttft_s <= outcome.duration_s
        return outcome.ttft_s

    async def test_is_not_the_head(self, engine: ScriptedEngine) -> None:
        assert await self.ttft_s(engine) >= self.PAUSE_S

    async def test_is_the_first_event(self, engine: ScriptedEngine) -> None:
        assert await self.ttft_s(engine, TOKEN) < self.PAUSE_S

    async def test_is_not_a_comment(self, engine: ScriptedEngine) -> None:
        assert await self.ttft_s(engine, b": ping\n\n", b":\r\n\r\n") >= self.PAUSE_S

    async def test_is_not_word_that_the_request_came(self, engine: ScriptedEngine) -> None:
        created = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
        progress = created.replace(b"created", b"in_progress")
        delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n'
        assert await self.ttft_s(engine, created, progress, token=delta) >= self.PAUSE_S
        assert await self.ttft_s(engine, created + progress + delta, token=delta) < self.PAUSE_S


async def test_the_service_hears_of_the_first_token_while_the_stream_runs(engine: ScriptedEngine) -> None:
    heard = asyncio.Event()

    async def write(answer: web.StreamResponse) -> None:
        await answer.write(TOKEN)
        await heard.wait()
        await answer.write(LAST + DONE)

    engine.script, engine.headers = write, dict(EVENTS)
    asking = asyncio.create_task(whole_answer(engine))
    live = engine.stack.service.extproc.exchanges.live

    def has_begun() -> bool:
        return any(one.decision is not None and one.decision.booking.has_begun for one in live.values())

    try:
        await until(has_begun, 3.0)
    finally:
        heard.set()
    await asking
    assert (await engine.stack.outcome()).ended is Ended.COMPLETE


async def test_a_client_that_reads_slowly_makes_no_node_look_slow(engine: ScriptedEngine) -> None:
    """It lets Envoy send 64 KiB before it reads; what the node has sent beyond that waits in Envoy."""
    engine.says(TOKEN, TOKEN * 10_000, LAST, DONE, **EVENTS)
    slow = httpx.AsyncClient(base_url=engine.stack.url, http1=False, http2=True, trust_env=False)
    async with slow, slow.stream("POST", "/v1/chat/completions", json=BODY) as answer:
        outcome = await engine.stack.outcome()
        await answer.aread()
    assert outcome.ended is Ended.COMPLETE
    assert outcome.usage == FOUND
