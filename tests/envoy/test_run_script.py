"""`envoy/run.sh`, which runs Envoy in a container: a stop cuts no request."""

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from envoy_stack import Stack, running_stack, until

from extproc.launch.envoyprocess import envoy_binary
from extproc.rundir import RunDir

pytestmark = pytest.mark.envoy

SCRIPT = Path(__file__).parent.parent.parent / "envoy" / "run.sh"
LIMIT_S = 10.0


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """A node that needs a second for a hundred tokens; Envoy itself is to be run by the script."""
    async with running_stack(sims={"a": {"token_interval_s": 0.01, "speed": 1.0}}) as running:
        await running.envoy.stop()
        yield running


@contextlib.asynccontextmanager
async def script(stack: Stack, drain_limit_s: int = 30) -> AsyncIterator[Process]:
    """The script, with an Envoy that is ready."""
    scheduler = stack.service.config.scheduler
    options = ("-c", str(RunDir(scheduler.run_dir).bootstrap), "--log-level", "error", "--concurrency", "1")
    process = await asyncio.create_subprocess_exec(
        *("bash", str(SCRIPT), *options, "--disable-hot-restart", "--drain-strategy", "immediate"),
        env={
            **os.environ,
            "PATH": f"{Path(envoy_binary()).parent}:{os.environ['PATH']}",
            "ENVOY_ADMIN_PORT": str(scheduler.envoy_admin_port),
            "DRAIN_LIMIT_S": str(drain_limit_s),
        },
        start_new_session=True,
    )
    try:
        await door(stack, is_open=True)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def serves(stack: Stack) -> bool:
    """Whether a newcomer is let in."""
    async with httpx.AsyncClient(trust_env=False) as newcomer:
        with contextlib.suppress(httpx.TransportError):
            return (await newcomer.get(f"{stack.url}/healthz")).status_code == 200
    return False


async def door(stack: Stack, is_open: bool) -> None:
    """Wait until newcomers are let in, or no more."""
    async with asyncio.timeout(LIMIT_S):
        while await serves(stack) != is_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def running_request(stack: Stack, tokens: int) -> asyncio.Task[httpx.Response]:
    """A request that has reached the node."""
    task = asyncio.create_task(stack.chat(max_tokens=tokens, ignore_eos=True))
    await until(lambda: stack.in_flight() == {"a": 1})
    return task


async def test_sigterm_refuses_newcomers_lets_requests_end_and_stops(stack: Stack) -> None:
    async with script(stack) as process:
        request = await running_request(stack, tokens=100)
        process.send_signal(signal.SIGTERM)
        await door(stack, is_open=False)
        assert not request.done(), "it is still running"
        assert (await request).status_code == 200
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0


async def test_requests_that_take_too_long_are_cut(stack: Stack) -> None:
    async with script(stack, drain_limit_s=2) as process:
        request = await running_request(stack, tokens=2000)
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
        assert 0.9 < time.monotonic() - began_s < LIMIT_S, "bash counts whole seconds"
        with pytest.raises(httpx.TransportError):
            await request


async def test_a_second_signal_stops_at_once(stack: Stack) -> None:
    async with script(stack) as process:
        request = await running_request(stack, tokens=2000)
        process.send_signal(signal.SIGTERM)
        await door(stack, is_open=False)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), LIMIT_S)
        with pytest.raises(httpx.TransportError):
            await request


async def test_an_envoy_that_ends_by_itself_ends_the_script_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("no: such")
    process = await asyncio.create_subprocess_exec(
        *("bash", str(SCRIPT), "-c", str(tmp_path / "bad.yaml"), "--log-level", "off"),
        env={**os.environ, "PATH": f"{Path(envoy_binary()).parent}:{os.environ['PATH']}"},
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == 1
