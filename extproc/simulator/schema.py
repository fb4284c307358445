"""The request bodies a simulated engine reads. Unknown members are accepted, as vLLM does."""

import re
from typing import Literal, TypeVar, cast

import msgspec

from extproc.simulator.tokens import Message, encode, from_ids

Prompt = str | list[str | int | list[int]]


class ApiError(Exception):
    """An answer other than 200: its status and JSON body."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


def api_error(status: int, message: str, kind: str, param: str | None = None) -> ApiError:
    """An error in vLLM's shape."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return ApiError(status, msgspec.json.encode({"error": error}))


def bad_value(message: str, param: str) -> ApiError:
    """A well-formed request that asks for something impossible."""
    return api_error(400, f"{message} (parameter={param})", "BadRequestError", param)


class StreamOptions(msgspec.Struct):
    """What a stream should tell besides its text."""

    include_usage: bool = False


class ModelRequest(msgspec.Struct, kw_only=True):
    """What every request may name."""

    model: str | None = None


class GenerationRequest(ModelRequest, kw_only=True):
    """What chat and plain completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    cache_salt: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    tools: msgspec.Raw = msgspec.Raw(b"")


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Prompt


class InputItem(Message, kw_only=True):
    """One input item of the responses API; those without a role count as the user's."""

    role: str = "user"


class ResponsesRequest(ModelRequest, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    tools: msgspec.Raw = msgspec.Raw(b"")


class EmbeddingRequest(ModelRequest, kw_only=True):
    """`POST /v1/embeddings`."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class RerankRequest(ModelRequest, kw_only=True):
    """`POST /v1/rerank`."""

    query: str
    documents: list[str]
    top_n: int = 0


class ScoreRequest(ModelRequest, kw_only=True):
    """`POST /v1/score`."""

    text_1: str | list[str]
    text_2: str | list[str]


class TokenizeRequest(ModelRequest, kw_only=True):
    """`POST /tokenize`, of a prompt or of messages."""

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"")
    add_generation_prompt: bool = True


class DetokenizeRequest(ModelRequest, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]


_Schema = TypeVar("_Schema")
_FIELD = re.compile(r"field `([^`]+)`")
_PATH = re.compile(r"`\$(.*?)`$")


def read(body: bytes, schema: type[_Schema]) -> _Schema:
    """Decode and validate a body. Raises ApiError (400), which names the member but never its value."""
    if not body:
        raise _invalid("missing", "body", "Field required")
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        location = "body" + re.sub(r"\[(\d+|\.\.\.)\]", r".\1", path[1] if path else "")
        if (missing := _FIELD.search(message)) and "missing" in message:
            raise _invalid("missing", f"{location}.{missing[1]}", "Field required") from None
        raise _invalid("type_error", location, message.split(" - at ")[0]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _invalid("json_invalid", "body", "JSON decode error") from None


def _invalid(kind: str, location: str, message: str) -> ApiError:
    detail = {"type": kind, "loc": location, "msg": message}
    return api_error(400, f"1 validation error:\n  {detail}", "Bad Request", location)


def prompts(prompt: Prompt, param: str) -> list[bytes]:
    """The tokens of each prompt in a string, a list of strings, token ids, or a list of token ids.

    Raises ApiError (400).
    """
    if isinstance(prompt, str):
        return [encode(prompt)]
    try:
        if prompt and all(isinstance(item, int) for item in prompt):
            return [from_ids(cast(list[int], prompt))]
        encoded = [_tokens(item) for item in prompt]
    except ValueError as error:
        raise bad_value(f"{param}: {error}.", param) from None
    if not encoded or b"" in encoded:
        raise bad_value(f"{param} must not be empty.", param)
    return encoded


def _tokens(item: str | int | list[int]) -> bytes:
    if isinstance(item, int):
        raise ValueError("token ids and texts cannot be mixed")
    return encode(item) if isinstance(item, str) else from_ids(item)
