"""Prompts in shapes that no engine takes, or that are too long to look at each part."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_prompts import TEXTS, Json, assert_sound, blocks_of, chat, response, said, shared

from extproc.openai.request import Api
from extproc.routing.blocks import BLOCK_BYTES, IMAGE_BYTES

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


class TestOddShapes:
    @settings(deadline=None)
    @given(ANY_JSON, ANY_JSON, st.sampled_from(list(Api)))
    def test_never_raise(self, one: Json, other: Json, api: Api) -> None:
        members = {"messages": one, "tools": other, "input": one, "instructions": other, "prompt": one}
        assert_sound(blocks_of(json.dumps({"model": "m", "cache_salt": other, **members}), api))

    @settings(deadline=None)
    @given(ANY_JSON)
    def test_never_raise_inside_messages(self, value: Json) -> None:
        for message in (value, {"role": value, "content": value, "tool_calls": value}, said("user", [value])):
            assert_sound(chat(message))
            assert_sound(response(input=[message]))

    @pytest.mark.parametrize(
        "messages", [["x" * 600], [["x" * 600]], {"x": "x" * 600}, [{"content": "x" * 600}]]
    )
    def test_are_hashed_as_they_stand(self, messages: Json) -> None:
        one = blocks_of(json.dumps({"model": "m", "messages": messages}))
        other = blocks_of(json.dumps({"model": "m", "messages": messages}).replace("xx", "xy"))
        assert len(one.hashes) == 1
        assert shared(one, other) == 0

    @pytest.mark.parametrize(
        "value", ["1e999", "1" * 400, "[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300]
    )
    def test_may_be_numbers_out_of_range_or_deeply_nested(self, value: str) -> None:
        for shape in (
            '{"role": "user", "content": [{"file": VALUE}]}',
            '{"role": "user", "tool_calls": VALUE}',
            "VALUE",
        ):
            for messages in (f"[{shape}]", shape):
                body = f'{{"model": "m", "messages": {messages}, "tools": VALUE}}'
                assert_sound(blocks_of(body.replace("VALUE", value)))

    @pytest.mark.parametrize("item", ["{}", "[]", "0", '{"role":""}', '{"role":"","content":[{"file":0}]}'])
    def test_may_be_long_lists(self, item: str) -> None:
        items = ",".join([item] * 100_000)
        for messages in (f"[{items}]", f'[{{"role": "user", "content": [{items}]}}]'):
            assert_sound(blocks_of(f'{{"model": "m", "messages": {messages}}}'))


class TestLists:
    """What Python would take long over is hashed as it stands."""

    def test_of_messages_may_be_too_long(self) -> None:
        blocks = chat(said("system", "s"), *[said("user", "x")] * 5_000)
        assert (blocks.system_blocks, blocks.ends_bytes[0]) == (0, BLOCK_BYTES)

    def test_of_parts_may_be_too_long(self) -> None:
        files = [{"type": "file", "file": {"file_id": "f"}}] * 2_000
        assert chat(said("user", files)).total_bytes < 100_000
        assert chat(*[said("user", files[:400])] * 5).total_bytes < 2 * 400 * IMAGE_BYTES + 200_000

    def test_of_objects_may_be_too_long(self) -> None:
        tools = [said("tool", "x" * 16)] * 4_000
        assert chat(said("system", "s"), *tools).system_blocks == 1
        assert chat(said("system", "s"), *tools, said("user", "{" * 200_000)).system_blocks == 0
