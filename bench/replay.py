"""Who picks nodes best: traces of real traffic, replayed over simulated fleets, under every policy.

    .venv/bin/python -m bench.replay [--quick | --full] [--json FILE] [--svg FILE]

A load of 100 % is the rate at which the least-loaded policy leaves over 3 % of the requests without a first
token as the last one arrives. Nodes are up to 30 % faster or slower than their data sheets, which no policy
is told. Constants are chosen on the first half of a trace (`--part first`) and with seeds 0, 1 and 2; they
are judged on the second half and with other seeds.

Columns: mean time to first token (s) and its ratio to the best, percentiles of it, mean time to the end of
the answer (s), prompt tokens found in caches, prefill seconds of the busiest node over the mean, and the
mean real time of a pick. Requests that a node could never hold are refused and not counted in the times.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.fleets import FLEETS
from bench.grid import TRACES, Cell, Grid, Result, Workload
from bench.policies import POLICIES
from extproc.cli.table import terminal
from extproc.simulator.replay.chart import draw
from extproc.simulator.replay.report import Panel, Summary, mean_of
from extproc.simulator.replay.table import table
from extproc.simulator.replay.traces import Part, TraceError

_TRACES_DIR = Path(__file__).parents[2] / "shared" / "traces"


class Block(NamedTuple):
    """Every trace over every fleet, at every load (% of saturation), with every seed."""

    trace: Sequence[str]
    fleet: Sequence[str]
    load: Sequence[int]
    seed: Sequence[int]


SEEDS = range(101, 121)
"""Those of reported figures."""
_EIGHT = ("a100x8", "mixed")
_QUICK = (Block(("conversation", "synthetic"), _EIGHT, (70,), SEEDS[:1]),)
_USUAL = (
    Block(tuple(TRACES), _EIGHT, (50, 70, 85), SEEDS[:3]),
    Block(("conversation",), ("mixed64",), (70,), SEEDS[:1]),
)
_FULL = (Block(tuple(TRACES), (*_EIGHT, "mixed64"), (50, 70, 85), SEEDS),)

Group = tuple[str, str, int]
"""Trace, fleet, load."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells asked for, print the tables; the exit code."""
    options = _parse(arguments)
    try:
        results = _run(options)
    except TraceError as error:
        print(f"{error} Name the directory of the traces with --traces.", file=sys.stderr)
        return 2
    panels = _panels(results)
    for panel in panels:
        terminal().print(table(panel))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    if options.svg:
        options.svg.write_text(draw(panels))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bench.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", dest="size", const=_QUICK, help="a minute")
    size.add_argument(
        "--full", action="store_const", dest="size", const=_FULL, help="about 3 hours of processor time"
    )
    parser.add_argument("--traces", type=Path, default=_TRACES_DIR, metavar="DIR", help="where they are")
    parser.add_argument("--part", type=Part, choices=list(Part), default=Part.SECOND, help="of each trace")
    parser.add_argument("--trace", nargs="+", choices=list(TRACES))
    parser.add_argument("--fleet", nargs="+", choices=list(FLEETS))
    parser.add_argument("--load", nargs="+", type=int, metavar="PCT", help="of saturation")
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--seed", nargs="+", type=int, metavar="N", help="averages are over these")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--json", type=_output, metavar="FILE", help="every result, for programs")
    parser.add_argument("--svg", type=_output, metavar="FILE", help="a chart")
    options = parser.parse_args(arguments)
    if min(options.load or [1]) < 1 or options.workers < 1:
        parser.error("--load and --workers start at 1")
    return options


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Those of the size asked for, where no option says otherwise."""
    for block in options.size or _USUAL:
        chosen = (getattr(options, name) or values for name, values in block._asdict().items())
        for trace, fleet, load_pct, seed, policy in product(*chosen, options.policy):
            yield Cell(Workload(options.traces, trace, options.part, fleet, seed), load_pct, policy)


def _output(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    return path


def _run(options: argparse.Namespace) -> list[Result]:
    grid = Grid(list(dict.fromkeys(_cells(options))))
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=len(grid))
        return grid.run(options.workers, lambda: progress.advance(task))


def _panels(results: Sequence[Result]) -> list[Panel]:
    """For each workload and load the policies, averaged over seeds."""
    seeds: dict[Group, dict[str, list[Summary]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        seeds[result.trace, result.fleet, result.load_pct][result.policy].append(result.summary)
    return [
        Panel.of(
            f"{trace}, {fleet}, {load_pct} % load",
            ((policy, mean_of(summaries)) for policy, summaries in policies.items()),
        )
        for (trace, fleet, load_pct), policies in seeds.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
