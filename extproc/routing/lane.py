"""What one model means to every node: its arithmetic, the KV room, who serves it."""

from collections.abc import Sequence

import numpy as np

from extproc.hardware import ModelShape, kv_capacity_tokens, model_shape
from extproc.routing.loads import Floats
from extproc.routing.node import Health, Node

# Shares of the data sheet that engines reach, as in `hardware.py`.
FLOPS_REACHED = 0.45
WEIGHT_BANDWIDTH_REACHED = 0.7
KV_BANDWIDTH_REACHED = 0.55

FIRST_BYTES_PER_TOKEN = 4.0
"""Prompt bytes a token, until the engines' usage has taught better."""
FIRST_OUTPUT_TOKENS = 256.0
"""Answer length, until the engines' usage has taught better."""
LEARNING_RATE = 0.02
"""Weight of the latest answer in the running means."""
NEVER = float("inf")


class Lane:
    """The constants of a model over all nodes (in slot order), and what its answers have taught."""

    def __init__(self, model: str, nodes: Sequence[Node]) -> None:
        self.model = model
        self.bytes_per_token = FIRST_BYTES_PER_TOKEN
        self.output_tokens = FIRST_OUTPUT_TOKENS
        self.serving = [node for node in nodes if model in node.config.serves]
        self.names = {node.id: node.config.engine_model(model) for node in self.serving}
        shapes = [model_shape(node.config.engine_model(model)) for node in nodes]
        profiles = [node.profile for node in nodes]
        self.flop_s = np.array([1 / (FLOPS_REACHED * p.compute_tflops * 1e12) for p in profiles])
        self.linear_flop = np.array([2 * shape.active_parameters for shape in shapes])
        self.square_flop = np.array([4.0 * shape.layers * shape.width for shape in shapes])
        bandwidth = np.array([p.memory_bandwidth_gbps * 1e9 for p in profiles])
        self.weights_s = np.array([_weight_bytes(shape) for shape in shapes]) / (
            WEIGHT_BANDWIDTH_REACHED * bandwidth
        )
        self.kv_token_s = np.array([shape.kv_bytes_per_token for shape in shapes]) / (
            KV_BANDWIDTH_REACHED * bandwidth
        )
        self.by_profile = np.array(
            [float(kv_capacity_tokens(p, shape)) for p, shape in zip(profiles, shapes, strict=True)]
        )

    def learn(self, prompt_bytes: float, prompt_tokens: float, output_tokens: float) -> None:
        """What an answer's usage said of the tokenizer and of the usual length."""
        if prompt_tokens > 0 and prompt_bytes > 0:
            ratio = min(max(prompt_bytes / prompt_tokens, 0.5), 16.0)
            self.bytes_per_token += LEARNING_RATE * (ratio - self.bytes_per_token)
        self.output_tokens += LEARNING_RATE * (output_tokens - self.output_tokens)


def _weight_bytes(shape: ModelShape) -> float:
    """Bytes of weights that a step reads: all, or the active part of a mixture of experts (a small batch)."""
    return shape.parameters * shape.weight_bytes_per_parameter


def takes_traffic(node: Node) -> bool:
    """Whether new requests may go there."""
    return not node.drained and node.health is not Health.OFFLINE


def capacity_tokens(lane: Lane, nodes: Sequence[Node]) -> Floats:
    """KV room of each node: what its engine reports, else what its memory leaves beside the weights."""
    reported = [node.report.kv_capacity_tokens if node.report else None for node in nodes]
    return np.array(
        [known if known else computed for known, computed in zip(reported, lane.by_profile, strict=True)]
    )
