"""Every policy that a replay can judge, by name."""

from bench.baselines import BASELINES
from extproc.simulator.replay.picking import PickerFactory

POLICIES: dict[str, PickerFactory] = {**BASELINES}
"""The baselines; our own router's policies join them here."""
