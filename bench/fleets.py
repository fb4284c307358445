"""The fleets of the benchmark, by name."""

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


def nodes_on(*hardware: Hardware) -> tuple[NodeConfig, ...]:
    """A node on each."""
    return tuple(
        NodeConfig(
            id=f"{kind}-{number}",
            hardware=kind,
            backend=Backend.VLLM,
            endpoint="http://10.0.0.1",
            models=(MODEL,),
        )
        for number, kind in enumerate(hardware)
    )


FLEETS = {
    "a100x8": nodes_on(*[Hardware.A100_80G] * 8),
    "mixed": nodes_on(*_MIXED),
    "mixed64": nodes_on(*_MIXED * 8),
}
"""The last is eight times the mixed one."""
