"""What Envoy reads in failing answers of engines, by the very script that it gets for each of them."""

import contextlib
import gzip
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from aiohttp import web
from envoy_stack import Stack, running_stack, until

from extproc.envoyconfig.failures import MOST_BYTES
from extproc.routing.outcome import Attempt, Failure
from extproc.simulator.faults import Fault, FaultKind

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

SAMPLES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent.parent / "data" / "failing-answers.yaml").read_text()
)
BACKENDS = ("vllm", "tgi", "sglang", "llamacpp", "custom")
OUT_OF_MEMORY = b'{"error":{"message":"CUDA out of memory. Tried to allocate 2.00 GiB."}}'


@dataclass
class Engines:
    """Engines of every kind that all give the same answer to a request."""

    stack: Stack
    status: int = 200
    body: bytes = b"{}"
    headers: tuple[tuple[str, str], ...] = ()
    chunked: bool = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any path: engines are well, and fail their requests."""
        if request.method == "GET":
            return web.Response(text="{}")
        await request.read()
        if not self.chunked:
            return web.Response(status=self.status, body=self.body, headers=self.headers)
        answer = web.StreamResponse(status=self.status, headers=self.headers)
        await answer.prepare(request)
        await answer.write(self.body)
        return answer

    async def ask(self, node_id: str) -> tuple[httpx.Response, Attempt | None]:
        """What a client of the node gets, and the attempt as the service hears of it; `None`: no failure."""
        heard: list[Attempt] = []
        blame = self.stack.service._access_log._blame
        failed = type(blame).failed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                type(blame),
                "failed",
                lambda blame, attempt, *rest: (heard.append(attempt), failed(blame, attempt, *rest)),
            )
            answer = await self.stack.chat(**{"x-inferact": {"node_affinity": node_id}})
            await self.stack.outcome()
        assert len(heard) <= 1
        return answer, heard[0] if heard else None

    def says(self, status: int, body: bytes, *headers: tuple[str, str], chunked: bool = False) -> None:
        """From now on."""
        self.status, self.body, self.headers, self.chunked = status, body, headers, chunked


@pytest.fixture(scope="module")
async def engines() -> AsyncIterator[Engines]:
    """A node for each kind of engine."""
    async with contextlib.AsyncExitStack() as stack:
        made: list[Engines] = []

        async def answer(request: web.Request) -> web.StreamResponse:
            return await made[0].answer(request) if made else web.Response(text="{}")

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        for _ in BACKENDS:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        nodes = {
            backend: {"endpoint": f"http://127.0.0.1:{address[1]}", "backend": backend}
            for backend, address in zip(BACKENDS, runner.addresses, strict=True)
        }
        running = await stack.enter_async_context(running_stack(BACKENDS, nodes, healthy=False))
        made.append(Engines(running))
        yield made[0]


async def test_the_samples_are_of_every_kind_of_engine() -> None:
    assert {sample["backend"] for sample in SAMPLES} == set(BACKENDS)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample['backend']}: {sample['what']}")
async def test_an_engines_failing_answer_is_told_by_its_words(
    engines: Engines, sample: dict[str, Any]
) -> None:
    body = sample["body"].encode()
    engines.says(sample["status"], body, ("content-type", sample.get("type", "application/json")))
    answer, attempt = await engines.ask(sample["backend"])
    assert attempt is not None
    assert attempt.failure == (sample["means"] or Failure.ERROR)
    assert (answer.status_code, answer.content) == (sample["status"], body), "the client's, untouched"
    assert "x-inferact-failure" not in answer.headers


@pytest.mark.parametrize("status", [200, 400, 404, 422, 501])
async def test_answers_that_are_not_retried_are_not_read(engines: Engines, status: int) -> None:
    engines.says(status, OUT_OF_MEMORY)
    answer, attempt = await engines.ask("vllm")
    assert attempt is None
    assert (answer.status_code, answer.content) == (status, OUT_OF_MEMORY)


@pytest.mark.parametrize("status", [200, 400, 500, 502])
async def test_engines_cannot_set_the_mark_and_clients_never_see_it(engines: Engines, status: int) -> None:
    engines.says(status, b"{}", ("x-inferact-failure", "out_of_memory"), ("X-Inferact-Failure", "overloaded"))
    answer, attempt = await engines.ask("vllm")
    assert "x-inferact-failure" not in answer.headers
    expected = {500: Failure.ENGINE_DEATH, 502: Failure.ERROR}
    assert (attempt and attempt.failure) == expected.get(status)


async def test_clients_cannot_set_the_mark(engines: Engines) -> None:
    seen: list[list[str]] = []
    answer = type(engines).answer

    async def note(engines: Engines, request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.getall("x-inferact-failure", []))
        return await answer(engines, request)

    engines.says(200, b"{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engines), "answer", note)
        await engines.stack.chat(headers={"x-inferact-failure": "out_of_memory"})
    await engines.stack.outcome()
    assert seen
    assert not any(seen)


@pytest.mark.parametrize(
    ("body", "headers", "chunked"),
    [
        (OUT_OF_MEMORY + b" " * MOST_BYTES, (), False),
        (OUT_OF_MEMORY, (), True),
        (OUT_OF_MEMORY + b" " * (4 << 20), (), True),
        (gzip.compress(OUT_OF_MEMORY), (("content-encoding", "gzip"),), False),
    ],
    ids=["long", "of unknown length", "long and of unknown length", "compressed"],
)
async def test_a_body_that_cannot_be_read_passes_and_only_its_status_counts(
    engines: Engines, body: bytes, headers: tuple[tuple[str, str], ...], chunked: bool
) -> None:
    engines.says(500, body, *headers, chunked=chunked)
    answer, attempt = await engines.ask("vllm")
    assert attempt is not None
    assert attempt.failure is Failure.ENGINE_DEATH
    assert answer.content == (gzip.decompress(body) if headers else body)


async def test_a_body_of_the_greatest_length_is_read(engines: Engines) -> None:
    body = b" " * (MOST_BYTES - len(OUT_OF_MEMORY)) + OUT_OF_MEMORY
    engines.says(500, body)
    answer, attempt = await engines.ask("vllm")
    assert attempt is not None
    assert attempt.failure is Failure.OUT_OF_MEMORY
    assert answer.content == body


@pytest.mark.parametrize(
    "body", [bytes(range(256)) * 4, b"\xff\xfe CUDA out of memory", b"%s %d [[ %a", b"\0" * 99]
)
async def test_bytes_that_are_no_text_do_no_harm(engines: Engines, body: bytes) -> None:
    engines.says(503, body)
    answer, attempt = await engines.ask("custom")
    assert attempt is not None
    assert attempt.failure is (Failure.OUT_OF_MEMORY if b"CUDA" in body else Failure.ERROR)
    assert answer.content == body


async def test_the_answer_of_the_last_node_is_the_clients(stack: Stack) -> None:
    """Attempts before it were read too, and left nothing behind."""
    for sim in stack.sims.values():
        sim.faults.arm([Fault(FaultKind.OUT_OF_MEMORY_TGI, count=1)])
    answer = await stack.chat()
    assert (answer.status_code, answer.headers["x-inferact-attempts"]) == (424, "3")
    assert answer.json()["error_type"] == "generation"
    await stack.outcome()
    receipt = stack.service.router.receipts.latest(1)[0]
    assert sorted(receipt.failed) == [(name, "424 out_of_memory") for name in "abc"]
    await until(lambda: sum(stack.in_flight().values()) == 0)
