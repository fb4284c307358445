"""`inferact status`: the fleet as a table."""

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.cli.client import Answer, Client, ClientError
from extproc.cli.shared import URL, AsJson, Url, one_line, print_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_REFRESH_S = 1.0
_FILE_WIDTH = 160
_WIDE = 110
"""Columns that leave room for the names of the models."""
_COLOURS = {"healthy": "green", "degraded": "yellow", "offline": "red"}


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it, until Ctrl-C.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Show the nodes: health, load, cache use. With `--watch --json`, one line a second."""
    with one_line(ClientError):
        client = Client(url)
        if watch and as_json:
            _stream(client)
        elif watch:
            _watch(client)
        elif as_json:
            print_json(client.status())
        else:
            console = _console()
            console.print(_overview(client.status(), console.width))


def _stream(client: Client) -> None:
    while True:
        typer.echo(json.dumps(client.status()))
        time.sleep(_REFRESH_S)


def _watch(client: Client) -> None:
    """Redraw in place; a service that is away for a moment is shown as such."""
    from rich.live import Live

    console = _console()
    if not console.is_terminal:
        while True:
            console.print(_overview(client.status(), console.width))
            time.sleep(_REFRESH_S)
    with Live(_overview(client.status(), console.width), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(_REFRESH_S)
            try:
                view = _overview(client.status(), console.width)
            except ClientError as error:
                view = str(error)
            live.update(view, refresh=True)


def _console() -> "Console":
    """A terminal as wide as it is; a file or a pipe as wide as the table may get."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def _overview(answer: Answer, width: int) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    head = (
        f"Inferact {answer.get('scheduler_version', '?')}, up {_duration(answer.get('uptime_seconds'))}, "
        f"policy {answer.get('policy', '?')}, {answer.get('queue_depth', 0)} queued, "
        f"{answer.get('total_requests_routed', 0)} routed"
    )
    nodes = answer.get("nodes", [])
    errors = [Text(f"configuration: {error}", "red") for error in answer.get("config_errors") or ()]
    errors += [
        Text(f"{node.get('id')}: {node['last_error']}", "red") for node in nodes if node.get("last_error")
    ]
    return Group(Text(head), _table(nodes, with_models=width >= _WIDE), *errors)


def _table(nodes: list[Answer], with_models: bool) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("node", "hardware", "status"):
        table.add_column(title, overflow="fold")
    for title in ("in\nflight", "total", "KV\nused", "prefix\nhits", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    if with_models:
        table.add_column("models")
    for node in nodes:
        cells = _cells(node)
        table.add_row(*(cells if with_models else cells[:-1]))
    return table


def _cells(node: Answer) -> list[str]:
    from rich.markup import escape

    health = str(node.get("status", "?"))
    state = f"[{_COLOURS.get(health, 'default')}]{escape(health)}[/]"
    return [
        escape(str(node.get("id", "?"))),
        escape(str(node.get("hardware", "?"))),
        f"{state}, drained" if node.get("drained") else state,
        str(node.get("requests_in_flight", "-")),
        str(node.get("requests_total", "-")),
        _number(node.get("kv_cache_used_pct"), "%"),
        _number(node.get("prefix_hit_ratio"), "%", scale=100),
        _number(node.get("p99_latency_ms"), " ms"),
        escape(", ".join(map(str, node.get("models") or ()))),
    ]


def _number(value: object, unit: str, scale: float = 1) -> str:
    return f"{value * scale:.0f}{unit}" if isinstance(value, int | float) else "-"


def _duration(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
