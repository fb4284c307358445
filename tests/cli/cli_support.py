"""Running the `inferact` command as a user does."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from typer.testing import CliRunner

from extproc.cli import app

LIMIT_S = 60
KEY = "a-key-for-tests"
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) +\S.*")


_LOGGED = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ ")


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line on stderr, the log apart, of a command that was refused."""
        assert self.code == 1, self
        lines = [line for line in self.err.splitlines() if not _LOGGED.match(line)]
        assert len(lines) == 1 and lines[0].startswith("inferact: "), self
        return lines[0]


def inferact(*arguments: object, folder: Path | None = None, **env: str) -> Outcome:
    """Run a command to its end, in this process: for commands that stop before anything starts."""
    unset = {name: None for name in os.environ if name.startswith("INFERACT_")}
    with contextlib.chdir(folder or "."):
        done = CliRunner().invoke(app, list(map(str, arguments)), env={**unset, **env}, prog_name="inferact")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Outcome(done.exit_code, done.stdout, done.stderr)


def inferact_process(*arguments: object, folder: Path | None = None, **env: str) -> Outcome:
    """Run a command to its end, as a process."""
    done = subprocess.run(
        command_line(*arguments),
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Outcome(done.returncode, done.stdout, done.stderr)


def command_line(*arguments: object) -> list[str]:
    """The command as a process."""
    return [sys.executable, "-m", "extproc.cli", *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would steer the command."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERACT_")}
    return kept | changes


class Running:
    """A command that runs until it is told to stop; its output is in files."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self.process = process
        self.folder = folder

    @property
    def out(self) -> str:
        """What it has written to stdout."""
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        """What it has written to stderr."""
        return (self.folder / "stderr").read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command alone, as `kill` does."""
        self.process.send_signal(number)

    def wait_for(self, text: str) -> str:
        """Wait until it has said something; all that it has said by then."""
        deadline_s = time.monotonic() + LIMIT_S
        while text not in (said := self.out + self.err):
            assert self.process.poll() is None and time.monotonic() < deadline_s, said
            time.sleep(0.02)
        return said

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(LIMIT_S)


@contextlib.contextmanager
def running(*arguments: object, folder: Path, stdin: int | None = None, **env: str) -> Iterator[Running]:
    """Start a command in the background; it is killed at the end if it still runs."""
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            command_line(*arguments),
            cwd=folder,
            env=environment(**env),
            stdin=stdin,
            stdout=out,
            stderr=err,
        )
    try:
        yield Running(process, folder)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_S)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def write_config(folder: Path, *nodes: dict[str, object], **scheduler: object) -> Path:
    """A valid configuration with free ports; its nodes are not there unless given."""
    port, admin_port, envoy_admin_port, *engines = free_ports(5)
    ours = {
        "host": "127.0.0.1",
        "port": port,
        "admin_port": admin_port,
        "envoy_admin_port": envoy_admin_port,
        "run_dir": "run",
    }
    absent = [
        {
            "id": f"node-{i}",
            "hardware": "a100-80g",
            "backend": "vllm",
            "endpoint": f"http://127.0.0.1:{engine}",
            "models": ["a-model"],
        }
        for i, engine in enumerate(engines)
    ]
    path = folder / "inferact.yaml"
    path.write_text(yaml.safe_dump({"scheduler": ours | scheduler, "nodes": list(nodes) or absent}))
    return path


def url_of(config: Path) -> str:
    """Where the admin app of a configuration listens."""
    return f"http://127.0.0.1:{yaml.safe_load(config.read_text())['scheduler']['admin_port']}"
