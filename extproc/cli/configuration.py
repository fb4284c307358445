"""`inferact check` and `inferact envoy-config`: commands that read a configuration and run nothing."""

import json
from pathlib import Path
from typing import Annotated

import typer

from extproc.cli.shared import FAILED, AsJson, ConfigFile, loaded, one_line


def check(config: ConfigFile, as_json: AsJson = False) -> None:
    """Check a configuration file, and print what is in force, defaults included.

    Every problem is a line on stderr, `FILE:LINE: key: what is wrong and what is allowed`, and exit code 1.
    With `--json` the problems are JSON on stdout.
    """
    if as_json:
        typer.echo(json.dumps(_effective_or_problems(config), indent=2))
    else:
        import yaml

        typer.echo(yaml.safe_dump(loaded(config).effective(), sort_keys=False, width=120), nl=False)


def _effective_or_problems(path: Path) -> dict[str, object]:
    from dataclasses import asdict

    from extproc.config import ConfigError, load_config

    try:
        return load_config(path).effective()
    except ConfigError as error:
        typer.echo(json.dumps({"problems": [asdict(problem) for problem in error.problems]}, indent=2))
        raise typer.Exit(FAILED) from None


def envoy_config(
    config: ConfigFile,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write the files; made if missing.")],
) -> None:
    """Write Envoy's files for a configuration: bootstrap, clusters (CDS) and routes (RDS).

    The paths in them are those of the configuration's `run_dir`. They hold no keys.
    """
    settings = loaded(config)
    from extproc.envoyconfig.files import write_all
    from extproc.rundir import RunDir

    run, written = RunDir(settings.scheduler.run_dir), RunDir(out)
    with one_line():
        write_all(settings, run, into=written)
    typer.echo(f"{written.bootstrap}  bootstrap: start Envoy with it (envoy -c)")
    typer.echo(f"{written.clusters}  clusters (CDS): the nodes; Envoy reads {run.clusters}")
    typer.echo(f"{written.routes}  routes (RDS): what goes where; Envoy reads {run.routes}")
    typer.echo("The running service writes clusters and routes itself, and the keys of nodes that have one.")
