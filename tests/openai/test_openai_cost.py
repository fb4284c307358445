"""No body costs much more than its size: time against that of a plain body, so on any machine."""

import contextlib
import time
import tracemalloc

import pytest

from extproc.openai.cut import cut
from extproc.openai.errors import ApiError
from extproc.openai.members import MAX_MEMBERS, MAX_NAME_CHARS
from extproc.openai.request import Api, parse
from extproc.routing.blocks import prompt_blocks

SIZE_BYTES = 2_000_000
TIMES_PLAIN = 15
"""The dearest shapes take about eight times as long as plain text; a dict of their members takes seventy."""
TIMES_SIZE = 8
"""One emoji makes Python take four bytes for each character of a string, a fifth while the string grows."""

MODEL = b'{"model":"m",'
MESSAGE = MODEL + b'"messages":[{"role":"user",'
PART = MESSAGE + b'"content":[{'


def filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
    """A body of `SIZE_BYTES` that repeats the unit."""
    return head + unit * ((SIZE_BYTES - len(head) - len(tail)) // len(unit)) + tail


def named(head: bytes, tail: bytes, prefix: bytes = b"", count: int = SIZE_BYTES // 12) -> bytes:
    """A body with members of different names."""
    return head + b",".join(b'"%b%07d":0' % (prefix, i) for i in range(count)) + tail


PLAIN = filled(MODEL + b'"messages":[{"role":"user","content":"', b"Words and more words. ", b'"}]}')

SHAPES = {
    "numbers": filled(MODEL + b'"messages":[', b"0,", b"0]}"),
    "objects": filled(MODEL + b'"messages":[', b"{},", b"0]}"),
    "newlines": filled(MODEL + b'"prompt":"', rb"\n", b'"}'),
    "escaped pairs": filled(MODEL + b'"prompt":"', rb"\ud83d\ude00", b'"}'),
    "emoji": filled(MODEL + b'"prompt":"', "😀".encode(), b'"}'),
    "accents and emoji": filled(MODEL + b'"prompt":"', "é😀a".encode(), b'"}'),
    "spaces before": filled(b"", b" ", b'{"model":"m"}'),
    "spaces inside": filled(MODEL, b" ", b'"x-inferact":{}}'),
    "spaces only": filled(b"", b" ", b""),
    "members": named(b'{"model":"m",', b"}"),
    "as many members as allowed, and text": filled(
        named(b"{", b',"model":"m","prompt":"', rb"\n" * (MAX_NAME_CHARS - 7), MAX_MEMBERS - 2), b"a", b'"}'
    ),
    "a name": filled(MODEL + b'"', b"a", b'":0}'),
    "a name with an emoji": filled(MODEL + '"😀'.encode(), b"a", b'":0}'),
    "a name of escapes": filled(MODEL + b'"', rb"\n", b'":0}'),
    "the model": filled(b'{"model":"', b"a", b'"}'),
    "the model with an emoji": filled('{"model":"😀'.encode(), b"a", b'"}'),
    "the model of escapes": filled(b'{"model":"', rb"\u0061", b'"}'),
    "a list for the model": filled(b'{"model":[', b"0,", b"0]}"),
    "a limit of many digits": filled(MODEL + b'"max_tokens":1', b"1", b"}"),
    "a fraction of many digits": filled(MODEL + b'"max_tokens":1.', b"1", b"}"),
    "hints": named(MODEL + b'"x-inferact":{', b"}}"),
    "one hint": filled(MODEL + b'"x-inferact":{"kv_prefix_hint":"', b"a", b'"}}'),
    "engine arguments": named(MODEL + b'"vllm_xargs":{', b"}}"),
    "the same engine argument": filled(MODEL + b'"vllm_xargs":{', b'"":0,', b'"":0}}'),
    "nearly forbidden arguments": filled(MODEL + b'"vllm_xargs":{', b'"ec_transfer_paramt":0,', b'"":0}}'),
    "an engine argument with an emoji": filled(MODEL + '"vllm_xargs":{"😀'.encode(), b"a", b'":0}}'),
    "parameters to cut": filled(MODEL + b'"kv_transfer_params":{"a":[', b"0,", b"0]}}"),
    "images": filled(MODEL + b'"messages":[', b'{"image_url":{"url":"x"}},', b"0]}"),
    "image keys": filled(MODEL + b'"messages":[', b'"image_url",', b"0]}"),
    "nearly image keys": filled(MODEL + b'"messages":[', b'"image_urx",', b"0]}"),
    "an image that is none": filled(MODEL + b'"messages":[{"image_url":{"a":"', b"a", b'"}}]}'),
    "members before the URL": filled(
        MODEL + b'"messages":[', b'{"image_url":{"a":"%b","b":"","c":"","d":""}},' % (b"a" * 90), b"0]}"
    ),
    "a part of lists": filled(PART + b'"v":[', b"[],", b"0]}]}]}"),
    "a part of objects": filled(PART + b'"v":[', b"{},", b"0]}]}]}"),
    "a part of members": named(PART[:-1] + b'"type":"x",', b"}]}]}"),
    "parts of nothing": filled(PART + b'"v":0}', b",{}", b"]}]}"),
    "a tree in a part": filled(PART + b'"v":', b"[", b""),
    "calls": filled(MESSAGE + b'"tool_calls":[', b"{},", b"0]}]}"),
    "elements without a role": filled(MODEL + b'"messages":[{"v":[', b"[],", b"0]}]}"),
    "tools": filled(MODEL + b'"tools":[', b"{},", b"0]}"),
    "a template's arguments": named(MODEL + b'"chat_template_kwargs":{', b"}}"),
    "nested": filled(b'{"a":', b"[", b""),
    "truncated": filled(MODEL + b'"prompt":"', b"a", b""),
    "truncated pairs": filled(MODEL + b'"prompt":"', rb"\ud83d\ude00", b""),
    "an unpaired surrogate": filled(MODEL + b'"prompt":"', rb"\ud83d\ude00", rb'\ud83d"}'),
    "not UTF-8": filled(MODEL + b'"prompt":"', "é".encode(), b'\xff"}'),
}


def read_and_cut(body: bytes) -> None:
    """All that a request's body goes through, a new name for the model and its blocks included."""
    with contextlib.suppress(ApiError):
        request = parse(Api.CHAT_COMPLETIONS, body)
        cut(body, request.members, "another")
        prompt_blocks(request, 0)


def seconds_per_byte(body: bytes) -> float:
    """Processor time, the least of a few tries."""
    times = []
    for _ in range(5):
        began_s = time.thread_time()
        read_and_cut(body)
        times.append(time.thread_time() - began_s)
    return min(times) / len(body)


@pytest.mark.parametrize("shape", SHAPES)
def test_time_is_that_of_plain_text_a_few_times_over(shape: str) -> None:
    assert seconds_per_byte(SHAPES[shape]) < TIMES_PLAIN * seconds_per_byte(PLAIN)


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_the_size_a_few_times_over(shape: str) -> None:
    body = SHAPES[shape]
    tracemalloc.start()
    try:
        read_and_cut(body)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < TIMES_SIZE * len(body)
