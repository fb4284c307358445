"""How a process is told to stop, and work that gives way to it."""

import asyncio
import os
import signal

import pytest

from extproc.launch.stopping import HUNG_UP, INTERRUPTED, StopSignals, done_before


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(5):
        await event.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)])
async def test_the_first_signal_asks_and_the_second_is_urgent(number: signal.Signals, code: int) -> None:
    with StopSignals(None) as signals:
        os.kill(os.getpid(), number)
        await soon(signals.asked)
        assert not signals.urgent.is_set()
        os.kill(os.getpid(), number)
        await soon(signals.urgent)
    assert signals.exit_code == code


async def test_the_exit_code_is_that_of_the_first_signal() -> None:
    with StopSignals(None) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await soon(signals.asked)
        os.kill(os.getpid(), signal.SIGINT)
        await soon(signals.urgent)
    assert signals.exit_code == 0


async def test_sighup_calls_what_it_is_for_and_asks_for_nothing_else() -> None:
    called = asyncio.Event()
    with StopSignals(called.set) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        await soon(called)
    assert not signals.asked.is_set()


async def test_sighup_stops_what_ends_with_its_terminal() -> None:
    with StopSignals(None) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        await soon(signals.asked)
    assert signals.exit_code == HUNG_UP


async def test_signals_are_as_before_when_the_block_ends() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals(None):
        pass
    assert signal.getsignal(signal.SIGINT) in (before, signal.default_int_handler)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_work_that_is_done_first_counts() -> None:
    assert await done_before(asyncio.Event(), asyncio.sleep(0))


async def test_work_is_cancelled_when_the_event_comes_first() -> None:
    event, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        event.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    assert not await done_before(event, work())
    assert cleaned.is_set()


async def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        await done_before(asyncio.Event(), work())


async def test_a_caller_that_is_cancelled_takes_the_work_along() -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    task = asyncio.create_task(done_before(asyncio.Event(), work()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()
