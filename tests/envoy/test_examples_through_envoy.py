"""Traces, and the examples of client authentication and tracing, on the real Envoy."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from envoy_stack import ADMIN_KEY, MODEL, Stack, running_stack, until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from extproc.launch.envoyprocess import EnvoyProcess
from extproc.rundir import RunDir

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]
EXAMPLES = Path(__file__).parent.parent.parent / "envoy" / "examples"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SECRET = b"a secret of the tests, long enough for HS256"


def inserted(bootstrap: str, example: str) -> str:
    """The bootstrap with every part of the example below the line that it names."""
    _, *parts = re.split(r"^# below `(.+)`\n", example, flags=re.MULTILINE)
    for line, part in zip(parts[::2], parts[1::2], strict=True):
        above, found, below = bootstrap.partition(f"\n{line}\n")
        assert found and f"\n{line}\n" not in below, f"the bootstrap has not exactly one line {line}"
        bootstrap = f"{above}{found}{part.rstrip()}\n{below}"
    return bootstrap


@contextlib.asynccontextmanager
async def with_example(name: str, **replaced: str) -> AsyncIterator[Stack]:
    """A stack whose Envoy runs with an example in its bootstrap."""
    example = (EXAMPLES / name).read_text()
    for old, new in replaced.items():
        assert old in example
        example = example.replace(old, new)
    async with running_stack(sims=("a",)) as stack:
        await stack.envoy.stop()
        bootstrap = RunDir(stack.service.config.scheduler.run_dir).bootstrap
        bootstrap.write_text(inserted(bootstrap.read_text(), example))
        envoy = EnvoyProcess(stack.service.config, concurrency=1)
        await envoy.start()
        try:
            yield stack
        finally:
            await envoy.stop()


def seen(stack: Stack) -> dict[str, str]:
    """The headers of the latest request that an engine got."""
    return {name.lower(): value for name, value in stack.sims["a"].stats.recorded[-1].headers}


async def test_a_trace_context_reaches_the_engine_unchanged() -> None:
    async with running_stack(sims=("a",)) as stack:
        await stack.chat(headers={"traceparent": TRACEPARENT, "tracestate": "vendor=1"})
        assert (seen(stack)["traceparent"], seen(stack)["tracestate"]) == (TRACEPARENT, "vendor=1")
        await stack.chat()
        assert "traceparent" not in seen(stack)


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[tuple[int, list[Any]]]:
    """An OpenTelemetry collector: its port, and the spans that it got."""
    spans: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        export = ExportTraceServiceRequest.FromString(await request.read())
        spans.extend(
            span
            for resource in export.resource_spans
            for scope in resource.instrumentation_library_spans  # as `scope_spans` was called
            for span in scope.spans
        )
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1], spans
    await runner.cleanup()


async def test_a_span_tells_what_was_decided_and_is_the_parent_of_the_engines() -> None:
    async with (
        collector() as (port, spans),
        with_example("tracing.yaml", **{"otel-collector:4318": f"127.0.0.1:{port}", "4318": str(port),
                                        "address: otel-collector": "address: 127.0.0.1"}) as stack,
    ):  # fmt: skip
        answer = await stack.chat(headers={"traceparent": TRACEPARENT})
        await until(lambda: bool(spans), limit_s=15.0)
        receipt = stack.service.router.receipts.find(answer.headers["x-request-id"])
        assert receipt is not None
        _, trace, parent, _ = seen(stack)["traceparent"].split("-")
        (span,) = (one for one in spans if one.name == "ingress")  # the other is the call to the service
        assert (span.trace_id.hex(), span.span_id.hex()) == (trace, parent)
        assert trace == TRACE
        told = {one.key: one.value.string_value for one in span.attributes}
        assert told["inferact.model"] == MODEL
        assert (told["inferact.node"], told["inferact.attempts"], told["inferact.route"]) == (
            "a",
            "1",
            "routed",
        )
        assert float(told["inferact.cost_s"]) == pytest.approx(next(receipt.candidates()).cost_s, abs=1e-6)
        assert {"inferact.prompt_tokens", "inferact.matched_tokens", "inferact.waited_s"} <= set(told)
        assert "hello" not in str(span)


async def refused_without(stack: Stack, good: str, code: str) -> None:
    """Only the good credential passes, no engine sees it, and nothing but the API is public."""
    before = stack.attempts()
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-client": "team-a"}):
        answer = await stack.chat(headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, code)
    for path in ("/admin/decisions", "/status", "/metrics", "/dashboard", "/v1/../admin/decisions"):
        answer = await stack.client.get(path, headers={"authorization": good})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path
    assert stack.attempts() == before
    answer = await stack.chat(headers={"authorization": good, "x-client": "forged"})
    assert answer.status_code == 200
    assert "authorization" not in seen(stack)
    assert (await stack.client.get("/v1/models", headers={"authorization": good})).status_code == 200


async def test_with_api_keys_only_clients_with_a_key_come_through() -> None:
    async with with_example("api-keys.yaml") as stack:
        await refused_without(stack, "Bearer an-example-key-of-team-a", "invalid_api_key")
        assert seen(stack)["x-client"] == "team-a"


def token(**claims: object) -> str:
    """A signed token."""
    parts = [json.dumps(part).encode() for part in ({"alg": "HS256", "kid": "test"}, claims)]
    signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    signature = hmac.new(SECRET, signed, hashlib.sha256).digest()
    return f"{signed.decode()}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


async def test_with_tokens_only_clients_with_a_valid_one_come_through(tmp_path: Path) -> None:
    secret = base64.urlsafe_b64encode(SECRET).rstrip(b"=").decode()
    keys = tmp_path / "jwks.json"
    keys.write_text(json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "test", "k": secret}]}))
    claims = {"iss": "https://login.example.com/", "aud": "inferact", "sub": "ada"}
    later = time.time() + 60
    async with with_example("jwt.yaml", **{"/etc/envoy/jwks.json": str(keys)}) as stack:
        await refused_without(stack, f"Bearer {token(**claims, exp=later)}", "invalid_token")
        assert seen(stack)["x-client"] == "ada"
        for wrong in (
            {"exp": time.time() - 600},
            {"exp": later, "aud": "others"},
            {"exp": later, "iss": "x"},
        ):
            answer = await stack.chat(headers={"authorization": f"Bearer {token(**claims | wrong)}"})
            assert answer.status_code in (401, 403)


async def test_a_pod_drains_its_node_before_it_stops_and_restores_it_at_its_start(stack: Stack) -> None:
    node = stack.service.router.nodes["b"]

    async def hook(action: str) -> None:
        environment = {"INFERACT_URL": stack.url, "NODE": "b", "INFERACT_ADMIN_KEY": ADMIN_KEY}
        script = EXAMPLES.parent / "kubernetes" / "node.py"
        process = await asyncio.create_subprocess_exec(sys.executable, str(script), action, env=environment)
        assert await process.wait() == 0

    await hook("drain")
    assert node.drained
    await hook("restore")
    assert not node.drained
