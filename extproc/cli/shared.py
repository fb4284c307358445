"""What commands have in common: their options, and how they fail."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from extproc.cli.client import DEFAULT_URL

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
    shown: tuple[type[Exception], ...] = (*errors, OSError)
    try:
        yield
    except shown as error:
        if isinstance(error, BrokenPipeError):
            raise  # whoever read our output has seen enough
        fail(_words(error))


def _words(error: Exception) -> str:
    """The error's message, without Python's `[Errno 13]` in front."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def loaded(
    path: Path, environ: Mapping[str, str] | None = None, as_json: bool = False, serving: bool = True
) -> "Config":
    """The configuration, or the end of the command with every problem: a line each, or JSON. Exit code 1.

    With `environ`, what only `serving` needs is checked too: API keys in it, and files; without `serving`
    that is a note. Notes, also of keys that have no effect yet, are lines on stderr.
    """
    from extproc.config import ConfigError, load_config

    try:
        return load_config(path, environ, lambda note: typer.echo(str(note), err=True), serving)
    except ConfigError as error:
        if as_json:
            print_json({"problems": [dataclasses.asdict(problem) for problem in error.problems]})
        for problem in () if as_json else error.problems:
            typer.echo(str(problem), err=True)
        raise typer.Exit(FAILED) from None


def print_json(data: object) -> None:
    """Print for programs."""
    typer.echo(json.dumps(data, indent=2))
