"""The cells of a benchmark: each policy under each workload, run in processes of their own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from bench.baselines import BASELINES
from bench.fleets import FLEETS
from bench.policies import POLICIES
from bench.saturation import saturation_rate
from extproc.simulator.replay.fleet import make_fleet
from extproc.simulator.replay.formats import read_trace
from extproc.simulator.replay.loop import replay
from extproc.simulator.replay.report import Summary, summarize
from extproc.simulator.replay.traces import Part, TraceRequest, part_of, rate, scaled

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
    """Cells to be replayed."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._workloads = list(dict.fromkeys(cell.workload for cell in cells))
        self._cells = cells

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
    return part_of(read_trace(path, seed).requests, part)


def _asked(workload: Workload) -> list[TraceRequest]:
    return _requests(workload.directory / TRACES[workload.trace], workload.part, workload.seed)


def _saturation(workload: Workload) -> float:
    nodes, least_loaded = FLEETS[workload.fleet], BASELINES["least-loaded"]
    return saturation_rate(_asked(workload), nodes, least_loaded, workload.seed)


def _replay(cell: Cell, saturation: float) -> Result:
    (_, trace, part, fleet_name, seed), load_pct, policy = cell
    requests = _asked(cell.workload)
    wanted = saturation * load_pct / 100
    fleet = make_fleet(FLEETS[fleet_name], seed)
    picker = POLICIES[policy](fleet.nodes, seed)
    outcome = replay(scaled(requests, wanted / rate(requests)), fleet, picker, seed)
    return Result(trace, part, fleet_name, seed, load_pct, policy, wanted, summarize(outcome))
