"""`inferact check --probe`: the nodes of a configuration, as they answer now."""

import asyncio
from typing import TYPE_CHECKING

import msgspec
import typer

from extproc.cli.shared import FAILED, print_json
from extproc.cli.table import Columns, fitted, terminal

if TYPE_CHECKING:
    from extproc.config import Config
    from extproc.engines.probe import NodeProbe

_COLUMNS = Columns(
    titles=("node", "engine", "version", "answers", "models", "KV tokens", "cached\ntokens", "KV\nevents"),
    texts=("node", "engine", "version", "answers", "models", "cached\ntokens", "KV\nevents"),
    wraps="models",
    expendable=("version", "engine", "KV tokens", "KV\nevents", "cached\ntokens", "models"),
)
_KNOWN = {True: "[green]yes[/]", False: "[yellow]no[/]", None: "-"}


def probe(settings: "Config", as_json: bool) -> None:
    """Ask all nodes at once, and show what they say. Exit code 1 if one cannot be used as configured."""
    found = asyncio.run(_ask(settings))
    if as_json:
        print_json({"nodes": [msgspec.to_builtins(node) for node in found]})
    else:
        _show(found)
    if not all(node.is_usable for node in found):
        raise typer.Exit(FAILED)


async def _ask(settings: "Config") -> "list[NodeProbe]":
    from extproc.engines.client import open_session
    from extproc.engines.probe import probe

    async with open_session() as session:
        return await asyncio.gather(*(probe(session, node) for node in settings.nodes))


def _show(found: "list[NodeProbe]") -> None:
    from rich.text import Text

    console = terminal()
    console.print(fitted(_COLUMNS, map(_cells, found), console.width))
    for node in found:
        if node.error:
            console.print(Text(f"{node.node}: {node.error}", "red"))
        for advice in node.advice:
            console.print(Text(f"{node.node}: {advice}", "red" if node.not_served else "yellow"))


def _cells(found: "NodeProbe") -> dict[str, str]:
    from rich.markup import escape

    served = "-" if found.serves is None else escape(", ".join(found.serves))
    return {
        "node": escape(found.node),
        "engine": escape(found.engine),
        "version": escape(found.version or "-"),
        "answers": "[red]no[/]" if found.error else _KNOWN[True],
        "models": f"[red]{served}[/]" if found.not_served else served,
        "KV tokens": "-" if found.kv_capacity_tokens is None else f"{found.kv_capacity_tokens:,}",
        "cached\ntokens": _KNOWN[found.tells_cached_tokens],
        "KV\nevents": _KNOWN[found.kv_events],
    }
