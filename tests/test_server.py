"""The gRPC server over a real socket: what it keeps while an answer runs, and where it can listen."""

import asyncio
import gc
import random
import socket
import tempfile
import tracemalloc
from pathlib import Path

import grpc
import pytest
from exchanges import Bench, body_message, chat_body, headers_message

from extproc.accesslog import AccessLog
from extproc.config import HostPort
from extproc.exchange import Limits
from extproc.server import PROCESS, BindError, ExtProc, GrpcServer

STREAMS = 12
BODY_BYTES = 2_000_000


def server(bench: Bench) -> tuple[ExtProc, GrpcServer]:
    """A server over a bench's parts."""
    extproc = ExtProc(bench.admission, bench.telemetry, Limits(30.0, 64 << 20))
    return extproc, GrpcServer(extproc, AccessLog(bench.router, bench.telemetry, extproc.live))


def free_port(family: socket.AddressFamily) -> int:
    with socket.socket(family) as probe:
        probe.bind(("::1" if family is socket.AF_INET6 else "127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_bodies_are_not_kept_while_their_answers_run() -> None:
    extproc, grpc_server = server(Bench())
    path = Path(tempfile.gettempdir()) / f"inferact-{random.getrandbits(64):x}.sock"
    await grpc_server.start(path)
    body = body_message(chat_body(messages=[{"role": "user", "content": "x" * BODY_BYTES}]))
    limits = [("grpc.max_send_message_length", -1)]
    tracemalloc.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}", options=limits) as channel:
            calls = [channel.stream_stream(PROCESS)() for _ in range(STREAMS)]
            for call in calls:
                await call.write(headers_message())
                await call.read()
                await call.write(body)
                await call.read()
            assert len(extproc.live) == STREAMS
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
            assert kept < STREAMS * BODY_BYTES / 4
            for call in calls:
                call.cancel()
    finally:
        tracemalloc.stop()
        await grpc_server.stop(0)
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
async def test_it_listens_on_tcp_of_both_kinds(family: socket.AddressFamily, host: str) -> None:
    _, grpc_server = server(Bench())
    address = HostPort(host, free_port(family))
    await grpc_server.start(address)
    try:
        async with grpc.aio.insecure_channel(str(address)) as channel:
            await asyncio.wait_for(channel.channel_ready(), 5)
    finally:
        await grpc_server.stop(0)


async def test_a_taken_port_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        _, grpc_server = server(Bench())
        with pytest.raises(BindError, match="cannot listen on"):
            await grpc_server.start(HostPort("127.0.0.1", taken.getsockname()[1]))
        await grpc_server.stop(0)
