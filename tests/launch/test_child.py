"""Child processes, real ones."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from extproc.launch.child import end, ending, spawn


async def test_the_output_of_a_child_is_appended_to_files(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("before\n")
    script = "import sys; print('said'); print('complained', file=sys.stderr); sys.exit(3)"
    process = await spawn(sys.executable, "-c", script, stdout=out, stderr=err)
    assert await process.wait() == 3
    assert (out.read_text(), err.read_text()) == ("before\nsaid\n", "complained\n")


async def test_a_child_has_a_session_of_its_own_and_nothing_to_read(tmp_path: Path) -> None:
    script = "import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read() == '')"
    process = await spawn(sys.executable, "-c", script, stdout=tmp_path / "out", stderr=tmp_path / "err")
    await process.wait()
    assert (tmp_path / "out").read_text() == "True True\n"


async def test_a_child_is_ended_once_and_for_all(tmp_path: Path) -> None:
    script = "import time; time.sleep(600)"
    process = await spawn(sys.executable, "-c", script, stdout=tmp_path / "out", stderr=tmp_path / "err")
    await end(process, limit_s=30)
    assert process.returncode == -signal.SIGTERM
    await end(process, limit_s=30)


async def test_a_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True); time.sleep(600)"
    )
    out = tmp_path / "out"
    process = await spawn(sys.executable, "-c", script, stdout=out, stderr=tmp_path / "err")
    while not out.read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await end(process, limit_s=0.05)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("returncode", "words"), [(0, "exit code 0"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_an_ending_in_words(returncode: int, words: str) -> None:
    assert ending(returncode) == words
