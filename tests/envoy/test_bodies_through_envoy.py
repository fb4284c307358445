"""What a node receives is what the client sent, byte for byte."""

import asyncio
import gzip
import hashlib
import json
from collections.abc import Callable

import brotli
import pytest
import zstandard
from envoy_stack import MODEL, Stack, running_stack

from extproc.simulator.faults import Fault, FaultKind

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

PINNED = b'"x-inferact":{"node_affinity":"a"}'


def received(stack: Stack) -> bytes:
    """The body that node a got last."""
    return stack.sims["a"].stats.recorded[-1].body


async def post(stack: Stack, body: bytes, **headers: str) -> int:
    sent = {"content-type": "application/json"} | headers
    answer = await stack.client.post("/v1/chat/completions", content=body, headers=sent)
    return answer.status_code


async def test_bytes_are_kept_and_hints_are_cut(stack: Stack) -> None:
    kept = (
        b'{ "model" : "%b", "temperature":1.0e0,"seed":10000000000000000000001, "messages":'
        b'[{"role":"user","content":"\\u00e9 x-inferact \\"x-inferact\\""}], "stop":"a","stop":"b" ,'
        b' "max_tokens":2,"nested":{"x-inferact":1}'
    ) % MODEL.encode()
    assert await post(stack, kept + b" ," + PINNED + b"\n}") == 200
    assert (
        received(stack) == kept + b" }"
    )  # a member goes with its comma and the white space around its value


async def test_escaped_spellings_are_cut(stack: Stack) -> None:
    body = b'{"\\u0078-inferact":{"node_affinity":"a"},"kv_transfer_params":{"do_remote_decode":true},'
    body += (
        b'"bootstrap_\\u0068ost":"h","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"model":"%b"}'
    )
    assert await post(stack, body % MODEL.encode()) == 200
    assert set(json.loads(received(stack))) == {"messages", "max_tokens", "model"}


async def test_twenty_megabytes(stack: Stack) -> None:
    filler = b"a" * 20_000_000
    body = b'{"model":"%b","max_tokens":1,"metadata":"%b","messages":[{"role":"user","content":"hi"}],%b}'
    assert await post(stack, body % (MODEL.encode(), filler, PINNED)) == 200
    expected = (body % (MODEL.encode(), filler, b"")).replace(b",}", b"}")
    assert hashlib.sha256(received(stack)).digest() == hashlib.sha256(expected).digest()


async def test_too_large_is_a_413(stack: Stack) -> None:
    limit = stack.service.config.scheduler.max_body_bytes
    answer = await stack.client.post("/v1/chat/completions", content=b'{"a":"' + b"a" * limit + b'"}')
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert answer.headers["x-inferact-reason"] == "body_too_large"


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("br", brotli.compress), ("zstd", zstandard.ZstdCompressor().compress)],
)
async def test_compressed_bodies_arrive_in_plain(
    stack: Stack, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    plain = b'{"model":"%b","messages":[{"role":"user","content":"hi"}],"max_tokens":1}' % MODEL.encode()
    sent = plain[:-1] + b"," + PINNED + b"}"
    assert await post(stack, compress(sent), **{"content-encoding": encoding}) == 200
    assert received(stack) == plain


async def test_unreadable_compression(stack: Stack) -> None:
    cut_off = gzip.compress(b'{"model":"%b"}' % MODEL.encode())[:18]
    assert await post(stack, cut_off, **{"content-encoding": "gzip"}) == 400
    assert await post(stack, b"{}", **{"content-encoding": "deflate"}) == 415


async def test_a_compression_bomb_is_refused(stack: Stack) -> None:
    bomb = gzip.compress(b'{"model":"%b","messages":"' % MODEL.encode() + b"a" * 100_000_000 + b'"}')
    assert await post(stack, bomb, **{"content-encoding": "gzip"}) in (400, 413)


async def raw(stack: Stack, *parts: bytes) -> bytes:
    """Write parts to a bare connection, then read until the far side closes."""
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    b"content-type: application/json\r\n"
)


async def test_chunked_request(stack: Stack) -> None:
    body = b'{"model":"%b","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}' % MODEL.encode()
    pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    answer = await raw(stack, HEAD + b"transfer-encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


async def test_expect_100_continue(stack: Stack) -> None:
    body = b'{"model":"%b","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}' % MODEL.encode()
    answer = await raw(stack, HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body), body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


async def test_aliases_rename_the_model_in_the_bytes() -> None:
    changes = {"a": {"model_aliases": {"gpt-4o": MODEL}}}
    async with running_stack(sims=("a",), nodes=changes) as aliased:
        answer = await aliased.chat(model="gpt-4o")
        assert answer.status_code == 200
        assert json.loads(aliased.sims["a"].stats.recorded[-1].body)["model"] == MODEL


async def test_base_paths_and_keys_do_not_leak_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node fails in turn, so each request walks through all three."""
    monkeypatch.setenv("KEY_OF_B", "secret-of-b")
    sims: dict[str, dict[str, object]] = {name: {} for name in "abc"}
    changes = {"b": {"api_key_env": "KEY_OF_B"}}
    async with running_stack(sims=sims, nodes=changes) as keyed:
        for name in "abc":
            keyed.sims[name].faults.arm([Fault(FaultKind.ERROR_503)])
        for authorization in ({"authorization": "Bearer of-the-client"}, {}):
            for _ in range(12):
                await keyed.chat(headers=authorization)
        seen: dict[str, set[str | None]] = {name: set() for name in "abc"}
        for name, sim in keyed.sims.items():
            for request in sim.stats.recorded:
                found = [value for key, value in request.headers if key.lower() == "authorization"]
                assert len(found) <= 1
                seen[name].add(found[0] if found else None)
        assert seen == {
            "a": {"Bearer of-the-client", None},
            "b": {"Bearer secret-of-b"},
            "c": {"Bearer of-the-client", None},
        }
