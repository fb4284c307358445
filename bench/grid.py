"""The cells of a benchmark: each policy under each workload, run in processes of their own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from bench.baselines import BASELINES
from bench.policies import POLICIES
from extproc.simulator.replay.fleet import FLEETS, make_fleet
from extproc.simulator.replay.loop import replay
from extproc.simulator.replay.report import Summary, summarize
from extproc.simulator.replay.saturation import saturation_rate
from extproc.simulator.replay.traces import Part, TraceRequest, part_of, rate, read_trace, scaled

T = TypeVar("T")

TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
    "azure": "azure2023_conv.csv",
}
"""The traces by name, and their files."""


class Workload(NamedTuple):
    """What is asked of which fleet: a part of a trace; `seed` sets its arrivals and the nodes' speeds."""

    directory: Path
    trace: str
    part: Part
    fleet: str
    seed: int


class Cell(NamedTuple):
    """One replay: a policy under a workload, at a share of the fleet's saturation."""

    workload: Workload
    load_pct: int
    policy: str


class Result(msgspec.Struct, frozen=True):
    """What became of a cell. `rate` is in requests a second."""

    trace: str
    part: Part
    fleet: str
    seed: int
    load_pct: int
    policy: str
    rate: float
    summary: Summary


class Grid:
    """All policies at all loads under all workloads."""

    def __init__(
        self, workloads: Sequence[Workload], loads_pct: Sequence[int], policies: Sequence[str]
    ) -> None:
        self._workloads = workloads
        self._cells = [Cell(*cell) for cell in product(workloads, loads_pct, policies)]

    def __len__(self) -> int:
        return len(self._workloads) + len(self._cells)

    def run(self, workers: int, on_done: Callable[[], None]) -> list[Result]:
        """The results in order; `on_done` is called `len` times on the way.

        Each workload's saturation is found first. Raises what a process raised, `TraceError` among others.
        """
        with ProcessPoolExecutor(workers) as pool:
            try:
                searches = [pool.submit(_saturation, workload) for workload in self._workloads]
                rates = dict(zip(self._workloads, _gather(searches, on_done), strict=True))
                replays = [pool.submit(_replay, cell, rates[cell.workload]) for cell in self._cells]
                return _gather(replays, on_done)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _gather(futures: Sequence[Future[T]], on_done: Callable[[], None]) -> list[T]:
    for future in as_completed(futures):
        future.result()
        on_done()
    return [future.result() for future in futures]


@lru_cache(maxsize=4)
def _requests(path: Path, part: Part, seed: int) -> list[TraceRequest]:
    return part_of(read_trace(path, seed), part)


def _asked(workload: Workload) -> list[TraceRequest]:
    return _requests(workload.directory / TRACES[workload.trace], workload.part, workload.seed)


def _saturation(workload: Workload) -> float:
    hardware = FLEETS[workload.fleet]
    return saturation_rate(_asked(workload), hardware, BASELINES["least-loaded"], workload.seed)


def _replay(cell: Cell, saturation: float) -> Result:
    (_, trace, part, fleet_name, seed), load_pct, policy = cell
    requests = _asked(cell.workload)
    wanted = saturation * load_pct / 100
    fleet = make_fleet(FLEETS[fleet_name], seed)
    picker = POLICIES[policy](fleet.nodes, seed)
    outcome = replay(scaled(requests, wanted / rate(requests)), fleet, picker, seed)
    return Result(trace, part, fleet_name, seed, load_pct, policy, wanted, summarize(outcome))
