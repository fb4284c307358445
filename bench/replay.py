"""Who picks nodes best: traces of real traffic, replayed over simulated fleets, under every policy.

    .venv/bin/python -m bench.replay [--quick | --full] [--json FILE] [--svg FILE]

A load of 100 % is the rate at which the least-loaded policy leaves over 3 % of the requests without a first
token as the last one arrives. Nodes are up to 30 % faster or slower than their data sheets, which no policy
is told. Constants are chosen on the first half of a trace (`--part first`) and judged on the second.

Columns: mean time to first token (s) and its ratio to the best, percentiles of it, mean time to the end of
the answer (s), prompt tokens found in caches, prefill seconds of the busiest node over the mean, and the
mean real time of a pick. Requests that a node could never hold are refused and not counted in the times.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.grid import TRACES, Grid, Result, Workload
from bench.policies import POLICIES
from extproc.simulator.replay.chart import Panel, draw
from extproc.simulator.replay.fleet import FLEETS
from extproc.simulator.replay.report import Summary, mean_of
from extproc.simulator.replay.traces import Part, TraceError

_TRACES_DIR = Path(__file__).parents[2] / "shared" / "traces"
_QUICK = {"trace": ["conversation", "synthetic"], "fleet": ["a100x8", "mixed"], "load": [70], "seeds": 1}
_USUAL = {"trace": list(TRACES), "fleet": ["a100x8", "mixed"], "load": [50, 70, 85], "seeds": 5}
_FULL = {"trace": list(TRACES), "fleet": list(FLEETS), "load": [50, 70, 85], "seeds": 20}

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
    groups = _grouped(results)
    for group, rows in groups.items():
        Console().print(_table(group, rows))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    if options.svg:
        options.svg.write_text(draw([Panel(_title(group), rows) for group, rows in groups.items()]))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bench.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", dest="size", const=_QUICK, help="under a minute")
    size.add_argument("--full", action="store_const", dest="size", const=_FULL, help="up to two hours")
    parser.add_argument("--traces", type=Path, default=_TRACES_DIR, metavar="DIR", help="where they are")
    parser.add_argument("--part", type=Part, choices=list(Part), default=Part.SECOND, help="of each trace")
    parser.add_argument("--trace", nargs="+", choices=list(TRACES))
    parser.add_argument("--fleet", nargs="+", choices=list(FLEETS))
    parser.add_argument("--load", nargs="+", type=int, metavar="PCT", help="of saturation")
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--seeds", type=int, metavar="N", help="replays of each cell, averaged")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--json", type=_output, metavar="FILE", help="every result, for programs")
    parser.add_argument("--svg", type=_output, metavar="FILE", help="a chart")
    options = parser.parse_args(arguments)
    for name, value in (options.size or _USUAL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if min(options.load) < 1 or options.seeds < 1 or options.workers < 1:
        parser.error("--load, --seeds and --workers start at 1")
    return options


def _output(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    return path


def _run(options: argparse.Namespace) -> list[Result]:
    workloads = [
        Workload(options.traces, trace, options.part, fleet, seed)
        for trace in options.trace
        for fleet in options.fleet
        for seed in range(options.seeds)
    ]
    grid = Grid(workloads, options.load, options.policy)
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=len(grid))
        return grid.run(options.workers, lambda: progress.advance(task))


def _grouped(results: Sequence[Result]) -> dict[Group, list[tuple[str, Summary]]]:
    """For each workload and load the policies, averaged over seeds, the best mean TTFT first."""
    seeds: dict[Group, dict[str, list[Summary]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        seeds[result.trace, result.fleet, result.load_pct][result.policy].append(result.summary)
    return {
        group: sorted(
            ((policy, mean_of(summaries)) for policy, summaries in policies.items()),
            key=lambda row: row[1].ttft_mean_s,
        )
        for group, policies in seeds.items()
    }


def _title(group: Group) -> str:
    trace, fleet, load_pct = group
    return f"{trace}, {fleet}, {load_pct} % load"


def _table(group: Group, rows: Sequence[tuple[str, Summary]]) -> Table:
    """A table 80 columns wide. Times in seconds, but of a pick: microseconds."""
    table = Table(title=_title(group), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("policy", no_wrap=True)
    headings = ["TTFT", "x best", "p50", "p90", "p99", "end", "hits", "spread", "pick us"]
    if refused := any(row.refused for _, row in rows):
        headings.append("refused")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    best_s = rows[0][1].ttft_mean_s
    for policy, row in rows:
        times = (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s, row.latency_mean_s)
        table.add_row(
            policy,
            _short(row.ttft_mean_s),
            _short(row.ttft_mean_s / best_s),
            *map(_short, times),
            f"{row.hit_ratio:.1%}",
            f"{row.load_spread:.2f}",
            f"{row.pick_mean_us:.0f}",
            *([str(row.refused)] if refused else []),
        )
    return table


def _short(value: float) -> str:
    """At least two digits that tell something, in few characters."""
    if value >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
