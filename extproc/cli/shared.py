"""What commands have in common: their options, and how they fail."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from extproc.client import DEFAULT_URL

if TYPE_CHECKING:
    from extproc.config import Config

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration file.", show_default=False)
]
Url = Annotated[
    str, typer.Option("--url", metavar="URL", envvar="INFERACT_URL", help="Where the service is.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

FAILED = 1
URL = DEFAULT_URL


def fail(message: str) -> NoReturn:
    """End the command with one line on stderr. Exit code 1."""
    typer.echo(f"inferact: {' '.join(message.split())}", err=True)
    raise typer.Exit(FAILED)


@contextlib.contextmanager
def one_line(*errors: type[Exception]) -> Iterator[None]:
    """Show these errors, and any `OSError`, as one line; exit code 1."""
    try:
        yield
    except (*errors, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise  # whoever read our output has seen enough
        fail(str(error))


def loaded(path: Path, serving: bool = False) -> "Config":
    """The configuration, or the end of the command with a line a problem. Exit code 1.

    `serving` also checks what only serving needs: API keys in the environment, and TLS files.
    """
    import os

    from extproc.config import ConfigError, load_config

    try:
        return load_config(path, os.environ if serving else None)
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(str(problem), err=True)
        raise typer.Exit(FAILED) from None
