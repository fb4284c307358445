"""`inferact version`."""

import typer

from extproc import __version__


def version() -> None:
    """Print the version."""
    typer.echo(f"inferact {__version__}")
