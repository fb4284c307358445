"""The bodies and stream events of chat and plain completions, as vLLM writes them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from extproc.simulator.batch import Generation
from extproc.simulator.tokens import SimulatedText

FINGERPRINT = "inferact-simulator"
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Task:
    """What was asked for, whichever API asked: generations, `n` of each prompt, and how to report them."""

    id: str
    model: str
    created: int
    generations: list[Generation]
    finish_reason: str
    text: SimulatedText
    n: int = 1
    stream: bool = False
    include_usage: bool = False

    @property
    def output_tokens(self) -> int:
        """Tokens generated, over all choices."""
        return sum(generation.generated_tokens for generation in self.generations)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens; the choices of one prompt share them."""
        return sum(generation.prompt_tokens for generation in self.generations[:: self.n])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the KV cache."""
        return sum(generation.cached_tokens or 0 for generation in self.generations[:: self.n])

    def usage(self) -> dict[str, Any]:
        """The `usage` member of completions.

        Of cached tokens it tells only where there are some: as SGLang, and vLLM until it learned to say 0.
        """
        prompt, output, cached = self.prompt_tokens, self.output_tokens, self.cached_tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        }


class Answer(Protocol):
    """How one API writes a task's answer."""

    task: Task

    def whole(self) -> bytes:
        """The JSON body of an answer that is not streamed."""
        ...

    def opening(self) -> bytes:
        """The events that come with the first token, before it."""
        ...

    def tokens(self, choice: int, start: int, stop: int) -> bytes:
        """The events of one choice's tokens `start` to `stop`."""
        ...

    def closing(self) -> bytes:
        """The events after the last token."""
        ...


class _ChoicesAnswer(ABC):
    """What chat and plain completions have in common."""

    object_kind: str
    chunk_kind: str

    def __init__(self, task: Task) -> None:
        self.task = task

    def whole(self) -> bytes:
        """See Answer."""
        choices = [
            self._choice(index, self.task.text.first(generation.generated_tokens), self.task.finish_reason)
            for index, generation in enumerate(self.task.generations)
        ]
        return self._encode(self.object_kind, choices=choices, usage=self.task.usage())

    def opening(self) -> bytes:
        """See Answer."""
        return b""

    def tokens(self, choice: int, start: int, stop: int) -> bytes:
        """See Answer."""
        last = self.task.generations[choice].output_tokens - 1
        return b"".join(
            self._event(
                self._delta(
                    choice, self.task.text.token(index), self.task.finish_reason if index == last else None
                )
            )
            for index in range(start, stop)
        )

    def closing(self) -> bytes:
        """See Answer."""
        if not self.task.include_usage:
            return DONE
        usage = self._encode(self.chunk_kind, choices=[], usage=self.task.usage())
        return b"data: " + usage + b"\n\n" + DONE

    @abstractmethod
    def _choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]: ...

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"data: " + self._encode(self.chunk_kind, choices=[choice]) + b"\n\n"

    def _encode(self, kind: str, **members: object) -> bytes:
        task = self.task
        head = {"id": task.id, "object": kind, "created": task.created, "model": task.model}
        return msgspec.json.encode({**head, **members, "system_fingerprint": FINGERPRINT})


class ChatAnswer(_ChoicesAnswer):
    """`POST /v1/chat/completions`."""

    object_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> bytes:
        """See Answer."""
        role = {"role": "assistant", "content": ""}
        choices = range(len(self.task.generations))
        return b"".join(self._event(_with(index, "delta", role, None)) for index in choices)

    def _choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return _with(index, "message", {"role": "assistant", "content": text, "refusal": None}, finish_reason)

    def _delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return _with(index, "delta", {"content": text}, finish_reason)


class CompletionAnswer(_ChoicesAnswer):
    """`POST /v1/completions`."""

    object_kind = chunk_kind = "text_completion"

    def _choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return _with(index, "text", text, finish_reason)

    _delta = _choice


def _with(index: int, member: str, content: object, finish_reason: str | None) -> dict[str, Any]:
    return {
        "index": index,
        member: content,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
    }
