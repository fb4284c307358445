"""The index follows what engines store and remove, for prompts whose tokens are known."""

import json
from array import array
from typing import Any

import pytest
from kv_support import BLOCK_TOKENS, MODEL, make_node, recorded

from extproc.engines.kvevents import read_message
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing import exact as exact_module
from extproc.routing.blocks import BLOCK_BYTES, PromptBlocks, prompt_blocks
from extproc.routing.exact import Tokens
from extproc.routing.node import Node
from extproc.routing.router import Router
from extproc.routing.tokenblocks import Cleared, Removed, Stored, TokenBlocks

TOKENS_OF_BLOCK = 128
"""Of a prompt's block, here."""
BLOCKS_OF_BLOCK = TOKENS_OF_BLOCK // BLOCK_TOKENS


def request(words: str, model: str = MODEL, **members: Any) -> RoutingRequest:
    """A prompt with a block for each letter."""
    text = "".join(letter * BLOCK_BYTES for letter in words)
    return parse(Api.COMPLETIONS, json.dumps({"model": model, "prompt": text, **members}).encode())


def tokens(words: str) -> "array[int]":
    return array("I", [ord(letter) for letter in words for _ in range(TOKENS_OF_BLOCK)])


def store(words: str, start: int = 0, first: int = 1, **members: Any) -> Stored:
    """Blocks for all letters from number `start` on; their names count from `first` at the first letter."""
    begin, end = start * BLOCKS_OF_BLOCK, len(words) * BLOCKS_OF_BLOCK
    names = [first + i for i in range(begin, end)]
    parent = first + begin - 1 if begin else None
    return Stored(names, parent, tokens(words[start:]), BLOCK_TOKENS, **members)


def remove(number: int, first: int = 1) -> Removed:
    """The last block of tokens of letter number `number`."""
    return Removed([first + (number + 1) * BLOCKS_OF_BLOCK - 1])


class Known:
    """A router over nodes with events, of which each has spoken once."""

    def __init__(self, *nodes: Node) -> None:
        self.router = Router(nodes)
        self.exact = self.router.exact
        for node in nodes:
            self.exact.happened(node, store("?", first=1 << 40))

    def blocks(self, asked: RoutingRequest) -> PromptBlocks:
        return prompt_blocks(asked, self.router._secret)

    def learn(self, asked: RoutingRequest, words: str, **more: Any) -> PromptBlocks:
        blocks = self.blocks(asked)
        self.exact.learn(asked.model, blocks, Tokens(tokens(words), **more))
        return blocks

    def match(self, node: Node, asked: RoutingRequest) -> int:
        """How many of its blocks a decision would count on."""
        return self.router.caches.index.match(self.blocks(asked)).matched_blocks(node.slot)


@pytest.fixture
def node() -> Node:
    return make_node()


@pytest.fixture
def known(node: Node) -> Known:
    return Known(node)


def test_recorded_events_leave_what_the_engine_had() -> None:
    held = TokenBlocks(root=1)
    sizes = []
    for line in recorded():
        message = read_message(line["number"].to_bytes(8, "big"), _packed(line["batch"]))
        assert message is not None
        for event in message.events:
            match event:
                case Stored():
                    assert len(held.store(event)) == len(event.hashes)
                case Removed():
                    assert len(held.remove(event)) == 1
                case Cleared():
                    held.clear()
        sizes.append(len(held))
    assert sizes == [6, 7, 8, 9, 15, 32, 49, 66, 78, 78, 78, 0]


def _packed(batch: object) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(batch)


def test_a_block_with_two_copies_goes_with_the_second(known: Known, node: Node) -> None:
    known.learn(request("ab"), "ab")
    known.exact.happened(node, store("ab"))
    known.exact.happened(node, store("ab"))
    known.exact.happened(node, remove(1))
    assert known.match(node, request("ab")) == 2
    known.exact.happened(node, remove(1))
    assert known.match(node, request("ab")) == 1


def test_a_block_that_the_engine_tells_apart_goes_with_the_last_of_its_names() -> None:
    """Where the engine does not say the salt, prompts of two tenants are one to us."""
    held = TokenBlocks(root=1)
    [key] = held.store(Stored([1], None, array("I", [7]), 1))
    held.store(Stored([2], None, array("I", [7]), 1))
    assert held.remove(Removed([1])) == held.remove(Removed([1])) == []
    assert (len(held), key in held) == (1, True)
    assert held.remove(Removed([2])) == [key]
    assert (len(held), key in held) == (0, False)
    assert held.remove(Removed([1, 2])) == []


def test_blocks_after_ones_that_are_not_known_are_not_placed(known: Known, node: Node) -> None:
    known.learn(request("abc"), "abc")
    known.exact.happened(node, store("abc", start=1))
    assert known.match(node, request("abc")) == 0


def test_a_node_gains_a_prompt_that_somebody_else_sent(known: Known, node: Node) -> None:
    known.learn(request("abc"), "abc")
    known.exact.happened(node, store("ab"))
    assert known.match(node, request("abc")) == 2


def test_what_a_node_held_before_is_found_when_a_prompt_is_learned(known: Known, node: Node) -> None:
    known.exact.happened(node, store("ab"))
    known.learn(request("abc"), "abc")
    assert known.match(node, request("abc")) == 2


def test_a_node_loses_a_block_and_what_follows_it(known: Known, node: Node) -> None:
    blocks = known.learn(request("abcd"), "abcd")
    known.router.caches.insert(node, blocks)
    known.exact.happened(node, store("abcd"))
    known.exact.happened(node, remove(2))
    assert known.match(node, request("abcd")) == 2


def test_prompts_that_begin_alike_share_what_is_gained_and_lost(known: Known, node: Node) -> None:
    known.learn(request("abx"), "abx")
    known.learn(request("aby"), "aby")
    known.exact.happened(node, store("ab"))
    assert known.match(node, request("abx")) == known.match(node, request("aby")) == 2
    known.exact.happened(node, remove(1))
    assert known.match(node, request("abx")) == known.match(node, request("aby")) == 1


def test_the_index_answers_for_prompts_that_are_not_learned(known: Known, node: Node) -> None:
    known.router.caches.insert(node, known.blocks(request("zz")))
    known.exact.happened(node, store("ab"))
    assert known.match(node, request("zz")) == 2


@pytest.mark.parametrize(
    ("extras", "learned"), [([["s"]], {"salt": "s"}), ([["lora"]] * 2, {"adapter": "lora"})]
)
def test_salts_and_adapters_keep_blocks_apart(
    known: Known, node: Node, extras: list[Any], learned: dict[str, str]
) -> None:
    import msgspec

    plain, other = request("ab"), request("ab", cache_salt="s")
    known.learn(plain, "ab")
    known.learn(other, "ab", **learned)
    each = [*extras, *[None] * BLOCKS_OF_BLOCK * 2][: 2 * BLOCKS_OF_BLOCK]
    if "adapter" in learned:
        each = [extras[0]] * 2 * BLOCKS_OF_BLOCK
    known.exact.happened(node, store("ab", extras=list(map(msgspec.msgpack.encode, each))))
    assert (known.match(node, plain), known.match(node, other)) == (0, 2)


def test_nodes_of_another_model_have_other_blocks() -> None:
    small, large = make_node("small"), make_node("large", models=("large",))
    known = Known(small, large)
    known.learn(request("ab"), "ab")
    known.exact.happened(large, store("ab"))
    known.exact.happened(small, store("a"))
    assert known.match(large, request("ab")) == 0
    assert known.match(small, request("ab")) == 1


def test_nodes_may_have_blocks_of_different_sizes() -> None:
    fine, coarse = make_node("fine"), make_node("coarse")
    known = Known(fine)
    known = Known(fine, coarse)
    known.exact.happened(coarse, Cleared())
    known.exact.happened(coarse, Stored([1, 2], None, tokens("ab"), TOKENS_OF_BLOCK))
    known.learn(request("abc"), "abc")
    assert known.match(coarse, request("abc")) == 2
    known.exact.happened(coarse, Removed([2]))
    assert known.match(coarse, request("abc")) == 1
    assert known.match(fine, request("abc")) == 0


def test_blocks_larger_than_a_prompts_are_lost_with_all_that_end_in_them(known: Known, node: Node) -> None:
    known.exact.happened(node, Cleared())
    known.exact.happened(node, Stored([1], None, tokens("abcd"), 4 * TOKENS_OF_BLOCK))
    known.learn(request("abcd"), "abcd")
    assert known.match(node, request("abcd")) == 4
    known.exact.happened(node, Removed([1]))
    assert known.match(node, request("abcd")) == 0


def test_an_engine_that_cleared_its_cache_holds_nothing(known: Known, node: Node) -> None:
    known.router.caches.insert(node, known.blocks(request("zz")))
    known.exact.happened(node, Cleared())
    assert known.match(node, request("zz")) == 0


def test_where_events_were_missed_the_index_keeps_what_it_has(known: Known, node: Node) -> None:
    known.learn(request("ab"), "ab")
    known.exact.happened(node, store("ab"))
    known.exact.forget(node)
    assert known.match(node, request("ab")) == 2
    assert known.exact.blocks(node) == 0


@pytest.mark.parametrize(("held", "left"), [("", 3), ("a", 1), ("ab", 2), ("abc", 3)])
def test_what_was_not_stored_by_the_end_is_not_held(known: Known, node: Node, held: str, left: int) -> None:
    """A client that left early, say. Where nothing at all was stored, we may have the tokens wrong."""
    blocks = known.learn(request("abc"), "abc")
    known.router.caches.insert(node, blocks)
    if held:
        known.exact.happened(node, store(held))
        known.router.caches.insert(node, blocks)
    node.events.exact = True
    known.exact.settle(node, blocks)
    assert known.match(node, request("abc")) == left


def test_a_prompt_is_asked_for_once(known: Known, node: Node) -> None:
    blocks = known.blocks(request("ab"))
    assert known.exact.wants(node, blocks)
    known.learn(request("ab"), "ab")
    assert not known.exact.wants(node, blocks)


def test_nothing_is_asked_for_without_events_or_blocks(known: Known, node: Node) -> None:
    assert not known.exact.wants(make_node("b", kv_events=None), known.blocks(request("ab")))
    assert not known.exact.wants(node, known.blocks(request("")))
    known.exact.forget(node)
    assert not known.exact.wants(node, known.blocks(request("ab"))), "the size of its blocks is not known"


def test_the_prompts_learned_first_are_forgotten(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    monkeypatch.setattr(exact_module, "MAX_ENDS", 4)
    known = Known(node)
    for words in ("ab", "ac", "de"):
        known.learn(request(words), words)
    assert [known.exact.wants(node, known.blocks(request(words))) for words in ("ab", "ac", "de")] == [
        True, False, False,
    ]  # fmt: skip
    known.exact.happened(node, store("ac"))
    assert known.match(node, request("ac")) == 2
