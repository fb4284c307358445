"""`inferact status`: the fleet as a table."""

import contextlib
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.cli.client import Answer, Client, ClientError
from extproc.cli.shared import URL, AsJson, Url, one_line, print_json
from extproc.cli.table import Columns, fitted, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

_REFRESH_S = 1.0
_COLUMNS = Columns(
    titles=("node", "hardware", "status", "in\nflight", "total", "KV\nused", "prefix\nhits", "p99", "models"),
    texts=("node", "hardware", "status", "models"),
    wraps="models",
    expendable=("models", "p99", "prefix\nhits", "KV\nused", "hardware", "total", "in\nflight", "status"),
)
_COLOURS = {"healthy": "green", "degraded": "yellow", "offline": "red"}


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it, until Ctrl-C.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Show the nodes: health, load, cache use. With `--watch --json`, one line a second."""
    ending = contextlib.suppress(KeyboardInterrupt) if watch else contextlib.nullcontext()  # that is its end
    with one_line(ClientError), ending:
        client = Client(url)
        if watch and as_json:
            _stream(client)
        elif watch:
            _watch(client)
        elif as_json:
            print_json(client.status())
        else:
            console = terminal()
            console.print(_overview(client.status(), console.width))


def _stream(client: Client) -> None:
    while True:
        typer.echo(json.dumps(client.status()))
        time.sleep(_REFRESH_S)


def _watch(client: Client) -> None:
    """Redraw in place; a service that is away for a moment is shown as such."""
    from rich.live import Live

    console = terminal()
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
    return Group(Text(head), fitted(_COLUMNS, map(_cells, nodes), width), *errors)


def _cells(node: Answer) -> dict[str, str]:
    """A node's row, by the titles of the columns."""
    from rich.markup import escape

    health = str(node.get("status", "?"))
    state = f"[{_COLOURS.get(health, 'default')}]{escape(health)}[/]"
    return {
        "node": escape(str(node.get("id", "?"))),
        "hardware": escape(str(node.get("hardware", "?"))),
        "status": f"{state}, drained" if node.get("drained") else state,
        "in\nflight": str(node.get("requests_in_flight", "-")),
        "total": str(node.get("requests_total", "-")),
        "KV\nused": _number(node.get("kv_cache_used_pct"), "%"),
        "prefix\nhits": _number(node.get("prefix_hit_ratio"), "%", scale=100),
        "p99": _number(node.get("p99_latency_ms"), " ms"),
        "models": escape(", ".join(map(str, node.get("models") or ()))),
    }


def _number(value: object, unit: str, scale: float = 1) -> str:
    return f"{value * scale:.0f}{unit}" if isinstance(value, int | float) else "-"


def _duration(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
