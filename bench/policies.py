"""Every policy that a replay can judge, by name."""

from bench.baselines import BASELINES
from bench.routers import ROUTERS
from extproc.simulator.replay.picking import PickerFactory

POLICIES: dict[str, PickerFactory] = {**BASELINES, **ROUTERS}
"""The baselines, and our own router."""
