"""What a request body tells the router."""

import codecs
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any, Final, Self, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType
from msgspec.json import Decoder

from extproc.openai.cut import HINTS_MEMBER, MEMBERS
from extproc.openai.errors import ApiError, ErrorCode, shown
from extproc.openai.members import members

_T = TypeVar("_T")

DEFAULT_PRIORITY: Final = 5

_UTF8_CHUNK_BYTES: Final = 65_536
_MAX_HINTS_BYTES: Final = 4_096
_MAX_MODEL_CHARS: Final = 512
# A model's name with every character escaped as a surrogate pair, and its quotes: no value we read is longer.
_MAX_VALUE_BYTES: Final = 12 * _MAX_MODEL_CHARS + 2
# Up to this size, messages cannot be so many that making objects of them takes long.
_USUAL_BYTES: Final = 1 << 18

RENDERING: Final = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
_ENGINE_ARGUMENTS: Final = "vllm_xargs"
_OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")

_ABSENT: Final = Raw()
NULL: Final = Raw(b"null")
"""The value of a member that is absent: engines take null for the same."""
MAX_MESSAGES: Final = 4_096
"""Of a chat; a longer list is taken as it stands."""
_Model: TypeAlias = Annotated[str, Meta(min_length=1, max_length=_MAX_MODEL_CHARS)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
_NodeId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
_PrefixHint: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
_Priority: TypeAlias = Annotated[int, Meta(ge=0, le=10)]

_MODEL: Final = Decoder(_Model)
_NAME: Final = Decoder(str)
_BOOL: Final = Decoder(bool)
_COUNT: Final = Decoder(_Count)
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
        Decoder(_NodeId | None),
        "a node id: a string of 1-64 characters out of A-Z a-z 0-9 . _ -",
    ),
    "kv_prefix_hint": (
        Decoder(_PrefixHint | None),
        "a string of 1-256 characters",
    ),
    "priority": (
        Decoder(_Priority | None),
        "an integer from 0 (low) to 10 (high)",
    ),
}


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


GENERATING: Final = frozenset({Api.CHAT_COMPLETIONS, Api.COMPLETIONS, Api.RESPONSES})
"""The endpoints that answer with new tokens, and leave a KV cache behind."""
WITHOUT_MODEL: Final = frozenset({Api.TOKENIZE, Api.DETOKENIZE})
"""The endpoints that need the tokenizer alone."""


class Hints(msgspec.Struct, frozen=True):
    """The client's `x-inferact` member."""

    node_affinity: str | None = None
    kv_prefix_hint: str | None = None
    priority: int = DEFAULT_PRIORITY


class Message(msgspec.Struct, gc=False):
    """A message of a chat; its members are JSON as sent."""

    role: Raw
    content: Raw = NULL
    tool_calls: Raw = NULL
    tool_call_id: Raw = NULL


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """The members that make up a prompt, as JSON as sent: views that keep the body alive.

    The messages of a chat are read already, where the body has the usual shape.
    """

    messages: list[Message] | Raw = NULL
    prompt: Raw = NULL
    tools: Raw = NULL
    instructions: Raw = NULL
    input: Raw = NULL
    previous_response_id: str | None = None
    cache_salt: Raw = NULL
    rendering: tuple[Raw, ...] = ()
    """What changes the text that an engine makes of the same messages: the members of `RENDERING`."""


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the router sees it."""

    api: Api
    model: str
    stream: bool
    hints: Hints
    max_tokens: int | None
    body_bytes: int
    prompt: Prompt
    needs_cut: bool
    """Whether the body has members that engines never get from a client."""
    members: Sequence[tuple[str, Raw]]
    """All of the body's, in order and with duplicates, for `cut`; empty where they were not looked at."""
    one_answer: bool = True
    """Whether it asks for one answer to one prompt: else `usage` counts several."""


class _UsualHints(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    node_affinity: _NodeId | None = None
    kv_prefix_hint: _PrefixHint | None = None
    priority: _Priority | None = None


class _UsualBody(msgspec.Struct, gc=False):
    """The members that routing reads, each of the type that it should have; others are stepped over."""

    model: _Model
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    prompt: Raw = NULL
    tools: Raw = NULL
    instructions: Raw = NULL
    input: Raw = NULL
    previous_response_id: str | None = None
    cache_salt: Raw = NULL
    chat_template: Raw = NULL
    chat_template_kwargs: Raw = NULL
    documents: Raw = NULL
    reasoning_effort: Raw = NULL
    stream: bool | None = None
    max_completion_tokens: _Count | None = None
    max_tokens: _Count | None = None
    max_output_tokens: _Count | None = None
    n: _Count | None = None
    best_of: _Count | None = None
    vllm_xargs: Raw = NULL
    hints: _UsualHints | UnsetType | None = msgspec.field(default=UNSET, name=HINTS_MEMBER)
    kv_transfer_params: Raw = _ABSENT
    ec_transfer_params: Raw = _ABSENT
    bootstrap_host: Raw = _ABSENT
    bootstrap_port: Raw = _ABSENT
    bootstrap_room: Raw = _ABSENT


class _FirstTwo(msgspec.Struct, array_like=True, gc=False):
    """Of a list; what follows is stepped over."""

    first: Raw
    second: Raw = _ABSENT


_USUAL_BODY: Final = Decoder(_UsualBody)
_PROMPTS: Final = re.compile(rb'\[\s*["\[]')  # a list of texts or of lists; one of token ids is one prompt
_FIRST_TWO: Final = Decoder(_FirstTwo)
_NO_HINTS: Final = Hints()


def parse(api: Api, body: bytes) -> RoutingRequest:
    """Read what routing needs from a body. Raises ApiError when the body or its hints are wrong.

    Of duplicate members the last counts, as it does in the engines. Members that only engines judge are
    taken where they have the usual type and ignored otherwise.
    """
    _check_utf8(body)
    usual = _usual_body(body)
    if usual is None:
        return _any(api, body)
    _check_engine_arguments(usual.vllm_xargs)
    needs_cut = usual.hints is not UNSET or _has_transfer(usual)
    limits = usual.max_completion_tokens, usual.max_tokens, usual.max_output_tokens
    return RoutingRequest(
        api=api,
        model=usual.model,
        stream=usual.stream or False,
        hints=_usual_hints(usual.hints) if usual.hints else _NO_HINTS,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        body_bytes=len(body),
        prompt=Prompt(
            NULL if usual.messages is None else usual.messages,
            usual.prompt,
            usual.tools,
            usual.instructions,
            usual.input,
            usual.previous_response_id,
            usual.cache_salt,
            _told(usual.chat_template, usual.chat_template_kwargs, usual.documents, usual.reasoning_effort),
        ),
        needs_cut=needs_cut,
        members=members(body) if needs_cut else (),
        one_answer=_is_one((usual.n, usual.best_of), usual.prompt),
    )


def _usual_body(body: bytes) -> _UsualBody | None:
    """A body as it should be, read in one pass; `None`: it must be looked at member by member."""
    if len(body) > _USUAL_BYTES:
        return None
    try:
        return _USUAL_BODY.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


def _told(*values: Raw) -> tuple[Raw, ...]:
    """The values, unless there is none."""
    return () if all(value is NULL for value in values) else values


def _has_transfer(body: _UsualBody) -> bool:
    return not (
        body.kv_transfer_params is _ABSENT
        and body.ec_transfer_params is _ABSENT
        and body.bootstrap_host is _ABSENT
        and body.bootstrap_port is _ABSENT
        and body.bootstrap_room is _ABSENT
    )


def _usual_hints(given: _UsualHints) -> Hints:
    priority = DEFAULT_PRIORITY if given.priority is None else given.priority
    return Hints(given.node_affinity, given.kv_prefix_hint, priority)


def _any(api: Api, body: bytes) -> RoutingRequest:
    """Read a body of whatever shape, and find what is wrong with it."""
    listed = members(body)
    given = dict(listed)
    _check_engine_arguments(given.get(_ENGINE_ARGUMENTS, NULL))
    return RoutingRequest(
        api=api,
        model=_model(given.get("model")),
        stream=_read(_BOOL, given.get("stream")) or False,
        hints=_hints(given.get(HINTS_MEMBER)),
        max_tokens=_first_count(given.get(name) for name in _OUTPUT_LIMITS),
        body_bytes=len(body),
        prompt=Prompt(
            messages=given.get("messages", NULL),
            prompt=given.get("prompt", NULL),
            tools=given.get("tools", NULL),
            instructions=given.get("instructions", NULL),
            input=given.get("input", NULL),
            previous_response_id=_read(_NAME, given.get("previous_response_id")),
            cache_salt=given.get("cache_salt", NULL),
            rendering=_told(*(given.get(name, NULL) for name in RENDERING)),
        ),
        needs_cut=not given.keys().isdisjoint(MEMBERS),
        members=listed,
        one_answer=_is_one(
            [_read(_COUNT, given.get(name)) for name in ("n", "best_of")], given.get("prompt", NULL)
        ),
    )


def _is_one(answers: Iterable[int | None], prompt: Raw) -> bool:
    if any(count is not None and count > 1 for count in answers):
        return False
    if not _PROMPTS.match(memoryview(prompt)):
        return True
    try:
        return _FIRST_TWO.decode(prompt).second is _ABSENT
    except (msgspec.DecodeError, RecursionError):
        return True  # no list after all: for the engine to judge


def _check_utf8(body: bytes) -> None:
    if body.isascii():
        return
    # In pieces: decoded whole, a body with one emoji would take four times its size in memory.
    pieces = (body[at : at + _UTF8_CHUNK_BYTES] for at in range(0, len(body), _UTF8_CHUNK_BYTES))
    try:
        deque(codecs.iterdecode(pieces, "utf-8"), maxlen=0)
    except UnicodeDecodeError:
        raise ApiError(ErrorCode.INVALID_JSON, "The body is not valid JSON: it is not UTF-8.") from None


def _check_engine_arguments(value: Raw) -> None:
    """vLLM reads transfer parameters from here too, and a malformed one ends its engine."""
    if value is NULL:
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
