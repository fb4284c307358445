"""A demo that runs as `inferact up --demo`, and the processes that belong to it."""

import contextlib
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cli_support import LIMIT_S, Running, free_ports, running

MODEL = "meta-llama/Llama-3-8B-Instruct"
READY = "Inferact is ready"
LONG_TOKENS = 200
"""What the demo's A100 needs about two seconds for."""


@dataclass(frozen=True)
class Demo:
    """A demo that is ready."""

    command: Running
    port: int
    mark: str

    @property
    def url(self) -> str:
        """Envoy's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.command.folder / ".inferact" / f"demo-{self.port}"

    def printed(self, pattern: str) -> str:
        """A part of what it printed when it was ready."""
        match = re.search(pattern, self.command.out, re.DOTALL)
        assert match is not None, self.command.out
        return match[1]

    def chat(self, max_tokens: int = 4, **members: Any) -> httpx.Response:
        """The answer to a chat request."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": max_tokens}
        url = f"{self.url}/v1/chat/completions"
        return httpx.post(url, json=body | members, timeout=LIMIT_S, trust_env=False)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What the admin app says of each node."""
        status = httpx.get(f"http://127.0.0.1:{self.port + 1}/status", trust_env=False).json()
        return {node["id"]: node for node in status["nodes"]}

    def processes(self) -> dict[int, str]:
        """The demo's processes that live, with their command lines."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has ended, or is not ours
        return found

    def process(self, part: str) -> int:
        """The id of the process with this part in its command line."""
        (found,) = [pid for pid, line in self.processes().items() if part in line]
        return found


@contextlib.contextmanager
def demo(folder: Path, stdin: int | None = None, **env: str) -> Iterator[Demo]:
    """Start a demo and wait until it is ready."""
    port, mark = _demo_port(), uuid.uuid4().hex
    arguments = ("up", "--demo", "--port", port)
    with running(*arguments, folder=folder, stdin=stdin, DEMO_MARK=mark, **env) as command:
        command.wait_for(READY)
        yield Demo(command, port, mark)


@contextlib.contextmanager
def long_request(demo: Demo, **members: Any) -> Iterator[list[httpx.Response | httpx.HTTPError]]:
    """A request that is on a node when the block begins; at its end, the list holds what became of it."""
    outcome: list[httpx.Response | httpx.HTTPError] = []

    def ask() -> None:
        try:
            outcome.append(demo.chat(LONG_TOKENS, ignore_eos=True, **members))
        except httpx.HTTPError as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        until(lambda: any(node["requests_in_flight"] for node in demo.nodes().values()))
        yield outcome
    finally:
        thread.join(LIMIT_S)


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, or fail."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "not within the limit"
        time.sleep(0.02)


def _demo_port() -> int:
    """A port that is free, as are its companions."""
    while True:
        (port,) = free_ports(1)
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as stack:
            for companion in (port + 1, port + 901):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", companion))
            return port
