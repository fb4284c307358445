"""`inferact replay`: what a fleet and a policy would do with a recorded load."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.cli.shared import AsJson, ConfigFile, loaded, one_line, print_json
from extproc.cli.table import terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.config import CachePolicy, Config
    from extproc.simulator.replay.comparison import Load
    from extproc.simulator.replay.report import Panel

_POLICIES = "lru,prefix-aware,adaptive"

_Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="The recorded load.", show_default=False)]
_Policies = Annotated[str, typer.Option("--policies", metavar="A,B,C", help="The policies to compare.")]
_Speed = Annotated[float, typer.Option(min=0.001, max=1000, help="Times the recorded rate.")]
_Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N requests.")]
_Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="What all requests ask for, whatever the trace says.")
]
_Seed = Annotated[int, typer.Option(help="Of all chance: equal nodes, arrivals within a tick of the clock.")]
_Chart = Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw a chart, too.")]


def replay(
    trace: _Trace,
    config: ConfigFile,
    policies: _Policies = _POLICIES,
    speed: _Speed = 1.0,
    limit: _Limit = None,
    model: _Model = None,
    seed: _Seed = 0,
    as_json: AsJson = False,
    chart: _Chart = None,
) -> None:
    """Replay a recorded load over a fleet, in simulated time, under each policy.

    The router is the one that serves requests. Nothing is sent to the nodes of the
    configuration: their engines are simulated, as fast as their hardware.

    TRACE is Mooncake's JSON lines, Azure's CSV, or the access log of Inferact's Envoy.
    The last two tell loads and lengths, but no shared prefixes: no cache is ever hit,
    so they tell fleets apart, and not policies.

    Columns: mean time to first token (TTFT, s), its ratio to the best policy's, its
    percentiles, mean time to the end of the answer (s), prompt tokens found in caches,
    prefill time of the busiest node over the mean, and the time of a decision (us).
    """
    chosen = _chosen(policies)
    _check_chart(chart)
    settings = loaded(config)
    load = _load(trace, settings, speed, limit, model, seed)
    panel = _compared(f"{trace.name}, {speed:g} x recorded rate", settings, load, chosen, seed)
    if as_json:
        print_json(_data(trace, load, panel))
    else:
        from extproc.simulator.replay.table import table

        terminal().print(table(panel))
    if chart:
        from extproc.simulator.replay.chart import draw

        with one_line():
            chart.write_text(draw([panel]), encoding="utf-8")
    for note in _notes(load, panel):
        typer.echo(note, err=True)


def _chosen(text: str) -> "list[CachePolicy]":
    """Read `a,b,c`; what is named twice is replayed once."""
    from extproc.config import CachePolicy

    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in list(CachePolicy):
            raise typer.BadParameter(
                f"`{name}` is no policy: {', '.join(CachePolicy)}", param_hint="--policies"
            )
    return [CachePolicy(name) for name in names]


def _check_chart(path: Path | None) -> None:
    """Before the replay, which takes longer."""
    if path and path.suffix != ".svg":
        raise typer.BadParameter("a chart is an SVG file: name it .svg", param_hint="--chart")
    if path and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}", param_hint="--chart")


def _load(
    path: Path, config: "Config", speed: float, limit: int | None, model: str | None, seed: int
) -> "Load":
    from extproc.simulator.replay.comparison import load_on
    from extproc.simulator.replay.formats import read_trace
    from extproc.simulator.replay.traces import TraceError, scaled

    if model and model not in config.models:
        raise typer.BadParameter(f"no node serves it: {', '.join(config.models)}", param_hint="--model")
    with one_line(TraceError):
        trace = read_trace(path, seed)
    load = load_on(config, scaled(trace.requests[:limit], speed), model)
    return replace(load, notes=(*trace.notes, *load.notes))


def _compared(
    source: str, config: "Config", load: "Load", policies: "list[CachePolicy]", seed: int
) -> "Panel":
    """Replay, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from extproc.simulator.replay.comparison import compare
    from extproc.simulator.replay.fleet import FleetError
    from extproc.simulator.replay.report import NoAnswerError, Panel

    console = Console(stderr=True)
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    with one_line(FleetError, NoAnswerError), progress:
        rows = compare(
            config, load, policies, seed, lambda requests, name: progress.track(requests, description=name)
        )
    seconds = load.requests[-1].arrival_s - load.requests[0].arrival_s
    title = f"{source}: {len(load.requests)} requests in {seconds:.0f} s on {len(load.nodes)} nodes"
    return Panel.of(title, rows)


def _data(trace: Path, load: "Load", panel: "Panel") -> dict[str, object]:
    """All of it, for programs."""
    import msgspec

    return {
        "trace": str(trace),
        "requests": len(load.requests),
        "duration_s": load.requests[-1].arrival_s - load.requests[0].arrival_s,
        "nodes": [node.id for node in load.nodes],
        "notes": list(_notes(load, panel)),
        "policies": {name: msgspec.to_builtins(row) for name, row in panel.rows},
    }


def _notes(load: "Load", panel: "Panel") -> "Iterator[str]":
    """What one should know of the figures."""
    yield from load.notes
    for name, row in panel.rows:
        if row.overloaded:
            late = f"{row.late_ratio:.0%} of the requests waited for a first token as the last one arrived"
            yield f"{name}: too much for this fleet ({late}): the longer the trace, the longer the times."
