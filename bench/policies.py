"""Every policy that a replay can judge, by name."""

from bench.baselines import BASELINES
from extproc.simulator.replay.picking import PickerFactory
from extproc.simulator.replay.routers import ROUTERS

POLICIES: dict[str, PickerFactory] = {**BASELINES, **ROUTERS}
"""The baselines, and our own router."""
