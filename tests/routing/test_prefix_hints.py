"""What a `kv_prefix_hint` names, and what nodes reported of it."""

from collections.abc import Mapping

from prefix_prompts import prompt

from extproc.routing.blocks import PromptBlocks
from extproc.routing.prefix import MAX_HINTS, MAX_REPORTS, HintTable


def bound(hints: HintTable, model: str, hint: str, blocks: PromptBlocks) -> Mapping[int, int]:
    """What is known of a hint once a prompt came with it."""
    hints.bind(model, hint, blocks)
    return hints.reports(model, hint, blocks)


class TestHints:
    SYSTEM = prompt("stuxyz", system=3)
    OTHER = prompt("sTuxyz", system=3)

    def test_know_what_each_node_last_reported_of_the_system_prompt(self) -> None:
        hints = HintTable()
        assert bound(hints, "m", "h", self.SYSTEM) == {}
        hints.report("m", "h", self.SYSTEM, 0, 200)
        hints.report("m", "h", self.SYSTEM, 1, 250)
        hints.report("m", "h", self.SYSTEM, 1, 100)
        assert bound(hints, "m", "h", prompt("stuq", system=3)) == {0: 200, 1: 100}

    def test_never_count_more_than_the_system_prompt(self) -> None:
        hints = HintTable()
        hints.bind("m", "h", self.SYSTEM)
        hints.report("m", "h", self.SYSTEM, 0, 600)
        assert bound(hints, "m", "h", self.SYSTEM) == {0: 300}

    def test_begin_anew_when_the_text_changes(self) -> None:
        hints = HintTable()
        hints.bind("m", "h", self.SYSTEM)
        hints.report("m", "h", self.SYSTEM, 0, 200)
        assert bound(hints, "m", "h", self.OTHER) == {}
        hints.report("m", "h", self.SYSTEM, 0, 200)  # of a request that was under way
        assert bound(hints, "m", "h", self.OTHER) == {}

    def test_are_not_bound_by_looking(self) -> None:
        hints = HintTable()
        assert hints.reports("m", "h", self.SYSTEM) == {}
        assert len(hints) == 0
        hints.bind("m", "h", self.SYSTEM)
        hints.report("m", "h", self.SYSTEM, 0, 200)
        assert hints.reports("m", "h", self.OTHER) == {}
        assert hints.reports("m", "h", self.SYSTEM) == {0: 200}

    def test_are_apart_by_model_and_name(self) -> None:
        hints = HintTable()
        for model, hint in (("m", "h"), ("m", "i"), ("n", "h")):
            assert bound(hints, model, hint, self.SYSTEM) == {}
            hints.report(model, hint, self.SYSTEM, 0, 200)
        assert len(hints) == 3

    def test_name_nothing_without_a_system_prompt(self) -> None:
        hints = HintTable()
        assert bound(hints, "m", "h", prompt("abc")) == {}
        hints.report("m", "h", prompt("abc"), 0, 300)
        assert (bound(hints, "m", "h", prompt("abc")), len(hints)) == ({}, 0)

    def test_of_prompts_not_seen_are_not_reported(self) -> None:
        hints = HintTable()
        hints.report("m", "h", self.SYSTEM, 0, 300)
        assert bound(hints, "m", "h", self.SYSTEM) == {}

    def test_forget_a_node_that_lost_its_cache(self) -> None:
        hints = HintTable()
        hints.bind("m", "h", self.SYSTEM)
        for bit in range(2):
            hints.report("m", "h", self.SYSTEM, bit, 300)
        hints.clear_node(0)
        assert bound(hints, "m", "h", self.SYSTEM) == {1: 300}

    def test_are_bounded_and_the_least_recently_used_go(self) -> None:
        hints = HintTable()
        hints.bind("m", "kept", self.SYSTEM)
        hints.report("m", "kept", self.SYSTEM, 0, 300)
        for i in range(MAX_HINTS + 10):
            hints.bind("m", str(i), self.SYSTEM)
            hints.bind("m", "kept", self.SYSTEM)
        assert len(hints) == MAX_HINTS
        assert bound(hints, "m", "kept", self.SYSTEM) == {0: 300}

    def test_are_bounded_in_what_nodes_report_too(self) -> None:
        hints = HintTable()
        nodes = 500
        names = [str(i) for i in range(MAX_REPORTS // nodes + 10)]
        for name in names:
            hints.bind("m", name, self.SYSTEM)
            for bit in range(nodes):
                hints.report("m", name, self.SYSTEM, bit, 300)
        assert len(hints) == MAX_REPORTS // nodes
        assert len(bound(hints, "m", names[-1], self.SYSTEM)) == nodes
        hints.report("m", names[-1], self.SYSTEM, 0, 200)  # the same again takes no room
        hints.clear_node(0)
        hints.report("m", names[-1], self.SYSTEM, 0, 300)
        assert len(hints) == MAX_REPORTS // nodes
