"""What prefill nodes are asked, and what decode nodes are told, in the words of each engine."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config import NodeConfig, Protocol
from extproc.engines.handover import BOOTSTRAP_PORT, can_be_split, handover, leg_body, read_answer
from extproc.openai.cut import cut
from extproc.openai.members import members
from extproc.openai.request import Api

PREFILL = NodeConfig.model_validate(
    {
        "id": "p",
        "hardware": "a100-80g",
        "backend": "vllm",
        "endpoint": "http://[fd00::1]:8000/base",
        "models": ["m"],
    }
)
ANSWER = (
    b'{"id": "x", "usage": {"prompt_tokens": 295, "prompt_tokens_details": {"cached_tokens": 32}}, '
    b'"kv_transfer_params": {"do_remote_prefill": true, "remote_block_ids": [[10, 11]], "remote_port": 5601, '
    b'"remote_engine_id": "2c96", "x": 1.0e400, "tp_size": 1}}'
)


def leg(body: dict[str, Any], protocol: Protocol = Protocol.VLLM, path: Api = Api.CHAT_COMPLETIONS) -> Any:
    """A prefill node's body."""
    encoded = json.dumps(body).encode()
    return json.loads(leg_body(encoded, members(encoded), path, handover(protocol, PREFILL)))


LONG = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 500,
    "max_completion_tokens": 400,
    "max_output_tokens": 300,
    "min_tokens": 20,
    "n": 1,
    "best_of": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
}


@pytest.mark.parametrize("protocol", Protocol)
def test_the_leg_asks_for_one_token_in_one_piece(protocol: Protocol) -> None:
    asked = leg(LONG, protocol)
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["stream"]) == (1, 1, False)
    for name in ("max_output_tokens", "min_tokens", "n", "best_of", "stream_options"):
        assert name not in asked
    assert (asked["model"], asked["messages"], asked["temperature"]) == ("m", LONG["messages"], 0.5)


def test_completions_know_one_limit_only() -> None:
    asked = leg({"model": "m", "prompt": "hi"}, path=Api.COMPLETIONS)
    assert asked["max_tokens"] == 1
    assert "max_completion_tokens" not in asked


def test_vllm_is_asked_to_keep_the_kv_and_tells_where_it_is() -> None:
    assert leg(LONG)["kv_transfer_params"] == {"do_remote_decode": True}
    assert handover(Protocol.VLLM, PREFILL).transfer is None
    transfer, usage = read_answer(ANSWER)
    assert transfer is not None
    assert transfer.once, "the memory belongs to other prompts afterwards"
    told = json.loads(b"{%b}" % transfer.members)
    assert told == {"kv_transfer_params": json.loads(ANSWER)["kv_transfer_params"]}
    assert b"1.0e400" in transfer.members, "values stay as they are written"
    assert json.loads(usage)["prompt_tokens"] == 295


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no JSON",
        b"[]",
        b'{"usage": {}}',
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": "where"}',
        b'{"kv_transfer_params": [1]}',
        b"[" * 100_000,
    ],
)
def test_an_answer_without_parameters_is_seen(answer: bytes) -> None:
    assert read_answer(answer)[0] is None


def test_both_halves_of_sglang_meet_in_the_same_room() -> None:
    given_ = handover(Protocol.SGLANG, PREFILL)
    assert given_.transfer is not None
    assert not given_.transfer.once
    assert given_.transfer.members == given_.members
    told = json.loads(b"{%b}" % given_.members)
    assert told["bootstrap_host"] == "fd00::1"
    assert told["bootstrap_port"] == BOOTSTRAP_PORT
    assert 0 <= told["bootstrap_room"] < 2**63
    other = json.loads(b"{%b}" % handover(Protocol.SGLANG, PREFILL).members)
    assert told["bootstrap_room"] != other["bootstrap_room"]


@pytest.mark.parametrize(
    ("member", "splits"),
    [
        ({"echo": True}, False),
        ({"prompt_logprobs": 0}, False),
        ({"use_beam_search": True}, False),
        ({"echo": False}, True),
        ({"prompt_logprobs": None}, True),
        ({"logprobs": True}, True),
    ],
)
def test_what_is_told_of_the_prompt_itself_needs_the_node_that_computes_it(
    member: dict[str, Any], splits: bool
) -> None:
    body = json.dumps({"model": "m", "prompt": "x", **member}).encode()
    assert can_be_split(members(body)) is splits


NAMES = st.sampled_from(["model", "prompt", "stream", "max_tokens", "n", "kv_transfer_params", "é", 'q"\\'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PAIRS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


def written(pairs: list[tuple[str, Any]], space: str, tail: str) -> bytes:
    """An object with these members, duplicates and all."""
    items = [f"{space}{json.dumps(name)}{space}:{json.dumps(value)}{space}" for name, value in pairs]
    return f"{space}{{{','.join(items) or space}}}{tail}".encode()


def read(body: bytes) -> list[tuple[str, Any]]:
    """All members, in order."""
    return [(name, json.loads(bytes(value))) for name, value in members(body)]


@settings(deadline=None)
@given(pairs=PAIRS, space=st.sampled_from(["", " ", "\n  "]), tail=st.sampled_from(["", "\r\n"]))
def test_new_members_stand_first_and_the_rest_stays(
    pairs: list[tuple[str, Any]], space: str, tail: str
) -> None:
    body = written(pairs, space, tail)
    first = b'"kv_transfer_params":{"a":[1,"}"]},"max_tokens":1'
    changed = cut(body, members(body), also=("max_tokens", "n", "stream"), first=first)
    kept = [
        (name, value)
        for name, value in pairs
        if name not in ("max_tokens", "n", "stream", "kv_transfer_params")
    ]
    assert read(changed) == [("kv_transfer_params", {"a": [1, "}"]}), ("max_tokens", 1), *kept]
    assert changed.partition(b"{")[2].startswith(first)


@settings(deadline=None)
@given(pairs=PAIRS.filter(bool), space=st.sampled_from(["", " ", "\n  "]))
def test_spaces_in_the_place_of_the_parameters_leave_the_request_whole(
    pairs: list[tuple[str, Any]], space: str
) -> None:
    """What Envoy does to the body of a second attempt."""
    pairs = [("model", "m"), *pairs]
    body = written(pairs, space, "")
    first = b'"kv_transfer_params":{"a":1}'
    changed = cut(body, members(body), first=first)
    brace, once_bytes = changed.index(b"{") + 1, len(first) + 1
    blank = changed[:brace] + b" " * once_bytes + changed[brace + once_bytes :]
    assert read(blank) == [(name, value) for name, value in pairs if name != "kv_transfer_params"]
