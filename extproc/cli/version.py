"""`inferact version`."""

from typing import Annotated

import typer

from extproc import __version__


def version() -> None:
    """Print the version."""
    typer.echo(f"inferact {__version__}")


def _asked(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_asked, is_eager=True, help="Print the version.")
]


def options(_version: _Version = False) -> None:
    """Route OpenAI-compatible requests over your own inference engines."""
