"""All commands together."""

from collections.abc import Callable

import typer

from extproc.cli.configuration import check, envoy_config
from extproc.cli.explain import explain
from extproc.cli.operate import drain, restore
from extproc.cli.replay import replay
from extproc.cli.run import serve, up
from extproc.cli.sim import sim
from extproc.cli.status import status
from extproc.cli.version import options, version

app = typer.Typer(
    name="inferact",
    help="Route OpenAI-compatible requests over your own inference engines.",
    epilog="Try it now: inferact up --demo\n\n"
    "Exit codes: 0 done, 1 refused or failed (with the reason on one line), 2 wrong usage, 129 the terminal "
    "was closed, 130 Ctrl-C (0 for status --watch and sim).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(command: Callable[..., None], name: str, *examples: str) -> None:
    lines = "\n\n".join(f"inferact {example}" for example in examples)
    app.command(name, epilog=f"Example:\n\n{lines}")(command)


_add(up, "up", "up -c inferact.yaml", "up --demo")
_add(serve, "serve", "serve -c inferact.yaml")
_add(check, "check", "check -c inferact.yaml", "check --probe -c inferact.yaml")
_add(envoy_config, "envoy-config", "envoy-config -c inferact.yaml --out envoy-files")
_add(status, "status", "status --watch")
_add(drain, "drain", "drain node-a100-01 --wait")
_add(restore, "restore", "restore node-a100-01")
_add(
    explain,
    "explain",
    "explain 7d5c4f0e-1b9a-4a55-9c0e-3a1f0d2b6c77",
    "explain --body request.json --path /v1/completions",
)
_add(
    replay,
    "replay",
    "replay trace.jsonl -c inferact.yaml --policies lru,prefix-aware",
    "replay .inferact/access.log -c inferact.yaml --speed 2 --chart replay.svg",
)
_add(sim, "sim", "sim --model my-8b --hardware h100-80g --port 8001")
_add(version, "version", "version")
app.callback()(options)


def main() -> None:
    """Run the command that `sys.argv` names."""
    app(prog_name="inferact")
