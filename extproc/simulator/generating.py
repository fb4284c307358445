"""The endpoints that generate text: chat, plain completions, responses."""

import time
import uuid
from collections.abc import AsyncIterator

from aiohttp import web

from extproc.simulator import tokens
from extproc.simulator.answers import DONE, Answer, ChatAnswer, CompletionAnswer, Task
from extproc.simulator.batch import Generation
from extproc.simulator.call import Call, core_failure, hang, json_response
from extproc.simulator.faults import Fault, FaultKind
from extproc.simulator.journal import Outcome
from extproc.simulator.planning import check_sampling, plan_outputs, served_model
from extproc.simulator.responses import ResponsesAnswer
from extproc.simulator.runtime import EngineDeadError
from extproc.simulator.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResponsesRequest,
    api_error,
    prompts,
    read,
)

_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8"}


async def chat(call: Call) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    request = read(call.body, ChatRequest)
    model = served_model(call.engine, request.model)
    prompt = tokens.encode_chat(request.messages, bytes(request.tools))
    return await _answer(call, ChatAnswer(_task(call, "chatcmpl-", model, request, [prompt])))


async def completions(call: Call) -> web.StreamResponse:
    """`POST /v1/completions`."""
    request = read(call.body, CompletionRequest)
    model = served_model(call.engine, request.model)
    task = _task(call, "cmpl-", model, request, prompts(request.prompt, "prompt"))
    return await _answer(call, CompletionAnswer(task))


async def responses(call: Call) -> web.StreamResponse:
    """`POST /v1/responses`. A `previous_response_id` is known only to the engine that made it."""
    engine = call.engine
    request = read(call.body, ResponsesRequest)
    check_sampling(request.temperature, None)
    model = served_model(engine, request.model)
    prompt = _conversation(call, request)
    generations = plan_outputs(engine, [prompt], request.max_output_tokens)
    task = Task(
        id="resp_" + uuid.uuid4().hex,
        model=model,
        created=int(time.time()),
        generations=generations,
        finish_reason=_finish_reason(request.max_output_tokens),
        text=engine.text,
        stream=bool(request.stream),
    )
    output = engine.text.first(generations[0].output_tokens).encode()
    engine.store_response(task.id, prompt + output)
    return await _answer(call, ResponsesAnswer(task, request.previous_response_id))


def _conversation(call: Call, request: ResponsesRequest) -> bytes:
    previous = b""
    if request.previous_response_id is not None:
        stored = call.engine.stored_response(request.previous_response_id)
        if stored is None:
            message = f"Response with id '{request.previous_response_id}' not found."
            raise api_error(404, message, "invalid_request_error", "previous_response_id")
        previous = stored
    messages = [tokens.Message(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        messages.append(tokens.Message(role="user", content=request.input))
    else:
        messages.extend(request.input)
    return previous + tokens.encode_chat(messages, bytes(request.tools))


def _task(call: Call, prefix: str, model: str, request: GenerationRequest, encoded: list[bytes]) -> Task:
    check_sampling(request.temperature, request.n)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    n = request.n or 1
    return Task(
        id=prefix + (call.request.headers.get("x-request-id") or uuid.uuid4().hex[:16]),
        model=model,
        created=int(time.time()),
        generations=plan_outputs(call.engine, encoded, max_tokens, n, request.cache_salt),
        finish_reason=_finish_reason(max_tokens),
        text=call.engine.text,
        n=n,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
    )


def _finish_reason(max_tokens: int | None) -> str:
    return "stop" if max_tokens is None else "length"


async def _answer(call: Call, answer: Answer) -> web.StreamResponse:
    task = answer.task
    fault = await call.meet_fault(task.stream)
    runtime = call.engine.runtime
    try:
        for generation in task.generations:
            runtime.submit(generation)
        if task.stream:
            return await _stream(call, answer, fault)
        for generation in task.generations:
            await runtime.end(generation)
        _count_finished(call, task)
        return json_response(answer.whole())
    finally:
        for generation in task.generations:
            runtime.abort(generation)


async def _stream(call: Call, answer: Answer, fault: Fault | None) -> web.StreamResponse:
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    await response.prepare(call.request)
    try:
        async for events in _token_events(call, answer, fault.after_chunks if fault else None):
            await response.write(events)
        if fault is not None:
            await _break_stream(call, fault)
    except EngineDeadError:
        call.end(Outcome.FAILED)
        await response.write(b"data: " + core_failure().body + b"\n\n" + DONE)
        return response
    _count_finished(call, answer.task)
    # Counted before the last byte, so that whoever has read it finds it counted.
    call.end(Outcome.COMPLETED)
    await response.write(answer.closing())
    return response


async def _token_events(call: Call, answer: Answer, most: int | None) -> AsyncIterator[bytes]:
    """The events of the tokens as they come, all that have come at a time; no more than `most` tokens."""
    generations = answer.task.generations
    sent = [0] * len(generations)
    opened = False
    while most is None or sum(sent) < most:
        events = b""
        for choice, generation in enumerate(generations):
            stop = generation.generated_tokens
            if most is not None:
                stop = min(stop, sent[choice] + most - sum(sent))
            if stop > sent[choice]:
                events += answer.tokens(choice, sent[choice], stop)
                sent[choice] = stop
        if events:
            yield events if opened else answer.opening() + events
            opened = True
        elif all(generation.ended for generation in generations):
            return
        else:
            await call.engine.runtime.more_tokens(_not_ended(generations))


def _not_ended(generations: list[Generation]) -> list[Generation]:
    return [generation for generation in generations if not generation.ended]


async def _break_stream(call: Call, fault: Fault) -> None:
    if fault.kind is FaultKind.HANG_MID_STREAM:
        await hang()
    if fault.kind is FaultKind.RESET_MID_STREAM:
        call.reset()
    raise EngineDeadError


def _count_finished(call: Call, task: Task) -> None:
    call.engine.finish_reasons[task.finish_reason] += len(task.generations)
