"""The fleets of the benchmark, by name."""

from collections.abc import Mapping

from extproc.config import Backend, NodeConfig
from extproc.hardware import Hardware

MODEL = "8B"
"""What all nodes serve: its weights fit everywhere, with little KV memory left on the smallest card."""
_MIXED = (
    Hardware.H100_80G,
    *[Hardware.A100_80G] * 3,
    Hardware.A100_40G,
    *[Hardware.RTX_4090] * 2,
    Hardware.A6000,
)


_ROOMY = {"memory_bandwidth_gbps": 2039, "compute_tflops": 312, "vram_gb": 163.5, "nvlink": True}
"""An a100-80g with memory for a million tokens."""


def nodes_on(*hardware: Hardware, profile: Mapping[str, object] | None = None) -> tuple[NodeConfig, ...]:
    """A node on each; `profile`: of the custom ones."""
    settings = {"backend": Backend.VLLM, "endpoint": "http://10.0.0.1", "models": (MODEL,)}
    return tuple(
        NodeConfig.model_validate(
            {"id": f"{kind}-{number}", "hardware": kind, "hardware_profile": profile, **settings}
        )
        for number, kind in enumerate(hardware)
    )


FLEETS = {
    "a100x8": nodes_on(*[Hardware.A100_80G] * 8),
    "mixed": nodes_on(*_MIXED),
    "mixed64": nodes_on(*_MIXED * 8),
    "roomy": nodes_on(*[Hardware.CUSTOM] * 8, profile=_ROOMY),
}
"""The third is eight times the mixed one."""
