"""A prompt as engines cache it: one canonical stream of bytes, cut into blocks under chained hashes.

Two prompts share their first blocks if, and as far as, their streams begin alike. The stream holds what
engines render, in the order in which they render it: tools, then each message. A message only adds to its
end, so that the stream of a conversation begins with the streams of its earlier turns.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from typing import Final, TypeAlias

import msgspec
from msgspec import Raw
from msgspec.json import Decoder
from xxhash import xxh3_64_intdigest

from extproc.openai.request import MAX_MESSAGES, NULL, Api, Message, Prompt, RoutingRequest

IMAGE_BYTES: Final = 4_000
"""What an image counts: 1,000 tokens, whatever the size of its URL or base64."""
BLOCK_BYTES: Final = 512
"""The size of the first 64 blocks; it doubles then, and after every 32 blocks more."""
MAX_BLOCKS: Final = 256
"""The most blocks of a prompt: they cover 2 MB of it, and what follows is not indexed."""

_FINE_BLOCKS: Final = 64
_DOUBLING_BLOCKS: Final = 32
_SIZES: Final = (BLOCK_BYTES,) * _FINE_BLOCKS + tuple(
    BLOCK_BYTES << 1 + index // _DOUBLING_BLOCKS for index in range(MAX_BLOCKS - _FINE_BLOCKS)
)

# Bounds the Python work that a body can cause; lists past these are hashed as they stand.
_MAX_PARTS: Final = 1_024
_MAX_OBJECTS: Final = 16_384
_MAX_SORTED: Final = 1_024
_LARGE_BYTES: Final = 1 << 18

_Piece: TypeAlias = Raw | bytes

# Between the pieces of a stream stands a byte that JSON cannot hold; the tags are no JSON either.
_SEPARATOR: Final = b"\x00"
_PART_SEPARATOR: Final = b"\x01"
_TOOL_CALLS: Final = b"calls"
_TOOL_CALL_ID: Final = b"answers"
_PREVIOUS: Final = b"after"

_QUOTE: Final = ord('"')
_BRACKET: Final = ord("[")
_EMPTY: Final = (b"null", b"[]", b'""')
_USER: Final = Raw(b'"user"')
_SYSTEM: Final = b'"system"'
_SYSTEM_ROLES: Final = (_SYSTEM, b'"developer"')


class PromptBlocks(msgspec.Struct, frozen=True, gc=False):
    """The blocks of a prompt, first to last; `ends_bytes`: the stream's bytes up to the end of each.

    The first `system_blocks` of them are the system prompt. `fingerprint`: a hash of all of the prompt, 0
    where it is not known.
    """

    hashes: tuple[int, ...]
    ends_bytes: tuple[int, ...]
    total_bytes: int
    system_blocks: int
    fingerprint: int = 0


class _Item(msgspec.Struct, gc=False):
    """An element of a response's input: a message, if it has a role."""

    role: Raw = NULL
    content: Raw = NULL
    tool_calls: Raw = NULL
    tool_call_id: Raw = NULL


class _Part(msgspec.Struct, gc=False):
    """A part of a content: a text, or one of the media that the others name."""

    text: Raw = NULL
    image_url: Raw = NULL
    image_embeds: Raw = NULL
    image_pil: Raw = NULL
    video_url: Raw = NULL
    audio_url: Raw = NULL
    input_audio: Raw = NULL
    file: Raw = NULL
    file_id: Raw = NULL
    file_url: Raw = NULL
    file_data: Raw = NULL


_MEDIA: Final = _Part.__struct_fields__[1:]
_MESSAGES: Final = Decoder(list[Message])
_ITEMS: Final = Decoder(list[_Item])
_PARTS: Final = Decoder(list[_Part])
_RAWS: Final = Decoder(list[Raw])
_UNREADABLE: Final = (msgspec.DecodeError, RecursionError)


def prompt_blocks(request: RoutingRequest, secret: int) -> PromptBlocks:
    """The blocks of a request's prompt; `secret` (64 bits) keeps clients from forging those of others.

    There are none for APIs that leave no KV cache behind: embeddings, rerank, score, (de)tokenize.
    """
    api = request.api
    if api is Api.CHAT_COMPLETIONS:
        return _blocks(*_chat(request.prompt), _seed(request, secret))
    if api is Api.COMPLETIONS:
        return _blocks(b"", _completion(request.prompt.prompt), _seed(request, secret))
    if api is Api.RESPONSES:
        return _blocks(*_response(request.prompt), _seed(request, secret))
    given = (request.prompt.input, request.prompt.prompt)
    value = next((value for value in given if not _is_null(value)), None)
    if value is None:
        return PromptBlocks((), (), request.body_bytes, 0)
    return PromptBlocks((), (), len(value), 0, xxh3_64_intdigest(value, _seed(request, secret)))


def unit_blocks(ids: Sequence[int], unit_bytes: int, total_bytes: int, secret: int) -> PromptBlocks:
    """The blocks of a prompt known only by ids (signed, 64 bits) that each stand for `unit_bytes` of it.

    A block's hash covers the units it touches; which part of them it holds follows from its number.
    """
    units = memoryview(array("q", ids)).cast("B")
    slices, ends = _layout(0)
    full = bisect_right(ends, min(total_bytes, len(ids) * unit_bytes))
    digest = xxh3_64_intdigest(str(unit_bytes).encode(), secret)
    hashes = []
    for block in slices[:full]:
        first, end = block.start // unit_bytes, -(-block.stop // unit_bytes)
        digest = xxh3_64_intdigest(units[8 * first : 8 * end], digest)
        hashes.append(digest)
    return PromptBlocks(tuple(hashes), ends[:full], total_bytes, 0)


def _seed(request: RoutingRequest, secret: int) -> int:
    salt = request.prompt.cache_salt
    salted = b"" if _is_empty(salt) else bytes(salt)
    seed = xxh3_64_intdigest(request.model.encode() + _SEPARATOR + salted, secret)
    rendering = [b"" if _is_empty(value) else _minified(value) for value in request.prompt.rendering]
    return xxh3_64_intdigest(_SEPARATOR.join(rendering), seed) if any(rendering) else seed


def _blocks(head: bytes, body: bytes | memoryview, seed: int) -> PromptBlocks:
    """Cut and hash a stream that begins with the system prompt `head`, where a block ends.

    Bytes at the stream's end that fill no block belong to none: engines keep full blocks only, and in the
    next turn they are part of a block with other bytes behind them.
    """
    hashes: list[int] = []
    ends: tuple[int, ...] = ()
    if head:
        slices, ends = _layout(0)
        full = bisect_right(ends, len(head))
        slices, ends = slices[:full], ends[:full]
        covered = ends[-1] if ends else 0
        if covered < len(head) and full < MAX_BLOCKS:
            slices += (slice(covered, len(head)),)
            ends += (len(head),)
        hashes = _chain(head, slices, seed)
        seed = hashes[-1]
    system_blocks = len(hashes)
    slices, body_ends = _layout(system_blocks)
    full = bisect_right(body_ends, len(body))
    hashes += _chain(body, slices[:full], seed)
    rest = memoryview(body)[body_ends[full - 1] if full else 0 :]
    fingerprint = xxh3_64_intdigest(rest, hashes[-1] if hashes else seed)
    ends += tuple(map(len(head).__add__, body_ends[:full])) if head else body_ends[:full]
    return PromptBlocks(tuple(hashes), ends, len(head) + len(body), system_blocks, fingerprint)


def _chain(stream: bytes | memoryview, slices: Sequence[slice], digest: int) -> list[int]:
    view = memoryview(stream)
    return [digest := xxh3_64_intdigest(view[block], digest) for block in slices]


@lru_cache(maxsize=64)
def _layout(first: int) -> tuple[tuple[slice, ...], tuple[int, ...]]:
    """Where the blocks from number `first` lie, counted from the start of that one: slices, and ends."""
    ends = tuple(accumulate(_SIZES[first:]))
    return tuple(map(slice, (0, *ends), ends)), ends


def _chat(prompt: Prompt) -> tuple[bytes, bytes]:
    head, body = _tools(prompt.tools), list[_Piece]()
    _converse(head, body, prompt.messages)
    return _SEPARATOR.join(head), _SEPARATOR.join(body)


def _response(prompt: Prompt) -> tuple[bytes, bytes]:
    """As a chat, which is what engines make of it: the instructions are its first system message."""
    head, body = _tools(prompt.tools), list[_Piece]()
    if not _is_empty(prompt.instructions):
        head += (_SYSTEM, prompt.instructions)
    if prompt.previous_response_id is None:
        _converse(head, body, prompt.input)
    else:
        body += (_PREVIOUS, prompt.previous_response_id.encode())
        _converse(body, body, prompt.input)
    return _SEPARATOR.join(head), _SEPARATOR.join(body)


def _completion(prompt: Raw) -> bytes | memoryview:
    """A text, several in a row, or token ids; without the last quote or bracket, which growth moves."""
    if _is_null(prompt):
        return b""
    view = memoryview(prompt)
    return view[:-1] if view[0] == _QUOTE else memoryview(_minified(prompt))[1:-1]


def _tools(tools: Raw) -> list[_Piece]:
    if tools is NULL:
        return []
    minified = _minified(tools)
    return [] if _is_empty(minified) else [minified]


def _converse(head: list[_Piece], body: list[_Piece], messages: list[Message] | Raw) -> None:
    """Add the leading system messages to `head`, and the others to `body`."""
    if not isinstance(messages, list):
        messages = [] if _is_null(messages) else _messages(messages)
    pieces, parts_left = head, _MAX_PARTS
    for message in messages:
        if pieces is head and bytes(message.role) not in _SYSTEM_ROLES:
            pieces = body
        content: _Piece = message.content
        if memoryview(content)[0] == _BRACKET:
            parts = _parts(message.content, parts_left)
            parts_left -= len(parts)
            content = _PART_SEPARATOR.join(parts)
        pieces += (message.role, content)
        if message.tool_calls is not NULL and not _is_empty(message.tool_calls):
            pieces += (_TOOL_CALLS, _minified(message.tool_calls))
        if message.tool_call_id is not NULL:
            pieces += (_TOOL_CALL_ID, message.tool_call_id)


def _messages(value: Raw) -> list[Message]:
    """Chat messages, or what a response has as input. Other shapes, as they stand, take a role's place."""
    if memoryview(value)[0] == _QUOTE:
        return [Message(role=_USER, content=value)]
    messages: list[Message] | None = None
    if _may_be_listed(value):
        try:
            messages = _MESSAGES.decode(value)
        except _UNREADABLE:
            messages = _items(value)
    if messages is None or len(messages) > MAX_MESSAGES:
        return [Message(role=Raw(_minified(value)))]
    return messages


def _items(value: Raw) -> list[Message] | None:
    """Messages, and between them objects without a role, such as function calls and their outputs.

    A very long list is taken as it stands.
    """
    if len(value) > _LARGE_BYTES:
        return None
    try:
        items, raws = _ITEMS.decode(value), _RAWS.decode(value)
    except _UNREADABLE:
        return None
    return [
        Message(item.role, item.content, item.tool_calls, item.tool_call_id)
        if item.role is not NULL
        else Message(role=Raw(_canonical(raw)))
        for item, raw in zip(items, raws, strict=True)
    ]


def _parts(content: Raw, most: int) -> list[_Piece]:
    """The parts of a content: text as it stands; of an image, audio or file a hash, as long as an image."""
    parts: list[_Part] | None = None
    if most > 0 and _may_be_listed(content):
        with suppress(*_UNREADABLE):
            parts = _PARTS.decode(content)
    if parts is None or len(parts) > most:
        return [_minified(content)]
    if all(part.text is not NULL for part in parts):
        return [part.text for part in parts]
    return [
        part.text if part.text is not NULL else _other_part(part, raw)
        for part, raw in zip(parts, _RAWS.decode(content), strict=True)
    ]


def _other_part(part: "_Part", raw: Raw) -> bytes:
    data = _canonical(raw)
    if all(getattr(part, name) is NULL for name in _MEDIA):
        return data
    return xxh3_64_intdigest(data).to_bytes(8, "big") * (IMAGE_BYTES // 8)


def _canonical(value: Raw) -> bytes:
    """JSON that is the same in whatever order the keys stood, at any depth, if it is not too large a tree."""
    text = bytes(value)
    if sum(map(text.count, (b"{", b"[", b","))) <= _MAX_SORTED:
        with suppress(*_UNREADABLE):
            return msgspec.json.encode(msgspec.json.decode(text), order="sorted")
    return _minified(text)


def _minified(value: _Piece) -> bytes:
    """JSON without white space between its members; these keep their order, in which engines print them."""
    try:
        return msgspec.json.format(value, indent=-1)
    except _UNREADABLE:
        return bytes(value)


def _may_be_listed(value: Raw) -> bool:
    """Whether a list cannot hold so many objects that making them takes long."""
    return len(value) <= _LARGE_BYTES or bytes(value).count(b"{") <= _MAX_OBJECTS


def _is_null(value: _Piece) -> bool:
    return len(value) == 4 and bytes(value) == b"null"


def _is_empty(value: _Piece) -> bool:
    return len(value) <= 4 and bytes(value) in _EMPTY
