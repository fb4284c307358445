"""The usage of answers: every engine's spelling, and nothing but sound numbers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.openai.usage import Usage, read_usage


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # vLLM with --enable-prompt-tokens-details
            b'{"prompt_tokens":423,"total_tokens":435,"completion_tokens":12,"prompt_tokens_details":'
            b'{"cached_tokens":384,"created_cache_tokens":32,"multimodal_tokens":null}}',
            Usage(423, 12, 384),
        ),
        (  # and without
            b'{"prompt_tokens":423,"completion_tokens":12,"prompt_tokens_details":null}',
            Usage(423, 12, None),
        ),
        (  # llama.cpp
            b'{"completion_tokens":12,"prompt_tokens":282,"prompt_tokens_details":{"cached_tokens":0}}',
            Usage(282, 12, 0),
        ),
        (  # the responses API
            b'{"input_tokens":14,"input_tokens_details":{"cached_tokens":8,"cached_tokens_per_turn":[]},'
            b'"output_tokens":5,"output_tokens_details":{"reasoning_tokens":0}}',
            Usage(14, 5, 8),
        ),
        (b'{"prompt_tokens":3,"total_tokens":3}', Usage(3, 0, None)),  # embeddings
        (b' \n{ "prompt_tokens" : 3 , "\xc3\xbc" : "\xe4\xbd\xa0" }', Usage(3, 0, None)),
    ],
)
def test_engines_spell_it_like_this(text: bytes, expected: Usage) -> None:
    assert read_usage(text) == expected


@pytest.mark.parametrize(
    "value", ["null", '"12"', "-1", "1.5", "1e3", "true", "[1]", "{}", "2147483649", "1e999"]
)
def test_a_senseless_number_is_missing(value: str) -> None:
    assert read_usage(b'{"prompt_tokens":%s}' % value.encode()) is None
    assert read_usage(b'{"prompt_tokens":5,"completion_tokens":%s}' % value.encode()) == Usage(5)
    details = b'{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":%s}}' % value.encode()
    assert read_usage(details) == Usage(5)
    assert read_usage(b'{"prompt_tokens":5,"prompt_tokens_details":%s}' % value.encode()) == Usage(5)


def test_no_more_can_be_cached_than_there_is() -> None:
    assert read_usage(b'{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":6}}') == Usage(5)
    assert read_usage(b'{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":5}}') == Usage(5, 0, 5)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b'{"a":' * 50_000, b"{}"])
def test_what_is_no_usage_is_none(text: bytes) -> None:
    assert read_usage(text) is None


NUMBERS = st.integers(-3, 9) | st.sampled_from([2**31, 2**70, -(2**70), 1.5, 1e300, None, True, "7", [], {}])
DETAILS = st.fixed_dictionaries({"cached_tokens": NUMBERS})
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": NUMBERS,
        "input_tokens": NUMBERS,
        "completion_tokens": NUMBERS,
        "prompt_tokens_details": NUMBERS | DETAILS,
    },
)


@given(st.binary(max_size=50) | MEMBERS.map(json.dumps).map(str.encode))
def test_anything_gives_sound_numbers_or_none(text: bytes) -> None:
    usage = read_usage(text)
    if usage is not None:
        assert usage.prompt_tokens >= (usage.cached_tokens or 0) >= 0
        assert usage.output_tokens >= 0
