"""How long one step of the simulated engine takes on its hardware.

The constants are the simulator's own, so that a router which predicts with others is not marked by itself.
"""

import math
from dataclasses import dataclass

from extproc.hardware import HardwareProfile, ModelShape

_FLOPS_REACHED = 0.5
_WEIGHT_BANDWIDTH_REACHED = 0.75
_KV_BANDWIDTH_REACHED = 0.6
_OVERHEAD_S = 0.002


@dataclass(slots=True)
class StepLoad:
    """What one step computes and reads, summed over its requests."""

    tokens: int = 0
    attended_tokens: float = 0.0
    """For each computed token, the tokens it attends to."""
    context_tokens: int = 0
    """Tokens whose KV is read."""

    def add(self, tokens: int, computed: int) -> None:
        """Count `tokens` of a request that has `computed` tokens in the KV cache."""
        self.tokens += tokens
        self.attended_tokens += tokens * (computed + tokens / 2)
        self.context_tokens += computed


def step_s(profile: HardwareProfile, shape: ModelShape, load: StepLoad) -> float:
    """Seconds of one step: the slower of arithmetic and reading weights, then KV, then the host's work."""
    flop = load.tokens * 2 * shape.active_parameters + 4 * shape.layers * shape.width * load.attended_tokens
    untouched = math.pow(1 - shape.active_parameters / shape.parameters, load.tokens)
    weight_bytes = shape.parameters * (1 - untouched) * shape.weight_bytes_per_parameter
    bandwidth = profile.memory_bandwidth_gbps * 1e9
    compute_s = flop / (_FLOPS_REACHED * profile.compute_tflops * 1e12)
    weights_s = weight_bytes / (_WEIGHT_BANDWIDTH_REACHED * bandwidth)
    kv_s = load.context_tokens * shape.kv_bytes_per_token / (_KV_BANDWIDTH_REACHED * bandwidth)
    return _OVERHEAD_S + max(compute_s, weights_s) + kv_s
