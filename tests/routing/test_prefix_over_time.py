"""The index beside a model of it that is too simple to be wrong, and too slow to be used."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prefix_prompts import BLOCK, prompt, size_of

from extproc.routing.held import PINNED_RATIO
from extproc.routing.prefix import PrefixIndex


@dataclass
class NaiveNode:
    """Blocks as texts up to their letter, least recently used first."""

    capacity_bytes: int
    loose: list[str] = field(default_factory=list)
    pins: list[str] = field(default_factory=list)

    @property
    def held(self) -> list[str]:
        return self.loose + self.pins

    def insert(self, text: str, pinned: int) -> None:
        for end in range(len(text), 0, -1):
            block = text[:end]
            pin = end <= pinned or block in self.pins
            self.drop([block])
            (self.pins if pin else self.loose).append(block)
        self.fit()

    def fit(self) -> None:
        while bytes_of(self.pins) > self.capacity_bytes * PINNED_RATIO:
            self.loose.append(self.pins.pop(0))
        self.evict(self.capacity_bytes)

    def evict(self, to_bytes: int) -> None:
        while self.loose and bytes_of(self.held) > to_bytes:
            self.loose.pop(0)

    def forget(self, text: str, from_block: int) -> None:
        first = text[: from_block + 1]
        if len(first) > from_block:
            self.drop([block for block in self.held if block.startswith(first)])

    def withdraw(self, text: str, from_block: int) -> None:
        for end in range(len(text), from_block, -1):
            if any(other.startswith(text[:end]) and len(other) > end for other in self.held):
                break
            self.drop([text[:end]])

    def drop(self, blocks: list[str]) -> None:
        self.loose = [block for block in self.loose if block not in blocks]
        self.pins = [block for block in self.pins if block not in blocks]

    def matched(self, text: str) -> int:
        return next((i for i in range(len(text)) if text[: i + 1] not in self.held), len(text))


def bytes_of(blocks: Iterable[str]) -> int:
    return sum(size_of(block[-1]) for block in blocks)


PROMPTS = st.text("abC", min_size=1, max_size=9)
CAPACITIES = st.sampled_from([0, 3, 9, 14, 20, 25]).map(BLOCK.__mul__)


class IndexOverTime(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.nodes: dict[int, NaiveNode] = {}

    def bit(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.nodes)), label="bit")

    @precondition(lambda self: len(self.nodes) < 3)
    @rule(capacity=CAPACITIES)
    def add_node(self, capacity: int) -> None:
        bit = self.index.add_node(capacity)
        assert bit not in self.nodes
        assert bit <= len(self.nodes)
        self.nodes[bit] = NaiveNode(capacity)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), texts=st.lists(PROMPTS, min_size=1, max_size=5), system=st.integers(0, 4))
    def insert(self, data: st.DataObject, texts: list[str], system: int) -> None:
        bit = self.bit(data)
        pin = data.draw(st.booleans(), label="pin")
        for text in texts:
            blocks = prompt(text, min(system, len(text)))
            self.index.insert(bit, blocks, pin)
            self.nodes[bit].insert(text, blocks.system_blocks if pin else 0)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), text=PROMPTS, from_block=st.integers(0, 9))
    def forget(self, data: st.DataObject, text: str, from_block: int) -> None:
        bit = self.bit(data)
        self.index.forget(bit, prompt(text), from_block)
        self.nodes[bit].forget(text, from_block)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), text=PROMPTS, from_block=st.integers(0, 9))
    def withdraw(self, data: st.DataObject, text: str, from_block: int) -> None:
        bit = self.bit(data)
        self.index.withdraw(bit, prompt(text), from_block)
        self.nodes[bit].withdraw(text, from_block)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), to_bytes=CAPACITIES)
    def evict(self, data: st.DataObject, to_bytes: int) -> None:
        bit = self.bit(data)
        self.index.evict(bit, to_bytes)
        self.nodes[bit].evict(to_bytes)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), capacity=CAPACITIES)
    def set_capacity(self, data: st.DataObject, capacity: int) -> None:
        bit = self.bit(data)
        self.index.set_capacity(bit, capacity)
        self.nodes[bit].capacity_bytes = capacity
        self.nodes[bit].fit()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), lost=st.sampled_from(["nothing"] * 4 + ["its cache", "itself"]))
    def lose(self, data: st.DataObject, lost: str) -> None:
        bit = self.bit(data)
        if lost == "its cache":
            self.index.clear_node(bit)
            self.nodes[bit] = NaiveNode(self.nodes[bit].capacity_bytes)
        elif lost == "itself":
            self.index.remove_node(bit)
            del self.nodes[bit]

    @rule(text=PROMPTS)
    def match(self, text: str) -> None:
        match = self.index.match(prompt(text))
        for bit in range(6):
            expected = self.nodes[bit].matched(text) if bit in self.nodes else 0
            assert match.matched_blocks(bit) == expected
        lengths = [blocks for _, blocks in match.steps]
        assert lengths == sorted(set(lengths))

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for bit, node in self.nodes.items():
            assert self.index.blocks(bit) == len(node.held)
            assert self.index.used_bytes(bit) == bytes_of(node.held) <= node.capacity_bytes
            assert self.index.pinned_bytes(bit) == bytes_of(node.pins)
            for block in node.held:
                assert self.index.match(prompt(block)).matched_blocks(bit) == len(block)
        assert len(self.index) == len({block for node in self.nodes.values() for block in node.held})


TestIndexOverTime = IndexOverTime.TestCase
TestIndexOverTime.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
