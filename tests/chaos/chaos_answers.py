"""Whether an answer is what the simulated engine says: every word, the right usage, the end of a stream."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from chaos_schedule import Api, Ask

from extproc.simulator import tokens

DONE = "[DONE]"


class BrokenError(Exception):
    """The answer ends before its end, or with an error."""


class GarbledError(Exception):
    """The answer is whole but not the one that was asked for."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the answer to a request must be, whichever node gives it."""

    ask: Ask
    prompt_tokens: int

    def text(self, node: str) -> str:
        """What a node says."""
        return tokens.SimulatedText(node).first(self.ask.max_tokens)


def check_whole(expected: Expected, node: str, body: bytes) -> None:
    """Raises `GarbledError` for an answer that is not right."""
    try:
        answer = msgspec.json.decode(body)
        choice = answer["choices"][0]
        text = choice["message"]["content"] if expected.ask.api is Api.CHAT else choice["text"]
        _check(expected, node, answer["model"], text, choice["finish_reason"])
        _check_usage(expected, answer["usage"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise GarbledError(f"an answer of {len(body)} bytes that is none: {error!r}") from error


def check_stream(expected: Expected, node: str, body: bytes) -> None:
    """Raises `BrokenError` and `GarbledError` for a stream that is not whole, or not right."""
    lines = body.decode(errors="replace").split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if lines[-1] or not events or events[-1] != DONE:
        raise BrokenError(f"a stream without its end: {len(events)} events, {len(body)} bytes")
    try:
        chunks = [msgspec.json.decode(event) for event in events[:-1]]
        if error := next((chunk["error"] for chunk in chunks if "error" in chunk), None):
            raise BrokenError(f"a stream that ends with an error: {error['message']}")
        _check_chunks(expected, node, chunks)
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise GarbledError(f"an event that is none: {error!r}") from error


def _check_chunks(expected: Expected, node: str, chunks: list[dict[str, Any]]) -> None:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(_pieces(expected.ask.api, choices))
    _check(expected, node, chunks[0]["model"], text, choices[-1]["finish_reason"])
    if expected.ask.include_usage:
        _check_usage(expected, chunks[-1]["usage"])


def _pieces(api: Api, choices: Iterable[dict[str, Any]]) -> Iterable[str]:
    for choice in choices:
        yield choice["delta"].get("content", "") if api is Api.CHAT else choice["text"]


def _check(expected: Expected, node: str, model: str, text: str, finish_reason: str) -> None:
    if model != expected.ask.model:
        raise GarbledError(f"an answer of the model {model}")
    if text != expected.text(node):
        raise GarbledError(f"{len(text)} characters that {node} does not say: {text[:60]!r}")
    if finish_reason != "length":
        raise GarbledError(f"an end because of {finish_reason}")


def _check_usage(expected: Expected, usage: dict[str, Any]) -> None:
    prompt, output = expected.prompt_tokens, expected.ask.max_tokens
    right = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    wrong = {key: usage[key] for key, value in right.items() if usage[key] != value}
    if wrong:
        raise GarbledError(f"a usage of {wrong} where {right} is right")
