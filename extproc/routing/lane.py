"""What one model means to every node: its arithmetic, the KV room, who serves it."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from extproc.hardware import (
    FLOPS_REACHED,
    KV_BANDWIDTH_REACHED,
    WEIGHT_BANDWIDTH_REACHED,
    kv_capacity_tokens,
    model_shape,
)
from extproc.routing.loads import ROOM, TOKENS, Floats
from extproc.routing.node import Node

FIRST_BYTES_PER_TOKEN: Final = 4.0
"""Prompt bytes a token, until the engines' usage has taught better."""
FIRST_OUTPUT_TOKENS: Final = 256.0
"""Answer length, until the engines' usage has taught better."""
FIRST_TOKENS: Final = 20_000.0
"""Prompt tokens that weigh as much as the first guess at their bytes."""
LEARNING_RATE: Final = 0.02
"""Weight of the latest answer in the running mean, and what sums lose with each."""
LEAST_RATIO: Final = 1.0
MOST_RATIO: Final = 8.0
"""Bounds of bytes a token: what lies beyond is no text."""
ROOM_CHANGE: Final = 1.1
"""Bytes a token must change by this factor before a node's room for prompts does: shrinking it evicts."""


class Lane:
    """The constants of a model over all nodes (in slot order), and what its answers have taught."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.bytes_per_token = self.room_bytes_per_token = FIRST_BYTES_PER_TOKEN
        """The latter is as of the last considerable change."""
        self._prompt_bytes = FIRST_TOKENS * FIRST_BYTES_PER_TOKEN
        self._prompt_tokens = FIRST_TOKENS
        self.output_tokens = FIRST_OUTPUT_TOKENS
        self.serving: list[Node] = []
        """In the order of their slots; none: the model is gone, for now."""

    def arrange(self, slots: Sequence[Node], present: Sequence[Node]) -> None:
        """The nodes by slot, and those of them that have not left, have changed."""
        model = self.model
        self.serving = [node for node in present if model in node.config.serves]
        self.serving_slots = np.array([node.slot for node in self.serving], int)
        names = {node.config.engine_model(model) for node in self.serving}
        self.has_aliases = len(names) > 1
        """Whether nodes know the model by different names."""
        shapes = [model_shape(node.config.engine_model(model)) for node in slots]
        profiles = [node.profile for node in slots]
        flop_s = np.array([1 / (FLOPS_REACHED * profile.compute_tflops * 1e12) for profile in profiles])
        bandwidth = np.array([profile.memory_bandwidth_gbps * 1e9 for profile in profiles])
        weights = np.array([shape.parameters * shape.weight_bytes_per_parameter for shape in shapes])
        kv_bytes = np.array([shape.kv_bytes_per_token for shape in shapes])
        self.linear_s: Floats = flop_s * np.array([2 * shape.active_parameters for shape in shapes])
        """Seconds of prefill a token."""
        self.square_s: Floats = flop_s * np.array([4.0 * shape.layers * shape.width for shape in shapes])
        """Seconds of prefill for each earlier token that a token attends to."""
        self.weights_s: Floats = weights / (WEIGHT_BANDWIDTH_REACHED * bandwidth)
        """Seconds that a decode step takes to read the weights."""
        self.kv_token_s: Floats = kv_bytes / (KV_BANDWIDTH_REACHED * bandwidth)
        """Seconds that it takes to read the KV of a token."""
        self.room_tokens: Floats = np.array(
            [
                node.reported_capacity_tokens or kv_capacity_tokens(node.profile, shape) or np.inf
                for node, shape in zip(slots, shapes, strict=True)
            ],
            float,
        )
        """KV capacity: what memory leaves beside the weights until the engine has told; unknown: no end."""
        ones, kv_token_s = np.ones(len(slots)), self.kv_token_s
        share = 1.0 / self.room_tokens
        linear, square, weights_s = self.linear_s, self.square_s, self.weights_s
        rows = [ones, ones, share, share, linear, square, weights_s, kv_token_s, kv_token_s, kv_token_s]
        self.factors: Floats = np.array(rows)
        """What makes seconds, or a share of the room, of each row of `Loads.table`."""
        self._find_least_room()

    def set_room(self, slot: int, tokens: int) -> None:
        """A node's engine has told its KV capacity."""
        if self.room_tokens[slot] != tokens:
            self.room_tokens[slot] = tokens
            self.factors[TOKENS, slot] = self.factors[ROOM, slot] = 1.0 / tokens
            self._find_least_room()

    def learn(self, prompt_bytes: float, prompt_tokens: float, output_tokens: float) -> None:
        """What an answer's usage said of the tokenizer and of the usual length."""
        if prompt_tokens > 0 and prompt_bytes > 0:
            self._learn_ratio(prompt_bytes, prompt_tokens)
        self.output_tokens += LEARNING_RATE * (max(output_tokens, 1.0) - self.output_tokens)

    def _learn_ratio(self, prompt_bytes: float, prompt_tokens: float) -> None:
        """Long prompts count for more: of short ones a chat template, or an odd text, is a large part."""
        prompt_bytes = min(max(prompt_bytes, prompt_tokens * LEAST_RATIO), prompt_tokens * MOST_RATIO)
        kept = 1.0 - LEARNING_RATE
        self._prompt_bytes = kept * self._prompt_bytes + prompt_bytes
        self._prompt_tokens = kept * self._prompt_tokens + prompt_tokens
        self.bytes_per_token = self._prompt_bytes / self._prompt_tokens
        change = self.bytes_per_token / self.room_bytes_per_token
        if not 1.0 / ROOM_CHANGE <= change <= ROOM_CHANGE:
            self.room_bytes_per_token = self.bytes_per_token

    def _find_least_room(self) -> None:
        rooms = self.room_tokens[self.serving_slots]
        self.least_room_tokens = float(rooms.min()) if len(rooms) else 0.0
