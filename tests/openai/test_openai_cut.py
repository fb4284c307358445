import base64
import json
import os
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.openai.cut import MEMBERS, cut
from extproc.openai.members import members as members_of
from extproc.openai.request import Api, parse
from extproc.routing.blocks import prompt_blocks


def edited(body: bytes, model: str | None = None) -> bytes:
    """The body after a cut by the members it has."""
    return cut(body, members_of(body), model)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"x-inferact":{"priority":1},"model":"m"}', b'{"model":"m"}'),
        (b'{"model":"m","x-inferact":{"priority":1}}', b'{"model":"m"}'),
        (b'{"model":"m","x-inferact":{},"n":1}', b'{"model":"m","n":1}'),
        (b'{"x-inferact":null}', b"{}"),
        (b' { "x-inferact" : [ 1 , "}" ] } \n', b" {} \n"),
        (b'{\n  "model": "m",\n  "x-inferact": 1\n}\n', b'{\n  "model": "m"}\n'),
        (b'{\n  "x-inferact": 1,\n  "model": "m"\n}', b'{\n  "model": "m"\n}'),
        (b'{"x-inferact":1,"x-inferact":2,"model":"m","x-inferact":3}', b'{"model":"m"}'),
        (rb'{"\u0078-inferact":1,"model":"m","x\u002Dinferac\u0074":2}', b'{"model":"m"}'),
    ],
)
def test_a_member_goes_with_one_comma(body: bytes, expected: bytes) -> None:
    assert edited(body) == expected


@pytest.mark.parametrize("name", MEMBERS)
def test_each_name_is_cut(name: str) -> None:
    assert edited(b'{"model":"m","%s":{"a":[1,{}]},"n":1}' % name.encode()) == b'{"model":"m","n":1}'


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"model":"m"}',
        b'{"model":"x-inferact","metadata":{"x-inferact":1},"messages":["kv_transfer_params"]}',
        rb'{"model":"m","prompt":"\",\"x-inferact\":{\"priority\":1},\""}',
        rb'{"model":"m","prompt":"\u0078-inferact","\\u0078-inferact":1}',
        b'{"model":"m","X-Inferact":1,"x_inferact":2," x-inferact":3,"x-inferact ":4,"bootstrap":5}',
    ],
)
def test_a_body_with_nothing_to_cut_comes_back_as_the_same_object(body: bytes) -> None:
    assert edited(body) is body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"public"}', b'{"model":"engine \\"1\\" \xc3\xa9"}'),
        (b'{ "model" :\t"public" , "n":1.0}', b'{ "model" :\t"engine \\"1\\" \xc3\xa9" , "n":1.0}'),
        (
            rb'{"\u006dodel":"a","x-inferact":{"model":"b"},"tools":{"model":"c"},"model":["d"]}',
            rb'{"\u006dodel":"engine \"1\" '
            + "é".encode()
            + b'","tools":{"model":"c"},"model":"engine \\"1\\" \xc3\xa9"}',
        ),
        (b'{"prompt":"model"}', b'{"prompt":"model"}'),
    ],
)
def test_every_top_level_model_is_replaced(body: bytes, expected: bytes) -> None:
    assert edited(body, 'engine "1" é') == expected


def test_a_model_that_has_the_name_already_is_no_change() -> None:
    body = b'{"model": "same"}'
    assert edited(body, "same") is body


NAMES = [*MEMBERS, "model", "messages", "x_inferact", "", 'q"\\', "é😀", "\n"]
SPACE = st.text(" \t\r\n", max_size=3)
NUMBERS = st.sampled_from(["0", "-0", "1.0e+05", "1E400", "0.10", "123456789012345678901234567890"])


@dataclass(frozen=True)
class Item:
    """A member as written: everything between the separators around it."""

    name: str
    before: str
    value: str
    after: str


@st.composite
def spellings(draw: st.DrawFn, text: str) -> str:
    """A JSON string in which any character may be escaped, in either case of hexadecimal digits."""
    written = []
    for char in text:
        plain = json.dumps(char, ensure_ascii=False)[1:-1]
        escaped = json.dumps(char)[1:-1]
        if not escaped.startswith("\\u"):
            escaped = f"\\u{ord(char):04x}"
        written.append(draw(st.sampled_from([plain, escaped, escaped.upper().replace("\\U", "\\u")])))
    return f'"{"".join(written)}"'


STRINGS = (
    st.sampled_from([*NAMES, '","x-inferact":1,"', '{"model":', "]}", "\\"]) | st.text(max_size=5)
).filter(lambda text: all(not 0xD800 <= ord(char) <= 0xDFFF for char in text))


@st.composite
def values(draw: st.DrawFn, depth: int = 2) -> str:
    kinds = ["number", "literal", "string"] + (["array", "object"] if depth else [])
    match draw(st.sampled_from(kinds)):
        case "number":
            return draw(NUMBERS)
        case "literal":
            return draw(st.sampled_from(["true", "false", "null"]))
        case "string":
            return draw(spellings(draw(STRINGS)))
        case "array":
            inner = draw(st.lists(values(depth - 1), max_size=3))
            return f"[{','.join(draw(SPACE) + value + draw(SPACE) for value in inner) or draw(SPACE)}]"
        case _:
            items = draw(st.lists(members(depth - 1), max_size=3))
            return f"{{{','.join(written(item) for item in items) or draw(SPACE)}}}"


@st.composite
def members(draw: st.DrawFn, depth: int = 2) -> Item:
    name = draw(st.sampled_from(NAMES))
    key = draw(spellings(name))
    before = f"{draw(SPACE)}{key}{draw(SPACE)}:{draw(SPACE)}"
    return Item(name, before, draw(values(depth)), draw(SPACE))


def written(item: Item) -> str:
    return item.before + item.value + item.after


def as_object(items: list[Item], head: str, tail: str, blank: str) -> bytes:
    return f"{head}{{{','.join(written(item) for item in items) or blank}}}{tail}".encode()


def pairs(body: bytes) -> Any:
    """The body with objects as ordered lists of pairs and numbers as written."""
    return json.loads(body, object_pairs_hook=list, parse_float=str, parse_int=str)


@given(st.lists(members(), max_size=5), SPACE, SPACE)
def test_all_but_the_members_stays_byte_for_byte(items: list[Item], head: str, tail: str) -> None:
    body = as_object(items, head, tail, "")
    kept = [item for item in items if item.name not in MEMBERS]
    result = edited(body)
    assert result == as_object(kept, head, tail, "")
    assert pairs(result) == [pair for pair in pairs(body) if pair[0] not in MEMBERS]
    assert edited(result) is result
    assert (result is body) == (kept == items)


@given(st.lists(members(), max_size=5), STRINGS)
def test_all_but_the_models_stays_byte_for_byte(items: list[Item], model: str) -> None:
    quoted = json.dumps(model, ensure_ascii=False)
    renamed = [
        Item(item.name, item.before, quoted, item.after) if item.name == "model" else item
        for item in items
        if item.name not in MEMBERS
    ]
    result = edited(as_object(items, "", "", ""), model)
    assert pairs(result) == pairs(as_object(renamed, "", "", ""))
    if "\\u" not in quoted:  # control characters have more than one good spelling
        assert result == as_object(renamed, "", "", "")
    assert edited(result, model) is result


def test_a_large_image_counts_little_and_stays_as_it_is() -> None:
    image = base64.b64encode(os.urandom(15_000_000)).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    message = {"role": "user", "content": [url]}
    body = json.dumps({"model": "m", "x-inferact": {"priority": 9}, "messages": [message]}).encode()
    request = parse(Api.CHAT_COMPLETIONS, body)
    assert prompt_blocks(request, 0).total_bytes < 5_000
    assert cut(body, request.members) == body.replace(b'"x-inferact": {"priority": 9}, ', b"")
