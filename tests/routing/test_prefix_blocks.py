"""The canonical stream of a prompt, and how it is cut into blocks."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_prompts import (
    CONVERSATIONS,
    SECRET,
    TEXTS,
    TOOL_CALLS,
    Json,
    assert_sound,
    blocks_of,
    chat,
    completion,
    response,
    said,
    shared,
    sizes,
)

from extproc.openai.request import Api
from extproc.routing.blocks import BLOCK_BYTES, IMAGE_BYTES, MAX_BLOCKS, unit_blocks


def as_printed(message: Json) -> Json:
    """What tells a message from another: of calls, which engines print, the order of their keys too."""
    return {key: json.dumps(value) if key == "tool_calls" else value for key, value in clean(message).items()}


class TestBlocks:
    def test_are_512_bytes_and_double_every_32_after_the_64th(self) -> None:
        blocks = completion("x" * 3_000_000)
        assert_sound(blocks)
        assert sizes(blocks)[:64] == [BLOCK_BYTES] * 64
        assert sizes(blocks)[64:] == [BLOCK_BYTES << 1 + i // 32 for i in range(192)]
        assert blocks.ends_bytes[-1] == 2 << 20
        assert blocks.total_bytes > 3_000_000

    def test_leave_out_the_bytes_at_the_end_that_fill_none(self) -> None:
        assert completion("x" * 100).hashes == ()
        assert completion("x" * (BLOCK_BYTES - 1)).ends_bytes == (BLOCK_BYTES,)  # with its opening quote
        assert completion("x" * (2 * BLOCK_BYTES - 2)).ends_bytes == (BLOCK_BYTES,)

    @settings(deadline=None)
    @given(st.integers(0, 6_000), st.data())
    def test_change_from_the_one_with_a_changed_byte_on(self, length: int, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, length))
        text = "x" * length
        one, other = completion(text + "x"), completion(text[:place] + "y" + text[place:])
        assert one.ends_bytes == other.ends_bytes
        assert shared(one, other) == (place + 1) // BLOCK_BYTES

    @pytest.mark.parametrize("place", [0, 32_000, 40_000, 100_000, 1_000_000, 2_000_000])
    def test_change_so_among_the_larger_ones_too(self, place: int) -> None:
        text = "x" * 2_100_000
        one, other = completion(text), completion(text[:place] + "y" + text[place + 1 :])
        before = sum(end <= place + 1 for end in one.ends_bytes)
        assert shared(one, other) == before < MAX_BLOCKS

    def test_differ_between_models_salts_and_secrets(self) -> None:
        message = said("user", "x" * 1_000)
        variants = [
            chat(message),
            chat(message, model="n"),
            chat(message, cache_salt="s"),
            chat(message, cache_salt="t"),
            chat(message, model="m\0", cache_salt="s"),
            blocks_of(json.dumps({"model": "m", "messages": [message]}), secret=SECRET + 1),
        ]
        assert len({variant.hashes[0] for variant in variants}) == len(variants)
        assert chat(message, cache_salt=None) == chat(message, cache_salt="") == chat(message)

    def test_do_not_depend_on_what_changes_no_prompt(self) -> None:
        message = said("user", "x" * 1_000)
        assert chat(message) == chat(message, temperature=0.5, stream=True, tools=[], n=3)
        assert chat(message) == chat(message, tools=None, **{"x-inferact": {"kv_prefix_hint": "h"}})

    @pytest.mark.parametrize("api", [Api.EMBEDDINGS, Api.RERANK, Api.SCORE, Api.TOKENIZE, Api.DETOKENIZE])
    def test_are_none_where_no_cache_stays_behind(self, api: Api) -> None:
        body = json.dumps({"model": "m", "input": "x" * 5_000, "query": "q", "prompt": "y" * 5_000})
        blocks = blocks_of(body, api)
        assert (blocks.hashes, blocks.ends_bytes, blocks.system_blocks) == ((), (), 0)
        assert blocks.total_bytes == len('""') + 5_000

    def test_count_the_whole_body_where_the_prompt_has_another_shape(self) -> None:
        body = '{"model": "m", "query": "q", "documents": ["d", "e"]}'
        assert blocks_of(body, Api.RERANK).total_bytes == len(body)


class TestTheSystemPrompt:
    SYSTEM = said("system", "You are a helpful assistant.")

    def test_ends_with_a_block_however_short_it_is(self) -> None:
        blocks = chat(self.SYSTEM, said("user", "hi"))
        assert (len(blocks.hashes), blocks.system_blocks) == (1, 1)
        assert blocks.ends_bytes[0] < BLOCK_BYTES

    @settings(deadline=None)
    @given(st.integers(0, 3_000), TEXTS, TEXTS)
    def test_is_all_that_its_users_share(self, length: int, one: str, other: str) -> None:
        system = said("system", "s" * length)
        first = chat(system, said("user", "1" + one))
        second = chat(system, said("user", "2" + other))
        assert shared(first, second) == first.system_blocks == second.system_blocks >= 1

    def test_begins_with_the_tools_and_takes_in_developer_messages(self) -> None:
        tools = [{"type": "function", "function": {"name": "f" * 600}}]
        user, developer = said("user", "x" * 900), said("developer", "d" * 200)
        plain = chat(self.SYSTEM, developer, user, tools=tools)
        assert plain.system_blocks == 2
        assert shared(plain, chat(self.SYSTEM, developer, said("user", "y" * 900), tools=tools)) == 2
        assert shared(plain, chat(self.SYSTEM, said("developer", "D" * 200), user, tools=tools)) == 1
        assert shared(plain, chat(self.SYSTEM, developer, user)) == 0

    def test_may_be_tools_alone(self) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert chat(said("user", "x" * 600), tools=tools).system_blocks == 1

    def test_does_not_take_in_a_system_message_after_others(self) -> None:
        assert chat(said("user", "x" * 600), self.SYSTEM).system_blocks == 0

    def test_may_be_all_there_is(self) -> None:
        blocks = chat(said("system", "s" * 1_300))
        assert blocks.system_blocks == len(blocks.hashes) == 3
        assert blocks.ends_bytes[-1] == blocks.total_bytes

    def test_counts_among_the_blocks_that_become_larger(self) -> None:
        blocks = chat(self.SYSTEM, said("user", "x" * 3_000_000))
        assert_sound(blocks)
        assert len(blocks.hashes) == MAX_BLOCKS
        assert sizes(blocks)[62:66] == [512, 512, 1_024, 1_024]

    def test_may_be_longer_than_what_is_indexed(self) -> None:
        blocks = chat(said("system", "s" * 3_000_000), said("user", "hi"))
        assert_sound(blocks)
        assert blocks.system_blocks == len(blocks.hashes) == MAX_BLOCKS


class TestAConversation:
    @settings(deadline=None)
    @given(CONVERSATIONS, CONVERSATIONS)
    def test_that_grows_matches_its_past(self, past: list[Json], more: list[Json]) -> None:
        before, after = chat(*past, said("user", "u")), chat(*past, said("user", "u"), *more)
        assert_sound(before)
        assert_sound(after)
        assert after.hashes[: len(before.hashes)] == before.hashes
        assert after.system_blocks == before.system_blocks

    def test_that_grows_as_a_text_or_as_ids_matches_its_past_too(self) -> None:
        for length in range(500, 530):
            assert shared(completion("x" * length), completion("x" * length + "more" * 500)) == (length > 510)
        ids = list(range(1_000))
        assert shared(completion(ids), completion(ids + ids)) == len(completion(ids).hashes) == 7

    @settings(deadline=None)
    @given(CONVERSATIONS, TOOL_CALLS, st.randoms(use_true_random=False), st.sampled_from([None, 1, 4]))
    def test_has_the_same_blocks_however_its_structure_is_spelled(
        self, messages: list[Json], tools: list[Json], random: Any, indent: int | None
    ) -> None:
        # The order of keys within tools and calls counts: engines print them as they come.
        def shuffled(value: Json) -> Json:
            if isinstance(value, dict):
                keys = sorted(value)
                random.shuffle(keys)
                return {
                    key: value[key] if key in ("tool_calls", "tools") else shuffled(value[key])
                    for key in keys
                }
            return list(map(shuffled, value)) if isinstance(value, list) else value

        body = {"model": "m", "messages": messages, "tools": tools}
        spelled = json.dumps(shuffled(body), indent=indent, separators=(" ,", "\t: "))
        assert blocks_of(spelled) == blocks_of(json.dumps(body))

    @settings(deadline=None)
    @given(CONVERSATIONS, CONVERSATIONS)
    def test_has_other_blocks_than_another(self, one: list[Json], other: list[Json]) -> None:
        fill = said("user", "x" * BLOCK_BYTES)
        same = [as_printed(message) for message in one] == [as_printed(message) for message in other]
        assert (chat(*one, fill).hashes == chat(*other, fill).hashes) == same

    def test_does_not_take_one_message_for_two(self) -> None:
        fill = said("user", "x" * 600)
        two = chat(said("user", "a"), said("assistant", "b"), fill)
        assert shared(two, chat(said("user", "a", tool_calls="assistant", tool_call_id="b"), fill)) == 0
        parts = [{"type": "text", "text": text} for text in ("a", "assistant", "b")]
        assert shared(two, chat(said("user", parts), fill)) == 0

    @pytest.mark.parametrize("empty", [None, []])
    def test_does_not_tell_no_calls_from_none(self, empty: Json) -> None:
        fill = said("user", "x" * 600)
        assert chat(said("user", "a", tool_calls=empty), fill) == chat(said("user", "a"), fill)

    def test_counts_escapes_as_they_stand(self) -> None:
        plain = json.dumps({"model": "m", "messages": [said("user", "A" + "x" * 600)]})
        escaped = plain.replace("A", "\\u0041")
        assert blocks_of(escaped).total_bytes == blocks_of(plain).total_bytes + 5
        assert shared(blocks_of(escaped), blocks_of(plain)) == 0

    @pytest.mark.parametrize(
        "changed",
        [
            said("tool", "x", tool_call_id="2"),
            said("tool", "x"),
            said("assistant", "x", tool_call_id="1"),
            said("tool", "x", tool_calls="1"),
            said("tool", "x1"),
        ],
    )
    def test_depends_on_each_member_that_engines_render(self, changed: Json) -> None:
        fill = said("user", "x" * 600)
        assert shared(chat(said("tool", "x", tool_call_id="1"), fill), chat(changed, fill)) == 0


def clean(message: Json) -> Json:
    """A message without what no engine tells from absence, and with plain text instead of a single part."""
    kept = {key: value for key, value in message.items() if value not in (None, [])}
    content = message.get("content")
    if content == []:
        kept["content"] = []
    if isinstance(content, list) and len(content) == 1 and "text" in content[0]:
        kept["content"] = content[0]["text"]
    return kept


TEXT_PART = {"type": "text", "text": "x" * 600}


class TestParts:
    @staticmethod
    def image(url: str, **members: Json) -> Json:
        return {"type": "image_url", "image_url": {"url": url, **members}}

    def test_of_text_are_as_good_as_a_string(self) -> None:
        assert chat(said("user", [TEXT_PART])) == chat(said("user", "x" * 600))

    def test_are_kept_apart(self) -> None:
        parts = [{"type": "text", "text": text} for text in ("assistant", "b" * 600)]
        assert shared(chat(said("user", parts)), chat(said("user", "assistant" + "b" * 600))) == 0

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "image_url", "image_url": "data:image/png;base64," + "QUJD" * 9_000},
            {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
            {"type": "file", "file": {"file_id": "f-1"}},
            {"type": "input_file", "file_data": "QUJD" * 9_000},
        ],
        ids=lambda part: part["type"],
    )
    def test_that_are_media_count_as_an_image_whatever_their_size(self, part: Json) -> None:
        without = chat(said("user", [TEXT_PART]))
        blocks = chat(said("user", [TEXT_PART, part]))
        assert blocks.total_bytes == without.total_bytes + 1 + IMAGE_BYTES
        assert shared(blocks, chat(said("user", [TEXT_PART, {**part, "more": 1}]))) == 1

    def test_that_are_images_differ_by_their_bytes_and_not_by_their_spelling(self) -> None:
        one = chat(said("user", [self.image("data:QUJD", detail="low"), TEXT_PART]))
        assert shared(one, chat(said("user", [self.image("data:QUJE", detail="low"), TEXT_PART]))) == 0
        respelled = {"image_url": {"detail": "low", "url": "data:QUJD"}, "type": "image_url"}
        assert chat(said("user", [respelled, TEXT_PART])) == one

    def test_of_unknown_kinds_count_by_their_bytes(self) -> None:
        blocks = chat(said("user", [{"type": "thinking", "thinking": "t" * 900}]))
        assert 900 < blocks.total_bytes < 1_000


class TestACompletion:
    def test_of_one_text_in_a_list_is_as_good_as_the_text(self) -> None:
        assert completion(["x" * 2_000]).hashes == completion("x" * 2_000).hashes

    def test_has_all_texts_of_a_list_in_order(self) -> None:
        one = completion(["x" * 600, "y" * 600])
        assert shared(one, completion(["x" * 600, "z" * 600])) == 1
        assert shared(one, completion(["y" * 600, "x" * 600])) == 0

    def test_of_ids_does_not_depend_on_white_space(self) -> None:
        ids = list(range(1_000))
        spaced = json.dumps({"model": "m", "prompt": ids}, indent=2)
        assert blocks_of(spaced, Api.COMPLETIONS) == completion(ids)


class TestAResponse:
    def test_has_the_blocks_of_the_chat_that_engines_make_of_it(self) -> None:
        tools = [{"type": "function", "name": "f"}]
        as_chat = chat(said("system", "Be brief."), said("user", "x" * 2_000), tools=tools)
        assert response(tools=tools, instructions="Be brief.", input="x" * 2_000) == as_chat
        items = [said("user", [{"type": "input_text", "text": "x" * 2_000}])]
        assert response(tools=tools, instructions="Be brief.", input=items) == as_chat

    def test_takes_in_calls_and_their_outputs(self) -> None:
        call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "1", "output": "o" * 600}
        past = [said("user", "x" * 600), call]
        one = response(input=[*past, output])
        assert shared(response(input=past), one) == len(response(input=past).hashes)
        assert one == response(input=[*past, dict(reversed(output.items()))])
        assert shared(one, response(input=[*past, {**output, "output": "O" * 600}])) == 1

    def test_shares_its_instructions_whatever_response_it_follows(self) -> None:
        follows = [
            response(instructions="Be brief.", input="x" * 2_000, previous_response_id=name) for name in "ab"
        ]
        assert shared(*follows) == follows[0].system_blocks == 1
        assert shared(follows[0], response(instructions="Be brief.", input="x" * 2_000)) == 1
        late = response(
            instructions="Be brief.", input=[said("system", "x" * 2_000)], previous_response_id="a"
        )
        assert late.system_blocks == 1


class TestUnits:
    @settings(deadline=None)
    @given(
        st.lists(st.integers(0, 3), max_size=40),
        st.lists(st.integers(0, 3), max_size=40),
        st.sampled_from([64, 512, 2_048, 3_000]),
    )
    def test_give_prompts_the_blocks_whose_units_they_share(
        self, one: list[int], other: list[int], unit_bytes: int
    ) -> None:
        first, second = (unit_blocks(ids, unit_bytes, len(ids) * unit_bytes, SECRET) for ids in (one, other))
        assert_sound(first)
        alike = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        alike = min(len(one), len(other)) if alike is None else alike
        assert shared(first, second) == sum(end <= alike * unit_bytes for end in first.ends_bytes)

    def test_have_the_scheme_of_prompts(self) -> None:
        assert (
            unit_blocks(range(2_000), 2_048, 4_096_000, SECRET).ends_bytes
            == completion("x" * 4_000_000).ends_bytes
        )

    def test_may_be_more_than_the_prompt_fills(self) -> None:
        blocks = unit_blocks([7, 8], 2_048, 2_048 + 700, SECRET)
        assert (len(blocks.hashes), blocks.total_bytes, blocks.system_blocks) == (5, 2_748, 0)
        assert blocks.hashes == unit_blocks([7, 8, 9], 2_048, 6_144, SECRET).hashes[:5]

    def test_depend_on_their_size_and_the_secret(self) -> None:
        variants = [
            unit_blocks([1] * 8, 512, 4_096, SECRET),
            unit_blocks([1] * 8, 512, 4_096, SECRET + 1),
            unit_blocks([1] * 4, 1_024, 4_096, SECRET),
        ]
        assert len({variant.hashes[0] for variant in variants}) == 3
