"""What real engines answered, byte by byte, through the real Envoy: the client gets it, and usage is read."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, scripted_stack

from extproc.openai.usage import Usage
from extproc.routing.outcome import Ended

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

_RECORDED = Path(__file__).parent.parent / "data" / "recorded-answers.jsonl"
ANSWERS: list[dict[str, Any]] = [json.loads(line) for line in _RECORDED.read_text().splitlines()]
"""Of vLLM 0.32 (once with `--enable-request-id-headers` and limits) and of llama.cpp's server."""


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_stack() as scripted:
        yield scripted


def usage_of(answer: dict[str, Any]) -> Usage | None:
    """The last usage that a client finds, however it is spelled."""
    text, usage = answer["body"], None
    pieces = (
        [line.removeprefix("data: ") for line in text.splitlines()] if "event" in answer["type"] else [text]
    )
    for piece in pieces:
        if piece.startswith("{") and (found := json.loads(piece).get("usage")):
            usage = found
    if usage is None or answer["status"] != 200:
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    prompt, output = (usage.get(f"{old}_tokens", usage.get(f"{new}_tokens")) for old, new in NAMES)
    return Usage(prompt, output, details.get("cached_tokens") or None)


NAMES = (("prompt", "input"), ("completion", "output"))


def as_told(usage: Usage | None) -> Usage | None:
    """Engines that have told of cached tokens once, and then do not, found none: it was not said here."""
    return Usage(usage.prompt_tokens, usage.output_tokens) if usage and not usage.cached_tokens else usage


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer['engine']}: {answer['what']}")
async def test_an_answer_comes_as_it_is_and_its_usage_is_read(
    engine: ScriptedEngine, answer: dict[str, Any]
) -> None:
    body = answer["body"].encode()
    engine.status = answer["status"]
    engine.says(body, content_type=answer["type"])
    got = await engine.stack.chat()
    outcome = await engine.stack.outcome()
    assert (got.status_code, got.content, got.headers["content-type"]) == (
        answer["status"],
        body,
        answer["type"],
    )
    assert as_told(outcome.usage) == usage_of(answer)
    assert (outcome.status, outcome.attempts) == (answer["status"], 1), "nothing of this is retried"
    assert (outcome.ended is Ended.ERROR) == (answer["status"] != 200 or "died" in answer["what"])


async def test_the_records_are_worth_it() -> None:
    assert sum(usage_of(answer) is not None for answer in ANSWERS) > 40
    assert sum(bool((usage_of(answer) or Usage(0)).cached_tokens) for answer in ANSWERS) > 10
    assert {answer["status"] for answer in ANSWERS} == {200, 400, 404, 501}
