"""Errors that Envoy itself makes: in the OpenAI shape too, with their reason, and counted."""

import asyncio

import pytest
from envoy_stack import MODEL, Stack, running_stack, until

pytestmark = pytest.mark.envoy

TOO_LONG = b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 100_000 + b"\r\n\r\n"


@pytest.mark.parametrize(("sent", "status"), [(b"NOT HTTP\r\n\r\n", 400), (TOO_LONG, 431)])
async def test_what_is_no_http(sent: bytes, status: int) -> None:
    async with running_stack(sims=("a",)) as stack:
        host, port = stack.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status)
        assert b"x-inferact-reason: invalid_request" in head
        assert b'"code":"invalid_request"' in body
        await until(lambda: rejected(stack, "invalid_request") == 1)


async def test_when_the_only_node_is_gone_before_a_probe_says_so() -> None:
    async with running_stack(sims=("a",)) as stack:
        await stack.service.fleet.stop()
        await stack.sims["a"].kill()
        answer = await stack.chat()
        assert answer.status_code == 503
        assert answer.headers["x-inferact-reason"] == "no_available_node"
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "server_error"
        await until(lambda: rejected(stack, "no_available_node") == 1)


async def test_a_body_over_the_limit_is_counted() -> None:
    async with running_stack(sims=("a",), scheduler={"max_body_bytes": 1000}) as stack:
        answer = await stack.chat("x" * 2000)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
        await until(lambda: rejected(stack, "body_too_large") == 1)


async def test_an_engines_own_error_passes_untouched() -> None:
    async with running_stack(sims=("a",)) as stack:
        answer = await stack.client.post("/v1/chat/completions", json={"model": MODEL, "messages": "wrong"})
        assert answer.status_code == 400
        assert answer.headers["x-sim-node"] == "a"
        assert "x-inferact-reason" not in answer.headers


def rejected(stack: Stack, reason: str) -> float:
    """The rejections counted for a reason."""
    prefix = f'inferact_rejections_total{{reason="{reason}"}} '
    lines = stack.service.telemetry.render().decode().splitlines()
    return next(float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix))
