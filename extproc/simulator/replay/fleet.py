"""Simulated fleets: an idle engine for each node of a configuration."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from extproc.config import NodeConfig
from extproc.hardware import HardwareProfile, kv_capacity_tokens, model_shape
from extproc.simulator.replay.engine import Engine
from extproc.simulator.replay.picking import NodeInfo

SPEEDS = (0.7, 1.3)
"""Bounds of a node's hidden factors, for compute and for memory: no router is told them."""


class FleetError(ValueError):
    """A fleet that cannot be simulated; the message names the node."""


@dataclass(slots=True)
class Fleet:
    """Engines, and what routers may know of them, in the same order."""

    engines: list[Engine]
    nodes: list[NodeInfo]


def make_fleet(configs: Sequence[NodeConfig], seed: int | None = None) -> Fleet:
    """Idle engines with empty caches. With a `seed` they are not as fast as their data sheets say.

    A node's first model gives its engine's size. Raises `FleetError`: it does not fit into the memory.
    """
    rng = random.Random(f"{seed} speeds")
    fleet = Fleet([], [])
    for config in configs:
        model, profile = config.engine_model(config.models[0]), config.profile
        shape = model_shape(model)
        capacity = kv_capacity_tokens(profile, shape)
        if not capacity:
            raise FleetError(f"node `{config.id}`: `{model}` does not fit into its {profile.vram_gb:g} GB")
        true = profile if seed is None else _hidden(profile, rng)
        fleet.engines.append(Engine(true, shape, capacity))
        fleet.nodes.append(NodeInfo(config, profile, shape, capacity))
    return fleet


def _hidden(profile: HardwareProfile, rng: random.Random) -> HardwareProfile:
    return replace(
        profile,
        compute_tflops=profile.compute_tflops * rng.uniform(*SPEEDS),
        memory_bandwidth_gbps=profile.memory_bandwidth_gbps * rng.uniform(*SPEEDS),
    )
