"""Child processes: started so that they cannot outlive this one, ended with patience."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(parent):
    sys.exit("the parent is gone already")
os.execv(command[0], command)
"""


async def spawn(*command: str, stdout: Path, stderr: Path) -> Process:
    """Start a program (by its path) whose output is appended to files; Ctrl-C here does not reach it.

    On Linux it dies when this process does, even by SIGKILL. Raises `OSError`.
    """
    if sys.platform == "linux":
        # Not in a `preexec_fn`: Python between fork and exec deadlocks now and then, as we have threads.
        command = (sys.executable, "-I", "-S", "-c", _DIES_WITH_PARENT, str(os.getpid()), *command)
    with stdout.open("ab") as out, stderr.open("ab") as err:
        return await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=out, stderr=err, start_new_session=True
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
