"""What a request body tells the router."""

import codecs
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any, Final, Self, TypeVar

import msgspec
from msgspec import Meta, Raw
from msgspec.json import Decoder

from extproc.openai.cut import HINTS_MEMBER, MEMBERS
from extproc.openai.errors import ApiError, ErrorCode, shown
from extproc.openai.members import members

_T = TypeVar("_T")

IMAGE_BYTES: Final = 4_000
"""What an image counts in `prompt_bytes`: 1,000 tokens, whatever the size of its URL or base64."""

DEFAULT_PRIORITY: Final = 5

_UTF8_CHUNK_BYTES: Final = 65_536
_MAX_HINTS_BYTES: Final = 4_096
_MAX_MODEL_CHARS: Final = 512
# A model's name with every character escaped as a surrogate pair, and its quotes: no value we read is longer.
_MAX_VALUE_BYTES: Final = 12 * _MAX_MODEL_CHARS + 2
_MAX_IMAGES: Final = 1_000

_PROMPT_MEMBERS: Final = ("messages", "prompt", "tools", "instructions", "input")
_ENGINE_ARGUMENTS: Final = "vllm_xargs"
_OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")

_MODEL: Final = Decoder(Annotated[str, Meta(min_length=1, max_length=_MAX_MODEL_CHARS)])
_NAME: Final = Decoder(str)
_BOOL: Final = Decoder(bool)
_COUNT: Final = Decoder(Annotated[int, Meta(ge=0, le=2**53)])
_HINTS: Final = Decoder(dict[str, Raw] | None)

# Field -> name of the engine arguments that we refuse. A struct of them steps over all others, however many:
# a dict of a million takes half a second.
_FORBIDDEN: Final = {name.replace("-", "_"): name for name in MEMBERS}
_FORBIDDEN_ARGUMENTS: Final = Decoder(
    msgspec.defstruct("_ForbiddenArguments", [(field, Raw, None) for field in _FORBIDDEN], rename=_FORBIDDEN)
)

# Each hint: how it is read, and what is allowed in words. Null is as good as absent.
_HINT_RULES: Final[Mapping[str, tuple[Decoder[Any], str]]] = {
    "node_affinity": (
        Decoder(Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")] | None),
        "a node id: a string of 1-64 characters out of A-Z a-z 0-9 . _ -",
    ),
    "kv_prefix_hint": (
        Decoder(Annotated[str, Meta(min_length=1, max_length=256)] | None),
        "a string of 1-256 characters",
    ),
    "priority": (
        Decoder(Annotated[int, Meta(ge=0, le=10)] | None),
        "an integer from 0 (low) to 10 (high)",
    ),
}

_IMAGE_KEY: Final = b'"image_url"'
# Up to the first byte of the URL, in both spellings: "image_url": "..." and "image_url": {"url": "..."}.
# Short members, as "detail" is, may come before it.
_IMAGE_URL: Final = re.compile(
    rb'"image_url"\s*+:\s*+(?:\{(?:\s*+"(?!url")[^"\\]{,99}+"\s*+:\s*+"[^"\\]{,99}+"\s*+,){,3}+\s*+"url"\s*+:\s*+)?+"'
)


class Api(StrEnum):
    """The routed endpoints, by path."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"
    SCORE = "/v1/score"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"

    @classmethod
    def from_path(cls, path: str) -> Self | None:
        """The endpoint of a request path, its query string ignored; None for a path that is not routed."""
        try:
            return cls(path.partition("?")[0])
        except ValueError:
            return None


class Hints(msgspec.Struct, frozen=True):
    """The client's `x-inferact` member."""

    node_affinity: str | None = None
    kv_prefix_hint: str | None = None
    priority: int = DEFAULT_PRIORITY


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the router sees it; Raw values are JSON as sent, views that keep the body alive.

    `members` are all of the body's, in order and with duplicates, for `cut`.
    """

    api: Api
    model: str
    stream: bool
    hints: Hints
    max_tokens: int | None
    prompt_bytes: int
    needs_cut: bool
    members: Sequence[tuple[str, Raw]]
    messages: Raw | None
    prompt: Raw | None
    tools: Raw | None
    instructions: Raw | None
    input: Raw | None
    previous_response_id: str | None
    cache_salt: Raw | None


def parse(api: Api, body: bytes) -> RoutingRequest:
    """Read what routing needs from a body. Raises ApiError when the body or its hints are wrong.

    Of duplicate members the last counts, as it does in the engines. Members that only engines judge are
    taken where they have the usual type and ignored otherwise.
    """
    _check_utf8(body)
    listed = members(body)
    given = dict(listed)
    _check_engine_arguments(given.get(_ENGINE_ARGUMENTS))
    return RoutingRequest(
        api=api,
        model=_model(given.get("model")),
        stream=_read(_BOOL, given.get("stream")) or False,
        hints=_hints(given.get(HINTS_MEMBER)),
        max_tokens=_first_count(given.get(name) for name in _OUTPUT_LIMITS),
        prompt_bytes=_prompt_bytes(body, given),
        needs_cut=not given.keys().isdisjoint(MEMBERS),
        members=listed,
        messages=given.get("messages"),
        prompt=given.get("prompt"),
        tools=given.get("tools"),
        instructions=given.get("instructions"),
        input=given.get("input"),
        previous_response_id=_read(_NAME, given.get("previous_response_id")),
        cache_salt=given.get("cache_salt"),
    )


def _check_utf8(body: bytes) -> None:
    if body.isascii():
        return
    # In pieces: decoded whole, a body with one emoji would take four times its size in memory.
    pieces = (body[at : at + _UTF8_CHUNK_BYTES] for at in range(0, len(body), _UTF8_CHUNK_BYTES))
    try:
        deque(codecs.iterdecode(pieces, "utf-8"), maxlen=0)
    except UnicodeDecodeError:
        raise ApiError(ErrorCode.INVALID_JSON, "The body is not valid JSON: it is not UTF-8.") from None


def _check_engine_arguments(value: Raw | None) -> None:
    """vLLM reads transfer parameters from here too, and a malformed one ends its engine."""
    if value is None:
        return
    try:
        arguments = _FORBIDDEN_ARGUMENTS.decode(value)
    except msgspec.ValidationError:
        return  # not an object: for the engine to judge
    for field, name in _FORBIDDEN.items():
        if getattr(arguments, field) is not None:
            where = f"{_ENGINE_ARGUMENTS}.{name}"
            raise ApiError(
                ErrorCode.INVALID_REQUEST, f"`{where}` is not for clients to set: leave it out.", where
            )


def _read(decoder: Decoder[_T], value: Raw | None) -> _T | None:
    """The decoded value, or None when it is absent, of another type or longer than any of its type."""
    if value is None or len(value) > _MAX_VALUE_BYTES:
        return None
    try:
        return decoder.decode(value)
    except msgspec.ValidationError:
        return None


def _first_count(values: Iterable[Raw | None]) -> int | None:
    counts = (_read(_COUNT, value) for value in values)
    return next((count for count in counts if count is not None), None)


def _model(value: Raw | None) -> str:
    model = _read(_MODEL, value)
    if model is not None:
        return model
    allowed = f"must be a string of 1-{_MAX_MODEL_CHARS} characters"
    wrong = "`model` is missing" if value is None else f"`model` {allowed}"
    raise ApiError(
        ErrorCode.INVALID_REQUEST, f"{wrong}; GET /v1/models lists the models served here.", "model"
    )


def _hints(value: Raw | None) -> Hints:
    if value is None:
        return Hints()
    if len(value) > _MAX_HINTS_BYTES:
        raise _invalid_hint(HINTS_MEMBER, f"must be at most {_MAX_HINTS_BYTES} bytes long")
    try:
        given = _HINTS.decode(value) or {}
    except msgspec.ValidationError:
        raise _invalid_hint(HINTS_MEMBER, f"must be an object of {', '.join(_HINT_RULES)}") from None
    hints: dict[str, Any] = {}
    for name, hint in given.items():
        if name not in _HINT_RULES:
            raise _unknown_hint(name)
        decoder, allowed = _HINT_RULES[name]
        try:
            decoded = decoder.decode(hint)
        except msgspec.ValidationError:
            raise _invalid_hint(f"{HINTS_MEMBER}.{name}", f"must be {allowed}") from None
        if decoded is not None:
            hints[name] = decoded
    return Hints(**hints)


def _invalid_hint(param: str, wrong: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_HINT, f"`{param}` {wrong}.", param)


def _unknown_hint(name: str) -> ApiError:
    nearest = get_close_matches(name[:64], _HINT_RULES, n=1, cutoff=0.0)[0]
    return _invalid_hint(
        f"{HINTS_MEMBER}.{shown(name)}",
        f"is unknown; did you mean `{nearest}`? Known are {', '.join(_HINT_RULES)}",
    )


def _prompt_bytes(body: bytes, given: Mapping[str, Raw]) -> int:
    """Bytes of JSON that make up the prompt; all of the body where the API has another shape (rerank)."""
    size = sum(len(given[name]) for name in _PROMPT_MEMBERS if name in given) or len(body)
    return max(0, size - _image_surplus_bytes(body))


def _image_surplus_bytes(body: bytes) -> int:
    """How many more bytes the URLs of the body's images take than they count for."""
    surplus = 0
    at = body.find(_IMAGE_KEY)
    for _ in range(_MAX_IMAGES):
        if at < 0:
            break
        end = at + len(_IMAGE_KEY)
        if url := _IMAGE_URL.match(body, at):
            end = body.index(b'"', url.end())
            surplus += end - url.end() - IMAGE_BYTES
        at = body.find(_IMAGE_KEY, end)
    return surplus
