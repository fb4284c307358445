"""What vLLM publishes of its KV cache: messages in, events out. Nothing that comes in raises.

Releases differ: events are maps with a `type`, or arrays that begin with it. Passed over are events of a type
that is not known, blocks outside of the accelerator's memory, and blocks of layers that see only a window of
the tokens: those go while the prefix is still cached.
"""

import math
from array import array
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Raw
from msgspec.msgpack import Decoder

from extproc.routing.tokenblocks import CacheEvent, Cleared, Removed, Stored

MAX_MESSAGE_BYTES: Final = 4 << 20
"""More is refused: a step that computes 64,000 tokens takes 0.4 MB."""
LAST: Final = b"\xff" * 8
"""The number that ends what the replay socket sends."""
_NUMBER_BYTES: Final = 8
_MAX_BLOCK_TOKENS: Final = 1 << 16
_ACCELERATOR: Final = (None, "GPU")
_WHOLE: Final = (None, "full_attention", "mla_attention", "sink_full_attention")

_Hash: TypeAlias = int | Annotated[bytes, Meta(max_length=64)]
_Token: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Group: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 16)]


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token]
    block_size: Annotated[int, Meta(ge=1, le=_MAX_BLOCK_TOKENS)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Raw] | None = None
    group_idx: _Group | None = None
    kv_cache_spec_kind: str | None = None

    def event(self) -> CacheEvent | None:
        if self.medium not in _ACCELERATOR or self.kv_cache_spec_kind not in _WHOLE:
            return None
        blocks = len(self.block_hashes)
        if len(self.token_ids) != blocks * self.block_size:
            raise msgspec.ValidationError("not as many tokens as blocks")
        extras = None if self.extra_keys is None else list(map(bytes, self.extra_keys))
        adapter = self.lora_id if self.lora_name is None else self.lora_name
        if extras is None and adapter is not None:
            extras = [msgspec.msgpack.encode([adapter])] * blocks
        if extras is not None and len(extras) != blocks:
            raise msgspec.ValidationError("not as many extra keys as blocks")
        tokens = array("I", self.token_ids)
        return Stored(
            self.block_hashes, self.parent_block_hash, tokens, self.block_size, extras, self.group_idx or 0
        )


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: _Group | None = None

    def event(self) -> CacheEvent | None:
        if self.medium not in _ACCELERATOR:
            return None
        return Removed(self.block_hashes, self.group_idx or 0)


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    def event(self) -> CacheEvent | None:
        return Cleared()


class _StoredRow(_Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedRow(_Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedRow(_Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Named(msgspec.Struct):
    type: str


class _Batch(msgspec.Struct, array_like=True):
    at_s: float
    events: list[Raw]


_BATCH: Final = Decoder(_Batch)
_MAP: Final = Decoder(_Stored | _Removed | _Cleared)
_ROW: Final = Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_TYPE_OF_MAP: Final = Decoder(_Named)
_ROW_OF_ANY: Final = Decoder(list[object])
_KNOWN: Final = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))
_UNREADABLE: Final = (msgspec.DecodeError, RecursionError)


@dataclass(slots=True, frozen=True)
class Message:
    """A batch of events with its number, which counts from 0; `at_s` by the engine's own clock."""

    number: int
    at_s: float
    events: tuple[CacheEvent, ...]


def read_number(frame: bytes) -> int | None:
    """A message's number; `None` where it is none. Engines count with a sign, and `LAST` is -1."""
    number = int.from_bytes(frame, "big", signed=True)
    return number if len(frame) == _NUMBER_BYTES and number >= 0 else None


def read_message(number: bytes, payload: bytes) -> Message | None:
    """The message of the two frames after the topic; `None` where they cannot be read."""
    place = read_number(number)
    if place is None or len(payload) > MAX_MESSAGE_BYTES:
        return None
    try:
        batch = _BATCH.decode(payload)
        events = tuple(event for raw in batch.events if (event := _event(raw)) is not None)
    except _UNREADABLE:
        return None
    return Message(place, batch.at_s, events) if math.isfinite(batch.at_s) else None


def _event(raw: Raw) -> CacheEvent | None:
    """What an event says; `None` where that does not matter. Raises `_UNREADABLE`."""
    is_row = memoryview(raw)[0] & 0xF0 == 0x90 or memoryview(raw)[0] in (0xDC, 0xDD)
    try:
        found: _Stored | _Removed | _Cleared = (_ROW if is_row else _MAP).decode(raw)
    except msgspec.ValidationError:
        if _type(raw, is_row) in _KNOWN:
            raise
        return None
    return found.event()


def _type(raw: Raw, is_row: bool) -> str:
    """What the event calls itself; empty where that is no name."""
    if not is_row:
        return _TYPE_OF_MAP.decode(raw).type
    row = _ROW_OF_ANY.decode(raw)
    return row[0] if row and isinstance(row[0], str) else ""
