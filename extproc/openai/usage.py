"""What an answer says of itself: the `usage` member, as engines of every kind write it."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw
from msgspec.json import Decoder

_MOST_TOKENS: Final = 2**31
_OBJECT: Final = Decoder(dict[str, Raw])
_COUNT: Final = Decoder(Annotated[int, Meta(ge=0, le=_MOST_TOKENS)])
# Chat, completions and embeddings first; then responses.
_PROMPT: Final = ("prompt_tokens", "input_tokens")
_OUTPUT: Final = ("completion_tokens", "output_tokens")
_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of an answer; of the prompt, `cached_tokens` were in the engine's cache (`None`: not told)."""

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int | None = None


def read_usage(text: bytes) -> Usage | None:
    """The numbers of a `usage` object; `None` where it has no number of prompt tokens.

    A member of a wrong type, or out of all bounds, counts as missing.
    """
    members = _members(text)
    prompt = _count(members, _PROMPT)
    if prompt is None:
        return None
    details = next((members[name] for name in _DETAILS if name in members), b"")
    cached = _count(_members(details), ("cached_tokens",))
    if cached is not None and cached > prompt:
        cached = None
    return Usage(prompt, _count(members, _OUTPUT) or 0, cached)


def _members(text: Raw | bytes) -> dict[str, Raw]:
    return _decoded(_OBJECT, text) or {}


def _count(members: Mapping[str, Raw], names: tuple[str, ...]) -> int | None:
    return next((_decoded(_COUNT, members[name]) for name in names if name in members), None)


def _decoded(decoder: Decoder[Any], text: Raw | bytes) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
