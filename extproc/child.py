"""Child processes: started so that they cannot outlive this one, ended with patience."""

import asyncio
import ctypes
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


async def spawn(*command: str, stdout: Path, stderr: Path) -> Process:
    """Start a command whose output is appended to files; a Ctrl-C in this terminal does not reach it.

    On Linux it dies when this process does, even by SIGKILL. Raises `OSError`.
    """
    with stdout.open("ab") as out, stderr.open("ab") as err:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=_die_with_parent if _LIBC is not None else None,
        )


async def end(process: Process, limit_s: float) -> None:
    """SIGTERM, and SIGKILL after `limit_s`; harmless when the process is gone."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        process.kill()
        await process.wait()


def ending(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def _die_with_parent() -> None:
    """Runs in the child, before the command does."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
