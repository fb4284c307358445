"""What hardware and a model's name predict: prefill seconds, decode seconds, KV capacity. Arithmetic only."""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

# Shares of the data sheet that real engines reach: arithmetic in prefill, memory reads of weights and of KV.
FLOPS_REACHED = 0.45
WEIGHT_BANDWIDTH_REACHED = 0.7
KV_BANDWIDTH_REACHED = 0.55
# Share of the memory an engine takes for weights and KV blocks; the rest is activations and the runtime.
_VRAM_USABLE = 0.9
_CUSTOM_TFLOPS_PER_GBPS = 0.2
# GB/s of a transfer between nodes: NVLink (A100 data sheet: 300 a direction), else a network of 100 Gbit/s,
# both at about two thirds of what they are sold as.
_NVLINK_GBPS = 200.0
_NETWORK_GBPS = 8.0

_DEFAULT_PARAMETERS = 8e9
_EXPERTS_PER_TOKEN = 2
_KV_WIDTH = 8 * 128
_KV_BYTES_PER_VALUE = 2


class Hardware(StrEnum):
    """The hardware identifiers a configuration may name."""

    A100_80G = "a100-80g"
    A100_40G = "a100-40g"
    H100_80G = "h100-80g"
    RTX_4090 = "rtx-4090"
    A6000 = "a6000"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What one node's accelerators can do: GB/s, dense BF16 TFLOP/s, GB (10^9 bytes)."""

    memory_bandwidth_gbps: float
    compute_tflops: float
    vram_gb: float
    nvlink: bool

    @classmethod
    def custom(
        cls,
        memory_bandwidth_gbps: float,
        vram_gb: float,
        nvlink: bool = False,
        compute_tflops: float | None = None,
    ) -> "HardwareProfile":
        """A profile for unlisted hardware; TFLOP/s default to the listed cards' median ratio to GB/s."""
        if compute_tflops is None:
            compute_tflops = _CUSTOM_TFLOPS_PER_GBPS * memory_bandwidth_gbps
        return cls(memory_bandwidth_gbps, compute_tflops, vram_gb, nvlink)

    def scaled(self, gpu_count: int) -> "HardwareProfile":
        """The profile of a node made of `gpu_count` such accelerators."""
        return HardwareProfile(
            self.memory_bandwidth_gbps * gpu_count,
            self.compute_tflops * gpu_count,
            self.vram_gb * gpu_count,
            self.nvlink,
        )


PROFILES: dict[Hardware, HardwareProfile] = {
    Hardware.A100_80G: HardwareProfile(2039, 312, 80, nvlink=True),
    Hardware.A100_40G: HardwareProfile(1555, 312, 40, nvlink=True),
    Hardware.H100_80G: HardwareProfile(3350, 989, 80, nvlink=True),
    Hardware.RTX_4090: HardwareProfile(1008, 165, 24, nvlink=False),
    Hardware.A6000: HardwareProfile(768, 155, 48, nvlink=True),  # a bridge joins pairs
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model costs to run: parameters (in all, and per token), layers, width, bytes."""

    parameters: float
    active_parameters: float
    layers: int
    width: int
    weight_bytes_per_parameter: float
    kv_bytes_per_token: int


# parameters -> (layers, width) of well-known dense models of that size.
_SHAPES: dict[float, tuple[int, int]] = {
    1e9: (16, 2048),
    3e9: (28, 3072),
    8e9: (32, 4096),
    14e9: (40, 5120),
    32e9: (64, 5120),
    70e9: (80, 8192),
    405e9: (126, 16384),
}

_SIZE = re.compile(r"(?<![a-z0-9.])(\d{1,6}(?:\.\d{1,6})?)([bm])(?![a-z0-9])")
_EXPERTS = re.compile(r"(?<![a-z0-9.])(\d{1,3})x(\d{1,6}(?:\.\d{1,6})?)b(?![a-z0-9])")
_ACTIVE = re.compile(r"(?<![a-z0-9.])a(\d{1,6}(?:\.\d{1,6})?)b(?![a-z0-9])")
_ONE_BYTE = re.compile(r"fp8|int8|w8a8|8[-_]?bit|q8_")
_HALF_BYTE = re.compile(r"awq|gptq|4[-_]?bit|int4|fp4|w4a16|q4[-_]")


@lru_cache(maxsize=1024)
def model_shape(name: str) -> ModelShape:
    """The shape a name tells: `8B`, `8x7B`, `30B-A3B`, `270m`, `FP8`, `AWQ`; else that of an 8B model."""
    name = name.lower()
    total, active, body = _parameters(name)
    layers, width = _SHAPES[min(_SHAPES, key=lambda known: max(known, body) / min(known, body))]
    return ModelShape(
        parameters=total,
        active_parameters=active,
        layers=layers,
        width=width,
        weight_bytes_per_parameter=_weight_bytes(name),
        kv_bytes_per_token=2 * layers * _KV_WIDTH * _KV_BYTES_PER_VALUE,
    )


def _parameters(name: str) -> tuple[float, float, float]:
    """Parameters in all, those a token passes through, and those of the dense model of the same body."""
    if experts := _EXPERTS.search(name):
        count, expert = int(experts[1]), float(experts[2]) * 1e9
        if count > 0 and expert > 0:
            return count * expert, min(count, _EXPERTS_PER_TOKEN) * expert, expert
    size = _SIZE.search(name)
    total = float(size[1]) * (1e9 if size[2] == "b" else 1e6) if size else 0.0
    if total <= 0:
        return _DEFAULT_PARAMETERS, _DEFAULT_PARAMETERS, _DEFAULT_PARAMETERS
    active = _ACTIVE.search(name)
    per_token = float(active[1]) * 1e9 if active else total
    if not 0 < per_token <= total:
        per_token = total
    return total, per_token, per_token


def _weight_bytes(name: str) -> float:
    if _ONE_BYTE.search(name):
        return 1.0
    return 0.5 if _HALF_BYTE.search(name) else 2.0


def prefill_s(profile: HardwareProfile, shape: ModelShape, tokens: float, cached_tokens: float = 0) -> float:
    """Seconds to compute `tokens` prompt tokens that follow `cached_tokens` already in the KV cache.

    The compute roof of the roofline model (Williams et al., 2009): 2 FLOP a parameter and token, and
    4 * layers * width FLOP for each earlier token that a token attends to.
    """
    attended = cached_tokens + tokens / 2
    flop = tokens * (2 * shape.active_parameters + 4 * shape.layers * shape.width * attended)
    return flop / (FLOPS_REACHED * profile.compute_tflops * 1e12)


def decode_step_s(profile: HardwareProfile, shape: ModelShape, batch: float, context_tokens: float) -> float:
    """Seconds for one decode step of `batch` requests that hold `context_tokens` each.

    The memory roof of the roofline model: a step reads the weights once and every request's KV.
    Of a mixture of experts it reads those that the batch's tokens are expected to hit.
    """
    untouched = math.pow(1 - shape.active_parameters / shape.parameters, max(batch, 1))
    weights = shape.parameters * (1 - untouched) * shape.weight_bytes_per_parameter
    kv = batch * context_tokens * shape.kv_bytes_per_token
    bandwidth = profile.memory_bandwidth_gbps * 1e9
    return weights / (WEIGHT_BANDWIDTH_REACHED * bandwidth) + kv / (KV_BANDWIDTH_REACHED * bandwidth)


def transfer_token_s(shape: ModelShape, nvlink: bool) -> float:
    """Seconds to move the KV of one token from one node to another."""
    return shape.kv_bytes_per_token / ((_NVLINK_GBPS if nvlink else _NETWORK_GBPS) * 1e9)


@lru_cache(maxsize=1024)
def kv_capacity_tokens(profile: HardwareProfile, shape: ModelShape) -> int:
    """Tokens whose KV fits beside the weights; 0 when the weights alone do not fit."""
    weights = shape.parameters * shape.weight_bytes_per_parameter
    free = profile.vram_gb * 1e9 * _VRAM_USABLE - weights
    return max(0, int(free // shape.kv_bytes_per_token))
