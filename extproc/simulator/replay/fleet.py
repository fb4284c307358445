"""Simulated fleets: named sets of hardware, each node a little faster or slower than its data sheet."""

import random
from dataclasses import dataclass, replace

from extproc.hardware import PROFILES, Hardware, kv_capacity_tokens, model_shape
from extproc.simulator.replay.engine import Engine
from extproc.simulator.replay.picking import NodeInfo

MODEL = "8B"
"""What all nodes serve: its weights fit everywhere, with little KV memory left on the smallest card."""
SPEEDS = (0.7, 1.3)
"""Bounds of a node's hidden factors, for compute and for memory: no router is told them."""

_MIXED = (
    Hardware.H100_80G,
    *[Hardware.A100_80G] * 3,
    Hardware.A100_40G,
    *[Hardware.RTX_4090] * 2,
    Hardware.A6000,
)
FLEETS: dict[str, tuple[Hardware, ...]] = {
    "a100x8": (Hardware.A100_80G,) * 8,
    "mixed": _MIXED,
    "mixed64": _MIXED * 8,
}
"""The fleets by name."""


@dataclass(slots=True)
class Fleet:
    """Engines, and what routers may know of them, in the same order."""

    engines: list[Engine]
    nodes: list[NodeInfo]


def make_fleet(hardware: tuple[Hardware, ...], seed: int, model: str = MODEL) -> Fleet:
    """Idle engines on this hardware, with empty caches; `seed` sets their hidden factors."""
    rng = random.Random(f"{seed} speeds")
    shape = model_shape(model)
    fleet = Fleet([], [])
    for number, kind in enumerate(hardware):
        profile = PROFILES[kind]
        capacity = kv_capacity_tokens(profile, shape)
        true = replace(
            profile,
            compute_tflops=profile.compute_tflops * rng.uniform(*SPEEDS),
            memory_bandwidth_gbps=profile.memory_bandwidth_gbps * rng.uniform(*SPEEDS),
        )
        fleet.engines.append(Engine(true, shape, capacity))
        fleet.nodes.append(NodeInfo(f"{kind}-{number}", kind, profile, shape, capacity))
    return fleet
