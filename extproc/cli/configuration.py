"""`inferact check` and `inferact envoy-config`: commands that read a configuration and run nothing."""

import os
from pathlib import Path
from typing import Annotated

import typer

from extproc.cli.shared import AsJson, ConfigFile, loaded, one_line, print_json


def check(
    config: ConfigFile,
    probe: Annotated[
        bool, typer.Option("--probe", help="Ask every node too, with one short prompt, sent twice.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a configuration file, and print what is in force, defaults included.

    Every problem is a line on stderr, `FILE:LINE: key: what is wrong and what is allowed`, and exit code 1.
    With `--json` the problems are JSON on stdout. What `up` would refuse here and now (an API key that is not
    in the environment), what is hardly meant, and keys without effect are lines on stderr and exit code 0.

    With `--probe` a table of the nodes as they answer now is printed instead, with advice; exit code 1 if one
    does not answer, or does not serve a model that the file names.
    """
    settings = loaded(config, os.environ, as_json, serving=False)
    if probe:
        from extproc.cli.probe import probe as ask

        ask(settings, as_json)
        return
    effective = settings.effective()
    if as_json:
        print_json(effective)
        return
    import yaml

    typer.echo(yaml.safe_dump(effective, sort_keys=False, width=120), nl=False)
    typer.echo(f"{config}: OK", err=True)


def envoy_config(
    config: ConfigFile,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where to write the files; made if missing.")
    ],
) -> None:
    """Write Envoy's files for a configuration: bootstrap, clusters (CDS) and routes (RDS).

    The paths in them are those of the configuration's `run_dir`. They hold no keys.
    """
    settings = loaded(config)
    from extproc.envoyconfig.files import write_copy
    from extproc.rundir import RunDir

    run, written = RunDir(settings.scheduler.run_dir), RunDir(out)
    with one_line():
        write_copy(settings, run, written)
    typer.echo(f"{written.bootstrap}  bootstrap: start Envoy with it (envoy -c)")
    typer.echo(f"{written.clusters}  clusters (CDS): the nodes; Envoy reads {run.clusters}")
    typer.echo(f"{written.routes}  routes (RDS): what goes where; Envoy reads {run.routes}")
    typer.echo("The running service writes clusters and routes itself, and the keys of nodes that have one.")
