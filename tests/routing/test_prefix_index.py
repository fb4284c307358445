"""What nodes hold of prompts, and what clients call it."""

import tracemalloc

import pytest
from prefix_prompts import BLOCK, prompt
from xxhash import xxh3_64_intdigest

from extproc.routing.blocks import PromptBlocks
from extproc.routing.held import LEAST_BLOCK_BYTES
from extproc.routing.prefix import (
    UNKNOWN_CAPACITY_BYTES,
    Match,
    PrefixIndex,
)


def index_of(*capacities: int | None) -> PrefixIndex:
    """An index with nodes of these capacities in blocks; their bits are 0, 1, ..."""
    index = PrefixIndex()
    for bit, blocks in enumerate(capacities):
        assert index.add_node(None if blocks is None else blocks * BLOCK) == bit
    return index


def matched(index: PrefixIndex, text: str, bit: int = 0) -> int:
    return index.match(prompt(text)).matched_blocks(bit)


class TestAMatch:
    def test_is_the_longest_unbroken_run_of_each_node(self) -> None:
        index = index_of(*[None] * 4)
        for bit, text in enumerate(["abc", "abcdef", "abx"]):
            index.insert(bit, prompt(text), pin=False)
        match = index.match(prompt("abcde"))
        assert match.steps == ((0b100, 2), (0b001, 3), (0b010, 5))
        assert [match.matched_blocks(bit) for bit in range(5)] == [3, 5, 2, 0, 0]

    @pytest.mark.parametrize("text", ["", "x", "xabc"])
    def test_is_empty_when_no_node_holds_the_first_block(self, text: str) -> None:
        index = index_of(None)
        index.insert(0, prompt("abc"), pin=False)
        assert index.match(prompt(text)) == Match(())

    def test_of_a_prompt_that_all_hold_is_one_step(self) -> None:
        index = index_of(*[None] * 512)
        for bit in range(512):
            index.insert(bit, prompt("abc" * 20), pin=False)
        assert index.match(prompt("abc" * 20 + "d")).steps == (((1 << 512) - 1, 60),)
        assert len(index) == 60

    def test_is_not_changed_by_looking(self) -> None:
        index = index_of(3)
        index.insert(0, prompt("abc"), pin=False)
        index.match(prompt("abc"))
        index.insert(0, prompt("xy"), pin=False)
        assert matched(index, "abc") == 1


class TestANode:
    def test_gets_the_lowest_bit_that_is_free(self) -> None:
        index = index_of(None, None, None)
        index.remove_node(1)
        assert [index.add_node(None) for _ in range(2)] == [1, 3]

    def test_leaves_nothing_behind_for_the_next_with_its_bit(self) -> None:
        index = index_of(None, None)
        index.insert(0, prompt("abc", system=2), pin=True)
        index.insert(1, prompt("ab"), pin=False)
        index.remove_node(0)
        index.add_node(None)
        assert index.match(prompt("abc")).steps == ((0b10, 2),)
        assert (index.blocks(0), index.used_bytes(0), index.pinned_bytes(0), len(index)) == (0, 0, 0, 2)

    def test_that_lost_its_cache_holds_nothing_and_may_begin_anew(self) -> None:
        index = index_of(5)
        index.insert(0, prompt("abc", system=1), pin=True)
        index.clear_node(0)
        assert (matched(index, "abc"), index.used_bytes(0), len(index)) == (0, 0, 0)
        index.insert(0, prompt("abcdefg"), pin=False)
        assert index.blocks(0) == 5

    def test_of_unknown_capacity_has_a_usual_one(self) -> None:
        index = index_of(None)
        for i in range(300):
            text = f"{i} " * 30
            hashes = tuple(xxh3_64_intdigest(text[:end].encode()) for end in range(1, 61))
            index.insert(0, PromptBlocks(hashes, tuple(range(500, 30_500, 500)), 30_000, 0), pin=False)
        assert UNKNOWN_CAPACITY_BYTES - 500 < index.used_bytes(0) <= UNKNOWN_CAPACITY_BYTES

    def test_that_is_unknown_is_a_mistake(self) -> None:
        index = index_of(None)
        for call in (index.remove_node, index.clear_node, index.used_bytes, index.blocks):
            with pytest.raises(KeyError):
                call(1)
        with pytest.raises(KeyError):
            index.insert(1, prompt("a"), pin=False)


class TestEviction:
    def test_takes_the_least_recently_used_first_and_ends_before_beginnings(self) -> None:
        index = index_of(8)
        index.insert(0, prompt("abc"), pin=False)
        index.insert(0, prompt("xyz"), pin=False)
        index.insert(0, prompt("abd"), pin=False)
        index.insert(0, prompt("pqr"), pin=False)
        assert [matched(index, text) for text in ("abc", "xyz", "abd", "pqr")] == [2, 2, 3, 3]
        assert index.used_bytes(0) == 8 * BLOCK

    def test_takes_a_beginning_after_all_that_follows_it(self) -> None:
        index = index_of(4)
        index.insert(0, prompt("sab"), pin=False)
        index.insert(0, prompt("sc"), pin=False)
        index.insert(0, prompt("xyz"), pin=False)
        assert [matched(index, text) for text in ("sab", "sc", "xyz")] == [1, 1, 3]

    def test_counts_bytes_and_not_blocks(self) -> None:
        index = index_of(10)
        index.insert(0, prompt("aBc"), pin=False)
        index.insert(0, prompt("XYz"), pin=False)
        assert index.used_bytes(0) == 8 * BLOCK
        assert matched(index, "aBc") == 1

    def test_takes_the_end_of_a_prompt_that_is_too_long_itself(self) -> None:
        index = index_of(4)
        index.insert(0, prompt("abcdefgh"), pin=False)
        assert matched(index, "abcdefgh") == 4

    def test_follows_a_capacity_that_shrinks(self) -> None:
        index = index_of(8)
        index.insert(0, prompt("abcdef", system=2), pin=True)
        index.set_capacity(0, 3 * BLOCK)
        assert matched(index, "abcdef") == 3
        index.set_capacity(0, 0)
        assert (len(index), index.used_bytes(0)) == (0, 0)

    def test_on_demand_goes_as_far_as_told_and_spares_pins(self) -> None:
        index = index_of(12)
        index.insert(0, prompt("sxyz", system=1), pin=True)
        index.insert(0, prompt("abcd"), pin=False)
        index.evict(0, 6 * BLOCK)
        assert [matched(index, text) for text in ("sxyz", "abcd")] == [2, 4]
        index.evict(0, 6 * BLOCK)
        assert index.blocks(0) == 6
        index.evict(0, 0)
        assert [matched(index, text) for text in ("sxyz", "abcd")] == [1, 0]

    def test_of_one_node_leaves_the_others_alone(self) -> None:
        index = index_of(None, None)
        for bit in range(2):
            index.insert(bit, prompt("abc"), pin=False)
        index.evict(0, 0)
        assert index.match(prompt("abc")).steps == ((0b10, 3),)


class TestPins:
    def test_keep_a_system_prompt_whatever_comes(self) -> None:
        index = index_of(8)
        index.insert(0, prompt("stuv", system=2), pin=True)
        for text in ("abcdefgh", "ijklmnop"):
            index.insert(0, prompt(text), pin=False)
        assert matched(index, "stuv") == 2
        assert index.used_bytes(0) == 8 * BLOCK

    def test_take_a_quarter_at_most_and_the_least_recently_used_go(self) -> None:
        index = index_of(8)
        for text in ("ab", "cd", "ef"):
            index.insert(0, prompt(text, system=2), pin=True)
            assert index.pinned_bytes(0) == 2 * BLOCK
        index.insert(0, prompt("uvwxyz"), pin=False)
        assert [matched(index, text) for text in ("ab", "cd", "ef", "uvwxyz")] == [0, 0, 2, 6]

    def test_keep_the_beginning_of_a_system_prompt_that_is_too_long(self) -> None:
        index = index_of(8)
        index.insert(0, prompt("stuv", system=4), pin=True)
        index.insert(0, prompt("abcdefgh"), pin=False)
        assert matched(index, "stuv") == 2

    def test_of_a_system_prompt_that_lost_some_go_before_those_of_others(self) -> None:
        index = index_of(16)
        index.insert(0, prompt("abc", system=3), pin=True)
        for text in ("de", "f", "uvwxyz123456"):
            index.insert(0, prompt(text, system=2 if text == "de" else 1), pin=True)
        index.insert(0, prompt("ghijklmnopqrs"), pin=False)
        assert [matched(index, text) for text in ("abc", "de", "f", "u")] == [0, 2, 1, 1]

    def test_come_to_blocks_that_were_there_without(self) -> None:
        index = index_of(8)
        index.insert(0, prompt("stuv", system=2), pin=False)
        assert index.pinned_bytes(0) == 0
        index.insert(0, prompt("stxy", system=2), pin=True)
        assert index.pinned_bytes(0) == 2 * BLOCK

    def test_do_not_stop_what_an_engine_reports(self) -> None:
        index = index_of(8)
        index.insert(0, prompt("stu", system=2), pin=True)
        index.forget(0, prompt("stu"), 1)
        assert (matched(index, "stu"), index.pinned_bytes(0), index.used_bytes(0)) == (1, BLOCK, BLOCK)


class TestForgetting:
    @pytest.mark.parametrize("from_block", range(7))
    def test_takes_a_prompt_s_blocks_from_one_on(self, from_block: int) -> None:
        index = index_of(None)
        index.insert(0, prompt("abcdef"), pin=False)
        index.forget(0, prompt("abcdef"), from_block)
        assert matched(index, "abcdef") == index.blocks(0) == min(from_block, 6)

    def test_takes_all_that_followed_in_other_prompts(self) -> None:
        index = index_of(None, None)
        for text in ("abcd", "abcx", "aby", "z"):
            index.insert(0, prompt(text), pin=False)
        index.insert(1, prompt("abcd"), pin=False)
        index.forget(0, prompt("abcq"), 2)
        assert [matched(index, text) for text in ("abcd", "abcx", "aby", "z")] == [2, 2, 3, 1]
        assert matched(index, "abcd", bit=1) == 4

    def test_of_what_is_not_held_changes_nothing(self) -> None:
        index = index_of(None)
        index.insert(0, prompt("abc"), pin=False)
        for text, from_block in (("xyz", 0), ("abx", 2), ("abcd", 3), ("", 0)):
            index.forget(0, prompt(text), from_block)
        assert matched(index, "abc") == 3


class TestMemory:
    def test_is_bounded_by_the_capacities_however_many_prompts_come(self) -> None:
        index = index_of(*[500] * 4)
        seen = []
        tracemalloc.start()
        try:
            for i in range(6_000):
                index.insert(i % 4, prompt(f"{i % 7}{i:06}" + "x" * 20, system=1), pin=True)
                if i >= 3_000 and i % 100 == 0:
                    seen.append((tracemalloc.get_traced_memory()[0], index.memory_bytes(), len(index)))
        finally:
            tracemalloc.stop()
        taken, estimated, held = map(list, zip(*seen, strict=True))
        assert max(held) <= 2_000
        assert max(taken) < 1.2 * min(taken)
        assert max(estimated) < 1.2 * min(estimated)
        assert 0.5 < estimated[-1] / taken[-1] < 1.5


class TestWithdrawing:
    def test_takes_back_what_only_this_prompt_had(self) -> None:
        index = PrefixIndex()
        index.add_node(10_000)
        index.insert(0, prompt("ab"), pin=False)
        index.insert(0, prompt("abcd"), pin=False)
        index.withdraw(0, prompt("abcd"), 2)
        assert matched(index, "abcd") == 2

    def test_leaves_what_others_go_on_from(self) -> None:
        index = PrefixIndex()
        index.add_node(10_000)
        for text in ("sa", "sb", "sc"):
            index.insert(0, prompt(text, system=1), pin=True)
        index.withdraw(0, prompt("sa", system=1), 0)
        assert (matched(index, "sa"), matched(index, "sb"), matched(index, "sc")) == (1, 2, 2)


def test_short_system_prompts_without_end_take_no_memory_without_end() -> None:
    index, capacity_bytes = PrefixIndex(), 100_000
    index.add_node(capacity_bytes)
    for number in range(20_000):
        index.insert(0, PromptBlocks((number + 1,), (1,), 1, 1), pin=True)
    assert index.blocks(0) <= capacity_bytes / LEAST_BLOCK_BYTES
