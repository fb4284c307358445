"""An engine whose answers a test writes byte by byte."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from envoy_stack import Stack, running_stack

EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}

Script = Callable[[web.StreamResponse], Awaitable[None]]


@dataclass
class ScriptedEngine:
    """Answers every request with `headers`, then what `script` writes."""

    stack: Stack
    headers: dict[str, str] = field(default_factory=lambda: dict(EVENTS))
    script: Script | None = None
    status: int = 200

    def says(self, *pieces: bytes, **headers: str) -> None:
        """Answer with these pieces, each a chunk of its own; in header names an underscore is a hyphen."""

        async def write(answer: web.StreamResponse) -> None:
            for piece in pieces:
                await answer.write(piece)

        self.script = write
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any routed request."""
        await request.read()
        answer = web.StreamResponse(status=self.status, headers=self.headers)
        await answer.prepare(request)
        assert self.script is not None
        await self.script(answer)
        return answer


@contextlib.asynccontextmanager
async def scripted_stack(**sections: Any) -> AsyncIterator[ScriptedEngine]:
    """One such engine behind Envoy and the service; `sections` as of `running_stack`."""
    made: list[ScriptedEngine] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        return await made[0].answer(request)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="")

    app = web.Application()
    app.router.add_get("/health", healthy)
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    node = {
        "endpoint": f"http://127.0.0.1:{runner.addresses[0][1]}",
        "backend": "custom",
        "engine": {"health_path": "/health"},
    }
    try:
        async with running_stack(sims=("a",), nodes={"a": node}, **sections) as stack:
            made.append(ScriptedEngine(stack))
            yield made[0]
    finally:
        await runner.cleanup()
