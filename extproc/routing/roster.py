"""The nodes, each at a place of its own in all that is kept by node, while they come and go."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from extproc.config import KvCache
from extproc.routing.caches import Caches
from extproc.routing.exact import ExactCaches
from extproc.routing.lane import Lane
from extproc.routing.loads import Loads
from extproc.routing.node import NO_SLOT, Node
from extproc.routing.pace import Pace


class Roster:
    """The nodes, and a slot for each: its place in every array, and its bit in the prompt index.

    A node that has left keeps its slot until `release`, because requests may still be booked on it. Then the
    slot is given out again. Until that happens its numbers stay in the arrays, where nobody looks at them.
    """

    def __init__(self, cache: KvCache) -> None:
        self.nodes: dict[str, Node] = {}
        """By id, in the order of the configuration. Never changed in place: threads read it."""
        self.loads = Loads()
        self.caches = Caches(cache)
        self.exact = ExactCaches(self.caches)
        self.pace = Pace()
        self.lanes: dict[str, Lane] = {}
        """By model, also those that no node serves any more: it may come back, and then is known."""
        self.is_weighed = False
        self._slots: list[Node] = []

    def change(self, nodes: Iterable[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
        """These are the nodes now; those that came, and those that left.

        A node whose configuration is another now is told as well, whether it is the same object or not.
        """
        new = {node.id: node for node in nodes}
        left = [node for node in self.nodes.values() if new.get(node.id) is not node]
        came = [node for node in new.values() if self.nodes.get(node.id) is not node]
        for node in left:
            self.exact.remove(node)
        for node in came:
            self._place(node)
        self.nodes = new
        self._arrange()
        return came, left

    def set_room(self, node: Node) -> None:
        """A node's KV capacity: for the cost of every model on it, and for what it can hold of prompts."""
        slot, reported = node.slot, node.reported_capacity_tokens
        lanes = [self.lanes[name] for name in node.config.serves]
        if reported:
            for lane in lanes:
                lane.set_room(slot, reported)
        self._set_capacity(
            slot,
            min(lane.room_tokens.item(slot) for lane in lanes),
            max(lane.room_bytes_per_token for lane in lanes),
        )

    def find(self, node_id: str) -> Node | None:
        """A node that is there, or that has left and keeps its slot."""
        leaving = (node for node in reversed(self._slots) if node.id == node_id and node.slot != NO_SLOT)
        return self.nodes.get(node_id) or next(leaving, None)

    def release(self, node: Node) -> None:
        """A node that has left has no bookings any more, and will get none: its slot is free."""
        assert not node.in_flight and self.nodes.get(node.id) is not node
        self.loads.remove(node.slot)
        self.caches.remove(node.slot)
        node.slot = NO_SLOT

    def _place(self, node: Node) -> None:
        node.slot = self.loads.add()
        self.caches.add(node.slot)
        self.pace.add(node.slot)
        self.exact.add(node)
        self._slots[node.slot : node.slot + 1] = [node]

    def _arrange(self) -> None:
        """Bring what depends on all nodes up to date; what was learned is kept."""
        for model in frozenset().union(*(node.config.serves for node in self.nodes.values())):
            if model not in self.lanes:
                self.lanes[model] = Lane(model)
        present = [node for node in self._slots if self.nodes.get(node.id) is node]
        for lane in self.lanes.values():
            lane.arrange(self._slots, present)
        self.loads.weights = np.array([node.config.weight or 1.0 for node in self._slots])
        self.is_weighed = any(node.config.weight not in (0.0, 1.0) for node in present)
        tokens, ratios = np.full(len(self._slots), math.inf), np.zeros(len(self._slots))
        for lane in self.lanes.values():
            slots = lane.serving_slots
            tokens[slots] = np.minimum(tokens[slots], lane.room_tokens[slots])
            ratios[slots] = np.maximum(ratios[slots], lane.room_bytes_per_token)
        for node in present:
            self._set_capacity(node.slot, tokens.item(node.slot), ratios.item(node.slot))

    def _set_capacity(self, slot: int, tokens: float, bytes_per_token: float) -> None:
        if tokens < math.inf:
            self.caches.set_capacity(slot, int(tokens * bytes_per_token))
