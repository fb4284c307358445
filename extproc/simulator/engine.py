"""The simulated engine as a server: the application, embedded in a test, or a process of its own."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import uvloop
from aiohttp import web

from extproc.simulator import control, generating, scoring
from extproc.simulator.call import endpoint, json_response, reset_connection
from extproc.simulator.faults import Faults
from extproc.simulator.journal import Stats
from extproc.simulator.options import SimulatorOptions
from extproc.simulator.state import ENGINE, Engine

_MAX_BODY_BYTES = 1 << 30
_GRACE_S = 1.0


def make_app(options: SimulatorOptions) -> web.Application:
    """The application of one simulated engine.

    Serve it with `handler_cancellation=True, auto_decompress=False`, as `serve` does: a client that leaves
    must free its blocks, and bodies must arrive as they were sent.
    """
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_fastapi_errors])
    app[ENGINE] = Engine(options)
    app.cleanup_ctx.append(_run_batch)
    app.on_response_prepare.append(_name_the_simulator)
    for path, handler in {
        "/v1/chat/completions": generating.chat,
        "/v1/completions": generating.completions,
        "/v1/responses": generating.responses,
        "/v1/embeddings": scoring.embeddings,
        "/v1/rerank": scoring.rerank,
        "/v1/score": scoring.score,
        "/tokenize": control.tokenize,
        "/detokenize": control.detokenize,
    }.items():
        app.router.add_post(path, endpoint(handler))
    app.router.add_get("/v1/models", control.list_models)
    app.router.add_get("/health", control.health)
    app.router.add_get("/version", control.version)
    app.router.add_get("/metrics", control.show_metrics)
    app.router.add_get("/sim/stats", control.show_stats)
    app.router.add_get("/sim/requests", control.show_requests)
    app.router.add_get("/sim/faults", control.show_faults)
    app.router.add_post("/sim/faults", control.arm_faults)
    app.router.add_delete("/sim/faults", control.clear_faults)
    return app


class RunningSimulator:
    """A simulated engine that listens. Make it with `start`."""

    def __init__(self, runner: web.AppRunner, engine: Engine, url: str) -> None:
        self.url = url
        self.died = asyncio.Event()
        """Set once a fault or `kill` has ended it."""
        self._runner = runner
        self._engine = engine
        self._ending: asyncio.Task[None] | None = None
        engine.on_death = self._die

    @property
    def stats(self) -> Stats:
        """Live counts of what it served."""
        return self._engine.stats

    @property
    def kv_endpoints(self) -> tuple[str, str | None]:
        """Where it publishes KV events, and where it repeats them, if it does."""
        kv = self._engine.kv
        assert kv is not None, "it publishes none"
        return kv.endpoint, kv.replay_endpoint

    @property
    def faults(self) -> Faults:
        """Its switches."""
        return self._engine.faults

    async def stop(self) -> None:
        """Stop listening, give what is in flight a second to end, and close. Harmless if repeated."""
        await self._runner.cleanup()

    async def kill(self) -> None:
        """Vanish as a killed process does: every connection is reset and nothing listens any more."""
        server = self._runner.server
        if server is not None:
            for site in list(self._runner.sites):
                await site.stop()
            for connection in server.connections:
                if connection.transport is not None:
                    reset_connection(connection.transport)
        await self._runner.cleanup()
        self.died.set()

    def _die(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self.kill())


async def start(options: SimulatorOptions, host: str = "127.0.0.1", port: int = 0) -> RunningSimulator:
    """Serve a simulated engine on this event loop. Port 0 takes a free one. Raises OSError."""
    return await serve(make_app(options), host, port)


async def serve(app: web.Application, host: str, port: int) -> RunningSimulator:
    """Serve an application of `make_app`, to which its maker may have added. Raises OSError."""
    runner = web.AppRunner(
        app, handler_cancellation=True, auto_decompress=False, access_log=None, shutdown_timeout=_GRACE_S
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    bound_host = f"[{host}]" if ":" in host else host
    return RunningSimulator(runner, app[ENGINE], f"http://{bound_host}:{site.port}")


def run(options: SimulatorOptions, host: str, port: int, listening: Callable[[str], None]) -> None:
    """Serve a simulated engine until SIGINT or SIGTERM. Raises SystemExit (1) if a fault kills it.

    `listening` is called with its URL once it listens.
    """
    if uvloop.run(_serve(options, host, port, listening)):
        raise SystemExit(1)


async def _serve(options: SimulatorOptions, host: str, port: int, listening: Callable[[str], None]) -> bool:
    """Serve until told to stop; True if a fault killed the engine."""
    simulator = await start(options, host, port)
    listening(simulator.url)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    ends = [asyncio.create_task(event.wait()) for event in (stopped, simulator.died)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await simulator.stop()
    return simulator.died.is_set()


async def _run_batch(app: web.Application) -> AsyncIterator[None]:
    engine = app[ENGINE]
    tasks = [asyncio.create_task(engine.runtime.run())]
    if engine.kv is not None:
        tasks.append(asyncio.create_task(engine.kv.repeat()))
    yield
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
    if engine.kv is not None:
        engine.kv.close()


async def _name_the_simulator(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["server"] = "inferact-simulator"
    response.headers["x-sim-node"] = request.app[ENGINE].options.name


@web.middleware
async def _fastapi_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Unknown paths and methods get the bodies that vLLM's framework gives them."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        response = json_response(msgspec.json.encode({"detail": error.reason}), error.status)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["allow"] = ",".join(sorted(error.allowed_methods))
        return response
