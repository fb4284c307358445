"""The endpoints around generation: models, health, metrics, the tokenizer, and `/sim/*`."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from extproc.simulator import metrics, tokens
from extproc.simulator.call import Call, json_response
from extproc.simulator.faults import Fault, FaultKind
from extproc.simulator.planning import served_model
from extproc.simulator.schema import (
    ApiError,
    DetokenizeRequest,
    TokenizeRequest,
    bad_value,
    read,
)
from extproc.simulator.state import ENGINE

_VERSION = "0.32.0"


async def list_models(request: web.Request) -> web.Response:
    """`GET /v1/models`."""
    engine = request.app[ENGINE]
    models = [
        {
            "id": name,
            "object": "model",
            "created": int(engine.started_at),
            "owned_by": "inferact-simulator",
            "root": engine.options.models[0],
            "parent": None,
            "max_model_len": engine.options.context_tokens,
        }
        for name in engine.options.models
    ]
    return _json({"object": "list", "data": models})


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 503 once the engine is dead or while a fault says so."""
    engine = request.app[ENGINE]
    down = engine.runtime.dead or engine.faults.strike(FaultKind.HEALTH_DOWN)
    return web.Response(status=503 if down else 200)


async def version(_request: web.Request) -> web.Response:
    """`GET /version`: that of the vLLM it imitates."""
    return _json({"version": _VERSION})


async def show_metrics(request: web.Request) -> web.Response:
    """`GET /metrics`."""
    engine = request.app[ENGINE]
    if fault := engine.faults.strike(FaultKind.METRICS_SLOW):
        await asyncio.sleep(fault.delay_s)
    if engine.faults.strike(FaultKind.METRICS_GARBAGE):
        return web.Response(body=metrics.GARBAGE, content_type="text/plain")
    return web.Response(text=metrics.render(engine), content_type="text/plain")


async def tokenize(call: Call) -> web.StreamResponse:
    """`POST /tokenize`: the very ids that generation uses."""
    request = read(call.body, TokenizeRequest)
    served_model(call.engine, request.model)
    await call.meet_fault()
    if request.messages is not None:
        encoded = tokens.encode_chat(request.messages, bytes(request.tools), request.add_generation_prompt)
    elif request.prompt is not None:
        encoded = tokens.encode(request.prompt)
    else:
        raise bad_value("give prompt or messages.", "prompt")
    ids = tokens.to_ids(encoded)
    context = call.engine.options.context_tokens
    return _json({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": None})


async def detokenize(call: Call) -> web.StreamResponse:
    """`POST /detokenize`."""
    request = read(call.body, DetokenizeRequest)
    served_model(call.engine, request.model)
    await call.meet_fault()
    try:
        text = tokens.decode(tokens.from_ids(request.tokens))
    except ValueError as error:
        raise bad_value(f"tokens: {error}.", "tokens") from None
    return _json({"prompt": text})


async def show_stats(request: web.Request) -> web.Response:
    """`GET /sim/stats`: counts, and digests of what was recorded."""
    return _json(request.app[ENGINE].stats.as_dict())


async def show_requests(request: web.Request) -> web.Response:
    """`GET /sim/requests`: the recorded requests, bodies in base64."""
    return _json([recorded.whole() for recorded in request.app[ENGINE].stats.recorded])


async def show_faults(request: web.Request) -> web.Response:
    """`GET /sim/faults`: what is armed."""
    return _json(request.app[ENGINE].faults.armed)


async def arm_faults(request: web.Request) -> web.Response:
    """`POST /sim/faults`: arm one fault, or a list of them."""
    body = await request.read()
    try:
        faults = read(body, list[Fault]) if body.lstrip().startswith(b"[") else [read(body, Fault)]
    except ApiError as error:
        return json_response(error.body, error.status)
    request.app[ENGINE].faults.arm(faults)
    return await show_faults(request)


async def clear_faults(request: web.Request) -> web.Response:
    """`DELETE /sim/faults`: disarm everything."""
    request.app[ENGINE].faults.clear()
    return await show_faults(request)


def _json(content: Any) -> web.Response:
    return json_response(msgspec.json.encode(content))
