"""The bodies and stream events of the responses API."""

from itertools import count
from typing import Any

import msgspec

from extproc.simulator.answers import Task


class ResponsesAnswer:
    """`POST /v1/responses`: one message, whole or streamed."""

    def __init__(self, task: Task, previous_response_id: str | None = None) -> None:
        self.task = task
        self._previous = previous_response_id
        self._item = "msg_" + task.id.removeprefix("resp_")
        self._numbers = count()

    def whole(self) -> bytes:
        """See Answer."""
        return msgspec.json.encode(self._response(self._end_status()))

    def opening(self) -> bytes:
        """See Answer."""
        response = self._response("in_progress")
        item = self._message("", "in_progress") | {"content": []}
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._part_event("response.content_part.added", part=_text_part(""))
        )

    def tokens(self, choice: int, start: int, stop: int) -> bytes:
        """See Answer."""
        return b"".join(
            self._part_event("response.output_text.delta", delta=self.task.text.token(index), logprobs=[])
            for index in range(start, stop)
        )

    def closing(self) -> bytes:
        """See Answer."""
        text = self._text()
        status = self._end_status()
        return (
            self._part_event("response.output_text.done", text=text, logprobs=[])
            + self._part_event("response.content_part.done", part=_text_part(text))
            + self._event("response.output_item.done", output_index=0, item=self._message(text, "completed"))
            + self._event(f"response.{status}", response=self._response(status))
        )

    def _end_status(self) -> str:
        return "incomplete" if self.task.finish_reason == "length" else "completed"

    def _text(self) -> str:
        return self.task.text.first(self.task.output_tokens)

    def _response(self, status: str) -> dict[str, Any]:
        ended = status != "in_progress"
        return {
            "id": self.task.id,
            "object": "response",
            "created_at": self.task.created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "instructions": None,
            "metadata": None,
            "model": self.task.model,
            "output": [self._message(self._text(), "completed")] if ended else [],
            "parallel_tool_calls": True,
            "previous_response_id": self._previous,
            "temperature": 1.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "usage": self._usage() if ended else None,
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_text_part(text)],
        }

    def _usage(self) -> dict[str, Any]:
        prompt, output = self.task.prompt_tokens, self.task.output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.task.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        }

    def _part_event(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        payload = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(payload) + b"\n\n"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
