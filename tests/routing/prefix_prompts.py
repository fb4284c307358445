"""Prompts, real ones and some made of letters, and what is always true of their blocks."""

import json
from itertools import accumulate, pairwise
from typing import Any

from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from extproc.openai.request import Api, parse
from extproc.routing.blocks import MAX_BLOCKS, PromptBlocks, prompt_blocks

SECRET = 0x1F2E3D4C5B6A7988

Json = Any
TEXTS = st.text(st.characters(codec="utf-8"), max_size=400) | st.integers(0, 3_000).map("ab\n\"'".__mul__)
TOOL_CALLS = st.lists(
    st.fixed_dictionaries(
        {"id": TEXTS, "type": st.just("function"), "function": st.fixed_dictionaries({"arguments": TEXTS})}
    ),
    max_size=2,
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS})
    | st.fixed_dictionaries(
        {
            "type": st.just("image_url"),
            "image_url": st.fixed_dictionaries({"url": TEXTS, "detail": st.just("low")}),
        }
    ),
    max_size=3,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": TEXTS | PARTS | st.none(),
        "tool_calls": TOOL_CALLS | st.none(),
        "tool_call_id": TEXTS,
    },
)
CONVERSATIONS = st.lists(MESSAGES, max_size=8)


def blocks_of(body: str, api: Api = Api.CHAT_COMPLETIONS, secret: int = SECRET) -> PromptBlocks:
    return prompt_blocks(parse(api, body.encode()), secret)


def chat(*messages: Json, model: str = "m", **members: Json) -> PromptBlocks:
    return blocks_of(json.dumps({"model": model, "messages": messages, **members}))


def completion(prompt: Json) -> PromptBlocks:
    return blocks_of(json.dumps({"model": "m", "prompt": prompt}), Api.COMPLETIONS)


def response(**members: Json) -> PromptBlocks:
    return blocks_of(json.dumps({"model": "m", **members}), Api.RESPONSES)


def said(role: str, content: Json, **members: Json) -> Json:
    return {"role": role, "content": content, **members}


def shared(one: PromptBlocks, other: PromptBlocks) -> int:
    """How many first blocks are alike; none behind them may be."""
    count = next(
        (i for i, (a, b) in enumerate(zip(one.hashes, other.hashes, strict=False)) if a != b),
        min(len(one.hashes), len(other.hashes)),
    )
    assert set(one.hashes[count:]).isdisjoint(other.hashes[count:])
    assert one.ends_bytes[:count] == other.ends_bytes[:count]
    return count


def sizes(blocks: PromptBlocks) -> list[int]:
    return [end - start for start, end in pairwise((0, *blocks.ends_bytes))]


def assert_sound(blocks: PromptBlocks) -> None:
    assert len(blocks.hashes) == len(blocks.ends_bytes) <= MAX_BLOCKS
    assert all(size > 0 for size in sizes(blocks))
    assert len(set(blocks.hashes)) == len(blocks.hashes)
    assert all(0 <= digest < 1 << 64 for digest in blocks.hashes)
    assert 0 <= blocks.system_blocks <= len(blocks.hashes)
    assert blocks.total_bytes >= (blocks.ends_bytes or (0,))[-1]


BLOCK = 100


def prompt(text: str, system: int = 0) -> PromptBlocks:
    """A prompt with a block for each letter; its hash is that of all letters up to it."""
    hashes = tuple(xxh3_64_intdigest(text[: i + 1].encode()) for i in range(len(text)))
    return PromptBlocks(hashes, tuple(accumulate(map(size_of, text))), sum(map(size_of, text)), system)


def size_of(letter: str) -> int:
    """Capitals stand for blocks that are larger."""
    return BLOCK * (3 if letter.isupper() else 1)
