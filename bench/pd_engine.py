"""Simulated engines that hand prompts over to each other, in vLLM's words (NixlConnector).

A prefill keeps its blocks until another engine has fetched them, or for a while. An engine that is told to
fetch what is not there any more fails as vLLM does: its core dies.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from extproc.simulator import tokens
from extproc.simulator.blocks import BlockCache, Lease, block_hashes
from extproc.simulator.call import core_failure, json_response
from extproc.simulator.engine import RunningSimulator, make_app, serve
from extproc.simulator.options import SimulatorOptions
from extproc.simulator.schema import ChatRequest, read
from extproc.simulator.state import ENGINE, Engine

HELD_S: Final = 30.0
"""How long a prefill's blocks wait to be fetched."""
CHAT: Final = "/v1/chat/completions"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Handovers:
    """What an engine handed over, and what it fetched."""

    prefills: int = 0
    fetched: int = 0
    failed: int = 0
    expired: int = 0
    transfer_s: float = 0.0
    """What a fetch takes."""
    held: dict[str, Lease] = field(default_factory=dict)
    """By request: blocks that wait to be fetched."""


@dataclass(slots=True)
class Network:
    """The engines that can reach each other, by an id that each gets at its start."""

    engines: dict[str, tuple[Engine, Handovers]] = field(default_factory=dict)

    async def start(self, options: SimulatorOptions, port: int = 0) -> tuple[RunningSimulator, Handovers]:
        """One more engine; ended by its `stop`."""
        app, handovers = make_app(options), Handovers()
        engine, engine_id = app[ENGINE], secrets.token_hex(8)
        app.middlewares.append(_middleware(self, engine, engine_id, handovers))
        self.engines[engine_id] = engine, handovers
        running = await serve(app, "127.0.0.1", port)
        return running, handovers

    def take(self, told: dict[str, Any]) -> bool:
        """Fetch what a prefill left; `False`: it is not there."""
        engine, handovers = self.engines.get(str(told.get("remote_engine_id")), (None, None))
        if engine is None or handovers is None or engine.runtime.dead:
            return False
        lease = handovers.held.pop(str(told.get("remote_request_id")), None)
        if lease is None:
            return False
        engine.batch.cache.release(lease)
        return True


def _middleware(network: Network, engine: Engine, engine_id: str, handovers: Handovers) -> Any:
    @web.middleware
    async def transfers(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path != CHAT:
            return await handler(request)
        body = await request.read()
        try:
            told = json.loads(body).get("kv_transfer_params") or {}
        except ValueError:
            return await handler(request)
        if told.get("do_remote_decode"):
            answer = await handler(request)
            return _keep(engine, engine_id, handovers, body, answer)
        if told.get("do_remote_prefill"):
            await asyncio.sleep(handovers.transfer_s)
            if not network.take(told):
                handovers.failed += 1
                engine.die(0.0)
                return json_response(core_failure().body, 500)
            handovers.fetched += 1
            store(engine.batch.cache, block_hashes(_prompt(body)))
        return await handler(request)

    return transfers


def _keep(
    engine: Engine, engine_id: str, handovers: Handovers, body: bytes, answer: web.StreamResponse
) -> web.StreamResponse:
    """Hold the prompt's blocks, and tell where they are."""
    if answer.status != 200 or not isinstance(answer, web.Response) or not isinstance(answer.body, bytes):
        return answer
    handovers.prefills += 1
    told, key = json.loads(answer.body), secrets.token_hex(8)
    hashes = block_hashes(_prompt(body))
    held = engine.batch.cache.lease(hashes[: engine.batch.cache.match(hashes)], 0)
    if held is not None:
        handovers.held[key] = held
        asyncio.get_running_loop().call_later(HELD_S, _expire, engine, handovers, key)
    told["kv_transfer_params"] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": key,
        "remote_block_ids": [[*range(len(hashes))]],
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "tp_size": 1,
    }
    return json_response(json.dumps(told).encode())


def _expire(engine: Engine, handovers: Handovers, key: str) -> None:
    if (lease := handovers.held.pop(key, None)) is not None:
        handovers.expired += 1
        engine.batch.cache.release(lease)


def store(cache: BlockCache, hashes: Sequence[int]) -> None:
    """A prompt's full blocks have come, and are in the cache."""
    matched = cache.match(hashes)
    if (lease := cache.lease(hashes[:matched], len(hashes))) is not None:
        cache.publish(lease, hashes[matched:])
        cache.release(lease)


def _prompt(body: bytes) -> bytes:
    request = read(body, ChatRequest)
    return tokens.encode_chat(request.messages, bytes(request.tools))
