"""What vLLM publishes of its KV cache, as recorded, in both layouts, and as no engine should send it."""

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_support import BLOCK_TOKENS, CLEARED, DATA, as_row, frames, recorded, removed, stored

from extproc.engines.kvevents import MAX_MESSAGE_BYTES, Message, read_message
from extproc.routing.tokenblocks import CacheEvent, Cleared, Removed, Stored

TOKENS = list(range(BLOCK_TOKENS))


def read(*events: object) -> tuple[CacheEvent, ...]:
    message = read_message(*frames(0, *events))
    assert message is not None
    return message.events


def test_recorded_frames_are_read_byte_by_byte() -> None:
    lines = (DATA / "vllm-0.32-kv-event-frames.txt").read_text().splitlines()
    messages = [read_message(*map(bytes.fromhex, line.split()[1:])) for line in lines]
    assert [message.number for message in messages if message] == [0, 1, 2, 3, 4]
    [first] = messages[0].events if messages[0] else ()
    assert isinstance(first, Stored)
    assert (len(first.hashes), first.parent, len(first.tokens), first.block_tokens) == (6, None, 192, 32)
    [salted] = messages[4].events if messages[4] else ()
    assert isinstance(salted, Stored)
    assert salted.extras is not None
    assert list(map(msgspec.msgpack.decode, salted.extras)) == [["tenantA"], None, None, None, None, None]


@pytest.mark.parametrize("layout", [dict, as_row], ids=["maps", "arrays"])
def test_recorded_messages_are_read_in_both_layouts(layout: Any) -> None:
    kinds = {"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}
    for line in recorded():
        at_s, events, _ = line["batch"]
        message = read_message(*frames(line["number"], *map(layout, events), at_s=at_s))
        assert message is not None
        assert (message.number, message.at_s) == (line["number"], at_s)
        assert [type(event) for event in message.events] == [kinds[event["type"]] for event in events]


def test_an_old_release_says_less() -> None:
    row = ["BlockStored", [7], None, TOKENS, BLOCK_TOKENS, None]
    assert read(row) == (Stored([7], None, array("I", TOKENS), BLOCK_TOKENS),)


def test_hashes_may_be_bytes() -> None:
    name = b"\x01" * 32
    assert read({"type": "BlockRemoved", "block_hashes": [name]}) == (Removed([name]),)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMigrated", "block_hashes": [1]},
        ["BlockMigrated", 1],
        stored([1], TOKENS, medium="CPU"),
        removed(1, medium="CPU"),
        stored([1], TOKENS, kv_cache_spec_kind="sliding_window"),
    ],
    ids=["type", "row of another type", "other memory", "gone from other memory", "a window of the tokens"],
)
def test_what_does_not_matter_is_passed_over(event: object) -> None:
    assert read(event, CLEARED) == (Cleared(),)


def test_blocks_of_an_adapter_depend_on_its_name_in_any_layout() -> None:
    told = read(stored([1], TOKENS, lora_name="ad1", extra_keys=[["ad1"]]))
    assert read(stored([1], TOKENS, lora_name="ad1")) == told


@pytest.mark.parametrize(
    ("number", "payload"),
    [
        (b"", frames(0, CLEARED)[1]),
        frames(2**63, CLEARED),
        (bytes(8), b""),
        (bytes(8), b"\xc1"),
        (bytes(8), msgspec.msgpack.encode({"ts": 1.0})),
        (bytes(8), msgspec.msgpack.encode([float("nan"), []])),
        (bytes(8), b"\x93" * 100_000),
        (bytes(8), bytes(MAX_MESSAGE_BYTES + 1)),
        frames(0, stored([1, 2], TOKENS)),
        frames(0, stored([1], [-1] * BLOCK_TOKENS)),
        frames(0, stored([1], TOKENS, block_size=0)),
        frames(0, stored([1], TOKENS, extra_keys=[])),
        frames(0, {"type": "BlockRemoved"}),
        frames(0, 7),
        frames(0, []),
    ],
)
def test_what_cannot_be_true_cannot_be_read(number: bytes, payload: bytes) -> None:
    message = read_message(number, payload)
    assert message is None or not message.events


@given(number=st.binary(max_size=9), payload=st.binary(max_size=200))
def test_no_bytes_raise(number: bytes, payload: bytes) -> None:
    read_message(number, payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys", "group_idx", "medium"]
TYPES = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
EVENTS = st.builds(
    lambda kind, members: {"type": kind, **members}, TYPES, st.dictionaries(st.sampled_from(NAMES), JSON)
) | st.builds(lambda kind, row: [kind, *row], TYPES, st.lists(JSON, max_size=9))


@given(events=st.lists(EVENTS | JSON, max_size=4))
def test_no_events_raise(events: list[Any]) -> None:
    assert isinstance(read_message(*frames(0, *events)), Message | None)


@given(at=st.integers(0, 500), byte=st.integers(0, 255))
def test_no_damage_to_a_recorded_message_raises(at: int, byte: int) -> None:
    number, payload = frames(0, *recorded()[0]["batch"][1])
    damaged = bytearray(payload)
    damaged[at % len(damaged)] = byte
    read_message(number, bytes(damaged))
