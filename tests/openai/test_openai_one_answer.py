"""Requests for several answers: `usage` counts them all."""

import json
from typing import Any

import pytest

from extproc.openai.request import Api, parse

LONG = b" " * (1 << 18)
"""Makes a body one that is read member by member."""


@pytest.mark.parametrize(
    ("members", "one"),
    [
        ({}, True),
        ({"n": 1, "best_of": 1}, True),
        ({"n": None, "best_of": None}, True),
        ({"n": 2}, False),
        ({"n": 1, "best_of": 2}, False),
        ({"n": 2, "best_of": "2"}, False),
        ({"n": "2"}, True),
        ({"n": -2}, True),
        ({"n": [2]}, True),
        ({"prompt": "a"}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": ["a"] * 3}, False),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": [[1, 2, 3]]}, True),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": []}, True),
        ({"prompt": [[]]}, True),
        ({"prompt": {"a": ["b", "c"]}}, True),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("space", [b"", LONG])
def test_whether_one_answer_is_asked_for(
    members: dict[str, Any], one: bool, indent: int | None, space: bytes
) -> None:
    body = json.dumps({"model": "m", **members}, indent=indent).encode() + space
    assert parse(Api.COMPLETIONS, body).one_answer is one


def test_a_prompt_that_is_nested_without_end_is_one() -> None:
    body = b'{"model": "m", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert parse(Api.COMPLETIONS, body).one_answer
