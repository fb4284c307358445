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
from extproc.routing.loads import Floats
from extproc.routing.node import Node

FIRST_BYTES_PER_TOKEN: Final = 4.0
"""Prompt bytes a token, until the engines' usage has taught better."""
FIRST_OUTPUT_TOKENS: Final = 256.0
"""Answer length, until the engines' usage has taught better."""
LEARNING_RATE: Final = 0.02
"""Weight of the latest answer in the running means."""
LEAST_RATIO: Final = 0.5
MOST_RATIO: Final = 16.0
"""Bounds of bytes a token: what lies beyond is no text."""


class Lane:
    """The constants of a model over all nodes (in slot order), and what its answers have taught."""

    def __init__(self, model: str, nodes: Sequence[Node]) -> None:
        self.bytes_per_token = FIRST_BYTES_PER_TOKEN
        self.output_tokens = FIRST_OUTPUT_TOKENS
        self.serving = [node for node in nodes if model in node.config.serves]
        names = {node.config.engine_model(model) for node in self.serving}
        self.has_aliases = len(names) > 1
        """Whether nodes know the model by different names."""
        shapes = [model_shape(node.config.engine_model(model)) for node in nodes]
        profiles = [node.profile for node in nodes]
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
                float(kv_capacity_tokens(profile, shape)) or np.inf
                for profile, shape in zip(profiles, shapes, strict=True)
            ]
        )
        """KV capacity: what memory leaves beside the weights until the engine has told; unknown: no end."""
        self.least_room_tokens = 0.0
        self._find_least_room()

    def set_room(self, slot: int, tokens: int) -> None:
        """A node's engine has told its KV capacity."""
        if self.room_tokens[slot] != tokens:
            self.room_tokens[slot] = tokens
            self._find_least_room()

    def learn(self, prompt_bytes: float, prompt_tokens: float, output_tokens: float) -> None:
        """What an answer's usage said of the tokenizer and of the usual length."""
        if prompt_tokens > 0 and prompt_bytes > 0:
            ratio = min(max(prompt_bytes / prompt_tokens, LEAST_RATIO), MOST_RATIO)
            self.bytes_per_token += LEARNING_RATE * (ratio - self.bytes_per_token)
        self.output_tokens += LEARNING_RATE * (max(output_tokens, 1.0) - self.output_tokens)

    def _find_least_room(self) -> None:
        self.least_room_tokens = min(float(self.room_tokens[node.slot]) for node in self.serving)
