"""The endpoints that compute a prompt and generate nothing: embeddings, rerank, score."""

import base64
import math
import random
import re
import sys
import time
import uuid
from array import array
from typing import Any

import msgspec
from aiohttp import web
from xxhash import xxh3_64_intdigest

from extproc.simulator.call import Call, json_response
from extproc.simulator.planning import plan_prefills, served_model
from extproc.simulator.schema import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    bad_value,
    prompts,
    read,
)
from extproc.simulator.tokens import encode

_DIMENSIONS = 64
_MOST_DIMENSIONS = 4096


async def embeddings(call: Call) -> web.StreamResponse:
    """`POST /v1/embeddings`: unit vectors that depend on model and input alone."""
    request = read(call.body, EmbeddingRequest)
    model = served_model(call.engine, request.model)
    dimensions = _DIMENSIONS if request.dimensions is None else request.dimensions
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise bad_value(f"dimensions must be between 1 and {_MOST_DIMENSIONS}.", "dimensions")
    inputs = prompts(request.input, "input")
    usage = await _prefill(call, inputs)
    data = []
    for index, tokens in enumerate(inputs):
        vector = _vector(model.encode() + tokens, dimensions)
        embedding = _base64(vector) if request.encoding_format == "base64" else vector.tolist()
        data.append({"index": index, "object": "embedding", "embedding": embedding})
    return _list_response("embd-", model, usage, data=data)


async def rerank(call: Call) -> web.StreamResponse:
    """`POST /v1/rerank`: documents by the share of words they have in common with the query."""
    request = read(call.body, RerankRequest)
    model = served_model(call.engine, request.model)
    if not request.documents:
        raise bad_value("documents must not be empty.", "documents")
    usage = await _prefill(call, [encode(request.query + document) for document in request.documents])
    scores = [_similarity(request.query, document) for document in request.documents]
    best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    if request.top_n > 0:
        best = best[: request.top_n]
    results = [
        {"index": i, "document": {"text": request.documents[i]}, "relevance_score": scores[i]} for i in best
    ]
    return _list_response("rerank-", model, usage, results=results)


async def score(call: Call) -> web.StreamResponse:
    """`POST /v1/score`: one text against many, or texts pair by pair."""
    request = read(call.body, ScoreRequest)
    model = served_model(call.engine, request.model)
    left = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    right = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(left) == 1:
        left = left * len(right)
    if not left or len(left) != len(right):
        raise bad_value("text_1 must be one text, or as many as text_2.", "text_1")
    pairs = list(zip(left, right, strict=True))
    usage = await _prefill(call, [encode(first + second) for first, second in pairs])
    data = [
        {"index": index, "object": "score", "score": _similarity(first, second)}
        for index, (first, second) in enumerate(pairs)
    ]
    return _list_response("score-", model, usage, data=data)


async def _prefill(call: Call, inputs: list[bytes]) -> dict[str, int]:
    """Run the inputs through the engine; the `usage` member."""
    generations = plan_prefills(call.engine, inputs)
    await call.meet_fault()
    runtime = call.engine.runtime
    try:
        for generation in generations:
            runtime.submit(generation)
        for generation in generations:
            await runtime.end(generation)
    finally:
        for generation in generations:
            runtime.abort(generation)
    call.engine.finish_reasons["stop"] += len(generations)
    total = sum(generation.prompt_tokens for generation in generations)
    return {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}


def _list_response(prefix: str, model: str, usage: dict[str, int], **members: list[Any]) -> web.Response:
    head = {"id": prefix + uuid.uuid4().hex, "object": "list", "created": int(time.time()), "model": model}
    return json_response(msgspec.json.encode({**head, **members, "usage": usage}))


def _vector(content: bytes, dimensions: int) -> "array[float]":
    chance = random.Random(xxh3_64_intdigest(content))
    values = [chance.gauss(0, 1) for _ in range(dimensions)]
    length = math.hypot(*values)
    return array("f", [value / length for value in values])


def _base64(vector: "array[float]") -> str:
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def _similarity(first: str, second: str) -> float:
    words, others = (set(re.findall(r"\w+", text.lower())) for text in (first, second))
    return len(words & others) / (len(words | others) or 1)
