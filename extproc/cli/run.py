"""`inferact up` and `inferact serve`: commands that run until they are stopped."""

import os
import shlex
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extproc.cli.adminkey import AdminKeyError, admin_key
from extproc.cli.shared import ConfigFile, loaded, one_line

if TYPE_CHECKING:
    from extproc.config import Config
    from extproc.routing.node import Node

# gRPC reads this when it is imported. Our children are programs of their own, which need none of its threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_DEMO_PORT = 9000
_LAST_DEMO_PORT = 65535 - 901
_PORTS_APART = 100

_MaybeConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="The configuration file.", show_default=False),
]
_Demo = Annotated[bool, typer.Option("--demo", help="Three simulated nodes instead of your own.")]
_Port = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        min=1,
        max=_LAST_DEMO_PORT,
        help=f"With --demo: listen there, and on PORT+1 and PORT+901; else on {_DEMO_PORT} and so on.",
    ),
]


def serve(config: ConfigFile) -> None:
    """Run the service alone, for an Envoy that runs elsewhere: beside it, or in another container.

    SIGTERM or Ctrl-C: no new requests are taken (Envoy routes them by itself then), running ones end within
    `request_timeout_ms`; the second signal stops at once.
    """
    settings = loaded(config, os.environ)
    from extproc.launch.claims import ClaimError, check_ports, run_dir_claimed
    from extproc.launch.up import serve

    with one_line(AdminKeyError, ClaimError, *_start_errors()):
        key = admin_key(os.environ)
        with run_dir_claimed(settings.scheduler.run_dir, _another_run_dir(config)):
            check_ports(settings, lambda name: _move(name, config), with_envoy=False)
            _run(settings, serve(settings, config, key))


def up(config: _MaybeConfigFile = None, demo: _Demo = False, port: _Port = None) -> None:
    """Run the service and an Envoy in front of it, until Ctrl-C (or SIGTERM).

    The first Ctrl-C closes the door and lets running requests end within `request_timeout_ms`; the second
    stops at once. Nothing is left running.
    """
    if demo == (config is not None):
        raise typer.BadParameter("give either --config FILE or --demo")
    if port is not None and not demo:
        raise typer.BadParameter("--port is for --demo; else set `scheduler.port` in the configuration")
    if config is None:
        _up_demo(port or _DEMO_PORT)
    else:
        _up(config)


def _up(path: Path) -> None:
    settings = loaded(path, os.environ)
    from extproc.cli.announcement import announcement
    from extproc.launch.claims import ClaimError, check_ports, run_dir_claimed
    from extproc.launch.envoyprocess import envoy_binary
    from extproc.launch.up import up

    with one_line(AdminKeyError, ClaimError, *_start_errors()):
        key = admin_key(os.environ)
        envoy_binary()
        with run_dir_claimed(settings.scheduler.run_dir, _another_run_dir(path)):
            check_ports(settings, lambda name: _move(name, path), with_envoy=True)

            def ready(nodes: "Collection[Node]") -> None:
                typer.echo(announcement(settings, path, nodes, admin=key is not None))

            _run(settings, up(settings, path, key, ready))


def _up_demo(port: int) -> None:
    """As `_up`, with simulated nodes, a configuration that names them, and an admin key if there is none."""
    from secrets import token_urlsafe

    from extproc.cli.announcement import announcement
    from extproc.launch.claims import ClaimError, check_ports, run_dir_claimed
    from extproc.launch.demo import DemoFleet, demo_folder, demo_nodes, write_configuration
    from extproc.launch.envoyprocess import envoy_binary
    from extproc.launch.up import up

    with one_line(AdminKeyError, ClaimError, *_start_errors()):
        key = admin_key(os.environ)
        made_key = None if key else token_urlsafe(24)
        envoy_binary()
        folder = demo_folder(port)
        with run_dir_claimed(folder, f"{_elsewhere(port)}, or in another folder"):
            engines = demo_nodes()
            path = write_configuration(folder, engines, port)
            settings = loaded(path)
            check_ports(settings, lambda _: _elsewhere(port), with_envoy=True)

            def ready(nodes: "Collection[Node]") -> None:
                typer.echo(announcement(settings, path, nodes, admin=True, made_key=made_key))

            _run(settings, up(settings, path, key or made_key, ready, DemoFleet(engines, folder)))


def _run(config: "Config", program: Coroutine[Any, Any, int]) -> None:
    """Run until the program ends; then the command ends with its exit code."""
    import uvloop

    from extproc.logs import log_to_stderr

    log_to_stderr(config.scheduler.log_level)
    raise typer.Exit(uvloop.run(program))


def _start_errors() -> tuple[type[Exception], ...]:
    """What may go wrong on the way up, beside `OSError`."""
    from extproc.calls import BindError
    from extproc.drains import DrainStoreError
    from extproc.launch.envoyprocess import EnvoyError

    return BindError, DrainStoreError, EnvoyError


def _move(key: str, path: Path) -> str:
    return f"change `scheduler.{key}` in {path}"


def _another_run_dir(path: Path) -> str:
    return f"set `scheduler.run_dir` in {path} to a folder of its own that this user may write to"


def _elsewhere(port: int) -> str:
    """The demo's command at other ports."""
    from extproc.cli.announcement import this_command

    other = port + _PORTS_APART if port + _PORTS_APART <= _LAST_DEMO_PORT else _DEMO_PORT
    return f"run `{shlex.join((*this_command(), 'up', '--demo', '--port', str(other)))}`"
