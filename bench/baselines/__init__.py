"""The routing policies that others published, each by its own rules and constants."""

from bench.baselines.dynamo import Dynamo
from bench.baselines.llmd import StickyUntilSaturated
from bench.baselines.lmetric import LMetric, LMetricQueued
from bench.baselines.preble import Preble
from bench.baselines.sglang import CacheAware
from bench.baselines.simple import ConsistentHash, LeastLoaded, RandomPick, RoundRobin
from extproc.simulator.replay.picking import PickerFactory

BASELINES: dict[str, PickerFactory] = {
    "random": RandomPick,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "consistent-hash": ConsistentHash,
    "sglang": CacheAware,
    "llm-d": StickyUntilSaturated,
    "lmetric": LMetric,
    "lmetric-queued": LMetricQueued,
    "dynamo": Dynamo,
    "preble": Preble,
}
"""All of them, by the names the tables use."""
