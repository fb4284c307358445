"""A toy tokenizer: four UTF-8 bytes a token. It needs no vocabulary, and what it encodes it can decode."""

import struct
from collections.abc import Iterable
from typing import Any

import msgspec
from xxhash import xxh3_128_hexdigest

from extproc.simulator.blocks import TOKEN_BYTES

# Fills the last token of a text. UTF-8 has no such byte, so decoding can tell it from the text.
_FILL = b"\xff"
_IMAGE_TOKENS = 1000
_NO_TOOLS = (b"", b"null", b"[]")


def encode(text: str) -> bytes:
    """The tokens of a text, 4 bytes each, at least one."""
    data = text.encode("utf-8", "replace") or _FILL
    return data + _FILL * (-len(data) % TOKEN_BYTES)


def decode(tokens: bytes) -> str:
    """The text of tokens."""
    return tokens.replace(_FILL, b"").decode("utf-8", "replace")


def count(tokens: bytes) -> int:
    """How many tokens these are."""
    return len(tokens) // TOKEN_BYTES


def to_ids(tokens: bytes) -> list[int]:
    """Tokens as ids."""
    return list(struct.unpack(f"<{count(tokens)}I", tokens))


def from_ids(ids: list[int]) -> bytes:
    """Tokens from ids. Raises ValueError for an id out of the vocabulary (0 to 2^32 - 1)."""
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        raise ValueError("token ids must be from 0 to 4294967295") from None


class Message(msgspec.Struct, kw_only=True):
    """One chat message, as far as the prompt depends on it."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")
    tool_call_id: str | None = None


def encode_chat(messages: Iterable[Message], tools: bytes = b"", add_generation_prompt: bool = True) -> bytes:
    """The tokens of a conversation, under a chat template of its own."""
    parts = []
    if tools not in _NO_TOOLS:
        parts.append(encode("<|tools|>" + tools.decode("utf-8", "replace")))
    for message in messages:
        parts.append(encode(f"<|{message.role}|>"))
        parts.append(_encode_content(message.content))
        if message.tool_calls or message.tool_call_id:
            calls = bytes(message.tool_calls).decode("utf-8", "replace")
            parts.append(encode(f"<|call|>{calls}{message.tool_call_id or ''}"))
    if add_generation_prompt:
        parts.append(encode("<|assistant|>"))
    return b"".join(parts)


def _encode_content(content: str | list[dict[str, Any]] | None) -> bytes:
    if content is None:
        return b""
    if isinstance(content, str):
        return encode(content)
    return b"".join(_encode_part(part) for part in content)


def _encode_part(part: dict[str, Any]) -> bytes:
    text = part.get("text")
    if isinstance(text, str):
        return encode(text)
    # An image, say: one hash of it, as long as a picture usually is.
    digest = xxh3_128_hexdigest(msgspec.json.encode(part)).encode()
    return (digest * (_IMAGE_TOKENS * TOKEN_BYTES // len(digest)))[: _IMAGE_TOKENS * TOKEN_BYTES]


class SimulatedText:
    """What a simulated engine says, token by token: that it is one, over and over."""

    def __init__(self, name: str) -> None:
        sentence = f"Simulated by {name}: no language model wrote this. "
        sentence += " " * (-len(sentence) % TOKEN_BYTES)
        self._sentence = sentence
        self._tokens = len(sentence) // TOKEN_BYTES

    def token(self, index: int) -> str:
        """The text of the output's token `index`."""
        start = index % self._tokens * TOKEN_BYTES
        return self._sentence[start : start + TOKEN_BYTES]

    def first(self, tokens: int) -> str:
        """The output's first `tokens` tokens."""
        return (self._sentence * (tokens // self._tokens + 1))[: tokens * TOKEN_BYTES]
