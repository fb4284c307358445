import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.openai.cut import MEMBERS, cut
from extproc.openai.errors import ApiError, ErrorCode
from extproc.openai.members import MAX_MEMBERS, MAX_NAME_CHARS
from extproc.openai.members import members as members_of
from extproc.openai.request import Api, Hints, Prompt, RoutingRequest, parse
from extproc.routing.blocks import prompt_blocks

CHAT = Api.CHAT_COMPLETIONS


def read(api: Api = CHAT, /, **members: Any) -> RoutingRequest:
    return parse(api, json.dumps({"model": "m", **members}).encode())


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse(CHAT, body)
    return raised.value


def hint_refusal(hints: Any) -> ApiError:
    return refusal(json.dumps({"model": "m", "x-inferact": hints}).encode())


class TestApi:
    @pytest.mark.parametrize("api", list(Api))
    def test_is_known_by_its_path_whatever_the_query(self, api: Api) -> None:
        assert Api.from_path(api.value) is api
        assert Api.from_path(f"{api.value}?api-version=1&x=/v1/score") is api

    @pytest.mark.parametrize(
        "path",
        ["", "/", "/v1/chat", "/v1/chat/completions/", "/V1/chat/completions", "?/tokenize", "/v1/models"],
    )
    def test_is_none_for_other_paths(self, path: str) -> None:
        assert Api.from_path(path) is None


class TestRoutingRequest:
    def test_carries_what_a_chat_body_says(self) -> None:
        body = (
            b'{"model": "llama", "stream": true, "max_tokens": 77, "cache_salt": "s",'
            b' "messages": [ {"role":"user", "content":"h\\u0069"} ], "tools": [],'
            b' "x-inferact": {"node_affinity": "node-a100-01", "kv_prefix_hint": "sys_v3", "priority": 1}}'
        )
        request = parse(CHAT, body)
        assert request.api is Api.CHAT_COMPLETIONS
        assert (request.model, request.stream, request.max_tokens) == ("llama", True, 77)
        assert request.hints == Hints(node_affinity="node-a100-01", kv_prefix_hint="sys_v3", priority=1)
        assert isinstance(request.prompt.messages, list)
        said = [(bytes(message.role), bytes(message.content)) for message in request.prompt.messages]
        assert said == [(b'"user"', b'"h\\u0069"')]
        assert bytes(request.prompt.cache_salt) == b'"s"'

    def test_has_defaults_for_what_is_absent(self) -> None:
        request = read(Api.COMPLETIONS)
        assert (request.stream, request.max_tokens) == (False, None)
        assert request.hints == Hints(node_affinity=None, kv_prefix_hint=None, priority=5)
        assert request.prompt == Prompt()

    def test_takes_the_last_of_duplicate_members_as_engines_do(self) -> None:
        body = (
            b'{"model":1, "stream":true, "x-inferact":7, "x-inferact":null, "stream":false, "model":"last"}'
        )
        request = parse(CHAT, body)
        assert (request.model, request.stream, request.hints) == ("last", False, Hints())

    def test_lists_all_members_in_order_duplicates_too_where_some_must_go(self) -> None:
        assert parse(CHAT, b'{"b": 1, "model": "m"}').members == ()
        request = parse(CHAT, rb'{"b": 1, "model": "m", "b": [ ], "\u0061": "\u0061", "x-inferact": {}}')
        assert [(name, bytes(value)) for name, value in request.members] == [
            ("b", b"1"),
            ("model", b'"m"'),
            ("b", b"[ ]"),
            ("a", rb'"\u0061"'),
            ("x-inferact", b"{}"),
        ]

    def test_knows_names_spelled_with_escapes(self) -> None:
        body = rb'{"\u006dodel": "m\u00e9", "x\u002dinferact": {"pri\u006frity": 9}}'
        request = parse(CHAT, body)
        assert (request.model, request.hints.priority) == ("mé", 9)

    @pytest.mark.parametrize("stream", [False, None, 0, 1, "true", [], {}])
    def test_streams_only_when_stream_is_true(self, stream: object) -> None:
        assert read(stream=True).stream is True
        assert read(stream=stream).stream is False

    @pytest.mark.parametrize(
        ("limits", "max_tokens"),
        [
            ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
            ({"max_completion_tokens": None, "max_tokens": 9}, 9),
            ({"max_output_tokens": 3}, 3),
            ({"max_tokens": 0}, 0),
            ({"max_tokens": "9"}, None),
            ({"max_tokens": True}, None),
            ({"max_tokens": -1}, None),
            ({"max_tokens": 1.5}, None),
            ({"max_tokens": 10**400}, None),
            ({"max_tokens": {"a": 1}}, None),
        ],
    )
    def test_leaves_odd_output_limits_to_the_engine(self, limits: Any, max_tokens: int | None) -> None:
        assert read(**limits).max_tokens == max_tokens

    @pytest.mark.parametrize(
        "name", ["x-inferact", "kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_room"]
    )
    def test_says_whether_anything_must_be_cut(self, name: str) -> None:
        assert read(**{name: None}).needs_cut
        assert not read(metadata={name: None}, messages=name).needs_cut


class TestBody:
    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"", "empty"),
            (b" \n", "empty"),
            (b"hello", "invalid character (byte 0)"),
            (b'{"model": "m"', "truncated"),
            (b'{"model": "m"} {}', "trailing characters"),
            (b'{"model": "m",}', "trailing comma"),
            (b"{'model': 'm'}", "byte 1"),
            (b'{"model": "m", "seed": 01}', "invalid number"),
            (b'{"model": "m", "prompt": "a\nb"}', "invalid character"),
            (b'{"model": "m", "top_p": NaN}', "NaN and Infinity are not JSON numbers (byte 24)"),
            (b'{"model": "m", "top_p": Infinity}', "NaN and Infinity"),
            (b'{"model": "m", "top_p": -Infinity}', "NaN and Infinity"),
            (b'\xef\xbb\xbf{"model": "m"}', "byte order mark"),
            ('{"model": "m"}'.encode("utf-16"), "not UTF-8"),
            (b'{"model": "m", "prompt": "\xff"}', "not UTF-8"),
            (b'{"model": "m", "prompt": "' + b"x" * 70_000 + b'\xc3"}', "not UTF-8"),
            (b'{"model": "m", "prompt": "\xed\xa0\x80"}', "not UTF-8"),
            (rb'{"model": "m", "prompt": "\ud83d"}', "unpaired surrogate is escaped in a string (byte 26)"),
            (rb'{"model": "m", "prompt": "a\ude00 and much more text"}', "unpaired surrogate"),
            (rb'{"model": "m", "prompt": "\ud83d\u0041"}', "unpaired surrogate"),
            (rb'{"model": "m", "prompt": "\ud83d\n and more"}', "unpaired surrogate"),
            (rb'{"model": "m", "prompt": "\ud83d\ude00\ud83d"}', "in a string (byte 38)"),
            (rb'{"model": "m", "prompt": "\q\ud83d\ude00"}', "invalid escaped character (byte 27)"),
            (rb'{"model": "m", "prompt": "\ud83d\ude00" "\ud83d"}', "expected ',' or '}' (byte 40)"),
        ],
    )
    def test_that_is_not_json_is_refused_and_says_why(self, body: bytes, words: str) -> None:
        error = refusal(body)
        assert error.code is ErrorCode.INVALID_JSON
        assert words in error.message

    @pytest.mark.parametrize("body", [b"null", b"[]", b'"model"', b"1", b"true", b'[{"model": "m"}]'])
    def test_that_is_no_object_is_refused(self, body: bytes) -> None:
        assert refusal(body).code is ErrorCode.INVALID_REQUEST

    @pytest.mark.parametrize("opening", ['{"model":', '{"messages":', '{"x-inferact":', '{"a":{"b":', "["])
    @pytest.mark.parametrize("unit", ["[", '{"a":', '[{"a":'])
    def test_that_is_nested_ten_thousand_deep_is_refused(self, opening: str, unit: str) -> None:
        nested = unit * 10_000
        closing = "".join({"[": "]", "{": "}"}[c] for c in reversed(opening + nested) if c in "[{")
        error = refusal(f"{opening}{nested}1{closing}".encode())
        assert error.code in {ErrorCode.INVALID_JSON, ErrorCode.INVALID_REQUEST}

    @pytest.mark.parametrize(
        "name", ["model", "x-inferact", "messages", "stream", "max_tokens", "vllm_xargs"]
    )
    def test_nested_close_to_the_limit_is_read_or_refused_but_never_breaks(self, name: str) -> None:
        outcomes: set[ErrorCode | None] = set()
        for depth in range(600, 1_100):
            body = f'{{"model":"m","{name}":{"[" * depth}{"]" * depth},"z":{"[" * depth}{"]" * depth}}}'
            try:
                parse(CHAT, body.encode())
                outcomes.add(None)
            except ApiError as error:
                outcomes.add(error.code)
        assert ErrorCode.INVALID_JSON in outcomes

    def test_has_no_end_of_members_where_some_must_go(self) -> None:
        most = ",".join(f'"m{i}":0' for i in range(MAX_MEMBERS - 2)) + ',"x-inferact":{}'
        assert parse(CHAT, f'{{"model":"m",{most}}}'.encode()).model == "m"
        error = refusal(f'{{"model":"m",{most},"":0}}'.encode())
        assert error.code is ErrorCode.INVALID_REQUEST
        assert str(MAX_MEMBERS) in error.message

    def test_has_no_names_without_end_where_some_must_go(self) -> None:
        hints = {"x-inferact": {}}
        assert read(**{"é" * MAX_NAME_CHARS: 1}, **hints).model == "m"
        error = refusal(json.dumps({"model": "m", "é" * (MAX_NAME_CHARS + 1): 1, **hints}).encode())
        assert error.code is ErrorCode.INVALID_REQUEST
        assert str(MAX_NAME_CHARS) in error.message
        assert "é" not in error.message

    @pytest.mark.parametrize(
        "model", [b"", b'"model": "",', b'"model": null,', b'"model": 3,', b'"model": ["m"],']
    )
    def test_without_a_model_name_is_refused(self, model: bytes) -> None:
        error = refusal(b"{" + model + b'"prompt": "secret prompt"}')
        assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "model")
        assert "model" in error.message
        assert "secret" not in error.message

    def test_may_name_a_model_of_up_to_512_characters(self) -> None:
        assert read(model="模" * 512).model == "模" * 512
        assert read(model="😀" * 512).model == "😀" * 512, "escaped it takes twelve bytes a character"
        assert refusal(json.dumps({"model": "模" * 513}).encode()).param == "model"


class TestHints:
    @pytest.mark.parametrize(
        "hints", [None, {}, {"priority": None, "node_affinity": None, "kv_prefix_hint": None}]
    )
    def test_that_are_null_are_absent(self, hints: object) -> None:
        assert read(**{"x-inferact": hints}).hints == Hints()

    @pytest.mark.parametrize("priority", [0, 5, 10])
    def test_take_priorities_from_0_to_10(self, priority: int) -> None:
        assert read(**{"x-inferact": {"priority": priority}}).hints.priority == priority

    @pytest.mark.parametrize("affinity", ["n", "A.b_c-9", "n" * 64])
    def test_take_node_ids(self, affinity: str) -> None:
        assert read(**{"x-inferact": {"node_affinity": affinity}}).hints.node_affinity == affinity

    @pytest.mark.parametrize("hint", ["s", "系统 v3", "😀" * 256])
    def test_take_prefix_names(self, hint: str) -> None:
        assert read(**{"x-inferact": {"kv_prefix_hint": hint}}).hints.kv_prefix_hint == hint

    @pytest.mark.parametrize("value", [-1, 11, 10**30, 5.0, 2.5, True, False, "5", [], {}])
    def test_refuse_other_priorities(self, value: object) -> None:
        error = hint_refusal({"priority": value})
        assert (error.code, error.param) == (ErrorCode.INVALID_HINT, "x-inferact.priority")
        assert "`x-inferact.priority` must be an integer from 0 (low) to 10 (high)" in error.message

    @pytest.mark.parametrize("value", ["", "n" * 65, "a b", "a/b", "a\n", "nöde", 3, True, ["n"]])
    def test_refuse_other_node_ids(self, value: object) -> None:
        error = hint_refusal({"node_affinity": value})
        assert (error.code, error.param) == (ErrorCode.INVALID_HINT, "x-inferact.node_affinity")
        assert "1-64" in error.message

    @pytest.mark.parametrize("value", ["", "s" * 257, 3, False, {"a": 1}])
    def test_refuse_other_prefix_names(self, value: object) -> None:
        error = hint_refusal({"kv_prefix_hint": value})
        assert (error.code, error.param) == (ErrorCode.INVALID_HINT, "x-inferact.kv_prefix_hint")
        assert "1-256" in error.message

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [("prioritiy", "priority"), ("nodeAffinity", "node_affinity"), ("prefix_hint", "kv_prefix_hint")],
    )
    def test_that_are_unknown_are_refused_with_the_nearest_known_one(self, name: str, nearest: str) -> None:
        error = hint_refusal({name: 1})
        assert (error.code, error.param) == (ErrorCode.INVALID_HINT, f"x-inferact.{name}")
        assert f"did you mean `{nearest}`" in error.message

    def test_that_are_unknown_are_named_short_and_without_control_characters(self) -> None:
        error = hint_refusal({"\x1b\n" + "z" * 3_000: 1})
        assert error.message.isprintable()
        assert len(error.message) < 400

    @pytest.mark.parametrize("hints", [[], "", 0, False, "priority", [{"priority": 1}]])
    def test_that_are_no_object_are_refused(self, hints: object) -> None:
        error = hint_refusal(hints)
        assert (error.code, error.param) == (ErrorCode.INVALID_HINT, "x-inferact")
        assert "node_affinity, kv_prefix_hint, priority" in error.message

    def test_that_are_huge_are_refused(self) -> None:
        error = hint_refusal({"priority": 1, "padding": "x" * 5_000})
        assert (error.code, error.param) == (ErrorCode.INVALID_HINT, "x-inferact")


SEED = (
    rb'{"model": "m", "messages": [{"role": "user", "content": "\ud83d\ude00 \"x\" \u00e9"}], "n": -1.5e+3,'
    rb' "x-inferact": {"priority": 3}, "a": [true, false, null, {}], "stream": true}'
)
PIECES = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\u00",
    b"\\ud8",
    b"\x00",
    b"\xff",
    b"NaN",
    b"1e",
    b"0",
]


@st.composite
def damaged_bodies(draw: st.DrawFn) -> bytes:
    body = SEED
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(body)))
        dropped = draw(st.integers(0, 3))
        body = body[:at] + draw(st.sampled_from(PIECES) | st.binary(max_size=2)) + body[at + dropped :]
    return body


def strictly(body: bytes) -> Any:
    """The body as the standard library reads it, without its liberties."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    value = json.loads(body.decode(), parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()  # fails for unpaired surrogates
    return value


@given(st.binary(max_size=200) | damaged_bodies())
@example(SEED)
def test_parse_accepts_what_a_strict_reader_accepts_and_raises_nothing_but_api_errors(body: bytes) -> None:
    try:
        expected = strictly(body)
    except ValueError:
        expected = None
    try:
        request = parse(CHAT, body)
    except ApiError as error:
        assert error.code is not ErrorCode.INVALID_JSON or expected is None
    else:
        assert expected is not None
        assert request.model == expected["model"]
        assert request.stream is (expected.get("stream") is True)
        assert request.hints.priority == (expected.get("x-inferact") or {}).get("priority", 5)


@pytest.mark.parametrize("name", [*MEMBERS, "\\u006bv_transfer_params"])
def test_transfer_parameters_in_engine_arguments_are_refused(name: str) -> None:
    body = b'{"model": "m", "vllm_xargs": {"top": 1, "%b": null}}' % name.encode()
    with pytest.raises(ApiError) as caught:
        parse(Api.COMPLETIONS, body)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.param is not None
    assert caught.value.param.startswith("vllm_xargs.")


@pytest.mark.parametrize(
    "value", [b'{"top": 1}', b"null", b"[]", b'"kv_transfer_params"', b"{}", b'{"x_inferact": 1}']
)
def test_other_engine_arguments_pass(value: bytes) -> None:
    assert parse(Api.COMPLETIONS, b'{"model": "m", "vllm_xargs": %b}' % value).model == "m"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
CHATS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "tool"]), "content": st.text(max_size=20) | JSON},
        optional={"tool_calls": JSON, "tool_call_id": JSON, "name": JSON},
    ),
    max_size=4,
)
HINTS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.none() | st.integers(-1, 11),
        "node_affinity": st.none() | st.sampled_from(["gpu-1", "gpu/1", 3]),
        "kv_prefix_hint": st.none() | st.sampled_from(["hint", "", 3]),
        "unknown": st.none(),
    },
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("m") | JSON},
    optional={
        "messages": CHATS | JSON,
        "x-inferact": HINTS | JSON,
        "vllm_xargs": st.none() | st.just({"kv_transfer_params": 1}) | JSON,
        **dict.fromkeys(["stream", "max_tokens", "max_completion_tokens", "previous_response_id"], JSON),
        **dict.fromkeys(["tools", "instructions", "input", "cache_salt", "bootstrap_room"], JSON),
        **dict.fromkeys(["n", "best_of"], st.integers(-1, 3) | JSON),
        "prompt": st.lists(st.text(max_size=3) | st.lists(st.integers(0, 9), max_size=2), max_size=3) | JSON,
    },
)


@settings(deadline=None)
@given(BODIES, st.sampled_from([Api.CHAT_COMPLETIONS, Api.COMPLETIONS, Api.RESPONSES, Api.EMBEDDINGS]))
def test_a_body_means_the_same_however_long_it_is(members: dict[str, Any], api: Api) -> None:
    """Long bodies are read member by member, short ones in one pass where they have the usual shape."""

    def meaning(body: bytes) -> Any:
        try:
            request = parse(api, body)
        except ApiError as error:
            return error.code, error.message, error.param
        said = (request.model, request.stream, request.hints, request.max_tokens, request.needs_cut)
        said += (request.one_answer,)
        return *said, prompt_blocks(request, 0).hashes, cut(body, request.members or members_of(body)).strip()

    body = json.dumps(members).encode()
    assert meaning(body) == meaning(body + b" " * (1 << 18))
