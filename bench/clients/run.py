"""Runs the clients that people use against the whole chain: Envoy, the service, and a simulated fleet.

    .venv/bin/python -m bench.clients.run [CLIENT ...]

Each client is a script with its versions at its head, and `uv` gives each an environment of its own. What
cannot be installed here is skipped, and so is what needs a tokenizer or a vLLM where `make test-engines` has
not installed one. The exit code is 1 when a client failed.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from extproc.launch.demo import MODEL

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_START_LIMIT_S = 60.0
_INSTALL_LIMIT_S = 600.0
_RUN_LIMIT_S = 300.0
_VLLM = "vllm_bench"
"""It runs in the environment of the vLLM that is installed for the tests."""
_NEED_TOKENIZER = ("guidellm_load", _VLLM)


class Outcome(StrEnum):
    """What became of a client."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


def main(wanted: list[str]) -> int:
    """Run the clients named, or all; the exit code."""
    known = sorted(path.stem for path in _HERE.glob("*_*.py") if not path.stem.startswith("__"))
    if strange := set(wanted) - set(known):
        print(f"no client {', '.join(sorted(strange))}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    outcomes = []
    with _demo() as url:
        for name in wanted or known:
            started_s = time.monotonic()
            outcome, why = _run(name, url)
            outcomes.append(outcome)
            print(f"{name:18} {outcome:8} {time.monotonic() - started_s:5.1f} s  {why}", flush=True)
    return int(Outcome.FAILED in outcomes)


def _run(name: str, url: str) -> tuple[Outcome, str]:
    script = _HERE / f"{name}.py"
    environment = dict(os.environ, BASE_URL=url, MODEL=MODEL, HF_HUB_OFFLINE="1", NO_PROXY="127.0.0.1")
    engines = _engines()
    if name in _NEED_TOKENIZER:
        if engines is None:
            return Outcome.SKIPPED, "make test-engines has installed no vLLM and no tokenizer here"
        environment["TOKENIZER"] = str(engines / "model")
    if name == _VLLM and engines is not None:
        command = [str(engines / "venv" / "bin" / "python"), str(script)]
    else:
        made = _uv("sync", "--quiet", "--script", str(script), limit_s=_INSTALL_LIMIT_S)
        if made.returncode:
            return Outcome.SKIPPED, f"cannot be installed: {_last_line(made.stderr)}"
        command = [sys.executable, "-m", "uv", "run", "--quiet", "--script", str(script)]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Outcome.FAILED, f"not done after {_RUN_LIMIT_S:.0f} s"
    if ended.returncode:
        return Outcome.FAILED, _last_line(ended.stderr)
    return Outcome.PASSED, _last_line(ended.stdout)


def _uv(*arguments: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uv", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s)


def _engines() -> Path | None:
    """Where the real engines for the tests are, if they are."""
    asked = "import engines_setup; print(engines_setup.engines_dir())"
    folder = subprocess.run(
        [sys.executable, "-c", asked], cwd=_ROOT / "tests" / "engines", capture_output=True, text=True
    )
    engines = Path(folder.stdout.strip())
    return engines if folder.returncode == 0 and (engines / "venv" / "bin" / "python").exists() else None


@contextlib.contextmanager
def _demo() -> Iterator[str]:
    """The demo, in a folder of its own, until the clients are done; its address."""
    port = _free_port()
    with TemporaryDirectory(prefix="inferact-clients-") as folder:
        command = [sys.executable, "-m", "extproc.cli", "up", "--demo", "--port", str(port)]
        environment = dict(os.environ, PYTHONPATH=str(_ROOT))
        log = Path(folder) / "demo.log"
        with log.open("wb") as out:
            demo = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=environment)
        try:
            _wait_until_ready(demo, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            demo.terminate()
            demo.wait(30)


def _wait_until_ready(demo: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline_s and demo.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/v1/models", trust_env=False).json().get("data"):
                return
        time.sleep(0.2)
    raise SystemExit(f"the demo did not start:\n{log.read_text(errors='replace')}")


def _free_port() -> int:
    """A port that is free with the two others that the demo takes beside it."""
    while True:
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            first = probes.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            for other in (port + 1, port + 901):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", other))
            return port


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
