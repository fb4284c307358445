"""The toy tokenizer and chat template."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.simulator import tokens
from extproc.simulator.tokens import Message, SimulatedText, encode_chat

text = st.text(alphabet=st.characters(exclude_categories=["Cs"]))


@given(text)
def test_what_is_encoded_can_be_decoded(original: str) -> None:
    ids = tokens.to_ids(tokens.encode(original))
    assert tokens.decode(tokens.from_ids(ids)) == original


@given(text)
def test_a_token_is_about_four_bytes(original: str) -> None:
    size = len(original.encode())
    assert tokens.count(tokens.encode(original)) == max(1, -(-size // 4))


def test_even_nothing_is_a_token() -> None:
    assert tokens.count(tokens.encode("")) == 1


@pytest.mark.parametrize("ids", [[-1], [2**32], [10**30]])
def test_ids_out_of_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be from 0 to 4294967295"):
        tokens.from_ids(ids)


@given(st.lists(text, min_size=1, max_size=5), text)
def test_a_conversation_that_goes_on_begins_with_what_was_said(said: list[str], more: str) -> None:
    turns = [Message(role="user", content=content) for content in said]
    before = encode_chat(turns, add_generation_prompt=False)
    after = encode_chat([*turns, Message(role="user", content=more)])
    assert after.startswith(before)


def test_the_answer_given_back_as_history_is_the_answer_as_generated() -> None:
    question, answer = Message(role="user", content="What?"), SimulatedText("a").first(20)
    generated = encode_chat([question]) + answer.encode()
    assert encode_chat([question, Message(role="assistant", content=answer)]).startswith(generated)


def test_text_in_parts_is_the_same_prompt_as_its_text() -> None:
    parts = [{"type": "text", "text": "look at this"}]
    whole = encode_chat([Message(role="user", content="look at this")])
    assert encode_chat([Message(role="user", content=parts)]) == whole


def test_an_image_is_a_thousand_tokens_that_depend_on_its_bytes() -> None:
    def picture(url: str) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url}}
        return encode_chat([Message(role="user", content=[part])])

    without = tokens.count(encode_chat([Message(role="user", content=[])]))
    assert tokens.count(picture("data:a")) == without + 1000
    assert picture("data:a") != picture("data:b")


@pytest.mark.parametrize("tools", [b"", b"null", b"[]"])
def test_no_tools_are_no_tokens(tools: bytes) -> None:
    assert encode_chat([], tools) == encode_chat([])


def test_tools_come_first() -> None:
    tools = msgspec.json.encode([{"type": "function"}])
    assert encode_chat([], tools).startswith(tokens.encode('<|tools|>[{"type":"function"}]'))


def test_the_simulated_text_says_what_it_is_and_whose() -> None:
    said = SimulatedText("node-a100-01").first(16)
    assert said.startswith("Simulated by node-a100-01: no language model wrote this.")


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), min_size=1), st.integers(0, 300))
def test_the_simulated_text_is_its_tokens_in_a_row(name: str, count: int) -> None:
    said = SimulatedText(name)
    assert said.first(count) == "".join(said.token(index) for index in range(count))
    assert tokens.count(said.first(count).encode()) == count
