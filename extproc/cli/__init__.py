"""The `inferact` command. Heavy modules are imported by the commands that need them: `--help` is instant."""

from extproc.cli.app import app, main

__all__ = ["app", "main"]
