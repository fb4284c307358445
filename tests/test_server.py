"""Both transports over a real socket: what they keep while an answer runs, and where they can listen."""

import asyncio
import gc
import socket
import subprocess
import tempfile
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from accesslog_entries import Watched
from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from exchanges import Bench, body_message, chat_body, headers_message

from extproc.accesslog import LOGS_READ, AccessLog
from extproc.calls import PROCESS, STREAM_LOGS, BindError, ExtProc
from extproc.config import HostPort, ListenerTls
from extproc.exchange import Limits
from extproc.lean.server import LeanServer
from extproc.replies import READ_BODY
from extproc.server import GrpcServer

STREAMS = 12
BODY_BYTES = 2_000_000


AnyServer = GrpcServer | LeanServer


@pytest.fixture(params=[GrpcServer, LeanServer])
def transport(request: pytest.FixtureRequest) -> type[AnyServer]:
    return request.param  # type: ignore[no-any-return]


def server(bench: Bench, transport: type[AnyServer]) -> tuple[ExtProc, AnyServer]:
    """A server over a bench's parts."""
    extproc = ExtProc(bench.admission, bench.telemetry, Limits(30.0, 64 << 20))
    log = AccessLog(bench.router, bench.telemetry, extproc.exchanges, Watched())
    return extproc, transport(extproc, log)


def free_port(family: socket.AddressFamily) -> int:
    with socket.socket(family) as probe:
        probe.bind(("::1" if family is socket.AF_INET6 else "127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Listening:
    """A server that listens on a Unix socket."""

    bench: Bench
    extproc: ExtProc
    server: AnyServer
    target: str


@pytest.fixture
async def listening(transport: type[AnyServer]) -> AsyncIterator[Listening]:
    bench = Bench()
    extproc, running = server(bench, transport)
    path = Path(tempfile.gettempdir()) / f"inferact-{uuid.uuid4().hex}.sock"
    await running.start(path)
    yield Listening(bench, extproc, running, f"unix:{path}")
    await running.stop(0)
    path.unlink(missing_ok=True)


async def test_bodies_are_not_kept_while_their_answers_run(listening: Listening) -> None:
    body = body_message(chat_body(messages=[{"role": "user", "content": "x" * BODY_BYTES}]))
    limits = [("grpc.max_send_message_length", -1)]
    tracemalloc.start()
    try:
        async with grpc.aio.insecure_channel(listening.target, options=limits) as channel:
            calls = [channel.stream_stream(PROCESS)() for _ in range(STREAMS)]
            for call in calls:
                await call.write(headers_message())
                await call.read()
                await call.write(body)
                await call.read()
            assert len(listening.extproc.exchanges.live) == STREAMS
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
            assert kept < STREAMS * BODY_BYTES / 4
            for call in calls:
                call.cancel()
    finally:
        tracemalloc.stop()


async def test_a_log_stream_is_read_to_its_end_and_answered_once(listening: Listening) -> None:
    async with grpc.aio.insecure_channel(listening.target) as channel:
        call = channel.stream_unary(STREAM_LOGS)()
        for message in (batch("a"), b"\xff", batch("b")):
            await call.write(message)
        await call.done_writing()
        assert await call == LOGS_READ
    assert {node.id: node.requests_total for node in listening.bench.nodes.values()} == {
        "a": 1,
        "b": 1,
        "c": 0,
    }


async def test_a_stop_does_not_wait_for_log_streams(listening: Listening) -> None:
    async with grpc.aio.insecure_channel(listening.target) as channel:
        call = channel.stream_unary(STREAM_LOGS)()
        await call.write(batch("a"))
        async with asyncio.timeout(5):
            await until(lambda: listening.bench.nodes["a"].requests_total == 1)
            await listening.server.stop(60)
            assert await call == LOGS_READ


def batch(node_id: str) -> bytes:
    """The log entry of a request that a node has served."""
    message = StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add()
    entry.common_properties.access_log_type = AccessLogType.DownstreamEnd
    entry.common_properties.route_name = "routed"
    entry.common_properties.upstream_cluster = node_id
    entry.common_properties.upstream_request_attempt_count = 1
    entry.response.response_code_details = "via_upstream"
    return message.SerializeToString()


async def until(condition: Callable[[], bool]) -> None:
    """Let the server go on until something holds."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
async def test_it_listens_on_tcp_of_both_kinds(
    family: socket.AddressFamily, host: str, transport: type[AnyServer]
) -> None:
    _, running = server(Bench(), transport)
    address = HostPort(host, free_port(family))
    await running.start(address)
    try:
        async with grpc.aio.insecure_channel(str(address)) as channel:
            await asyncio.wait_for(channel.channel_ready(), 5)
    finally:
        await running.stop(0)


async def test_a_taken_port_is_a_clear_error(transport: type[AnyServer]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        _, running = server(Bench(), transport)
        with pytest.raises(BindError, match="cannot listen on"):
            await running.start(HostPort("127.0.0.1", taken.getsockname()[1]))
        await running.stop(0)


async def test_mutual_tls(transport: type[AnyServer], tmp_path: Path) -> None:
    make_certificates(tmp_path)
    tls = ListenerTls(
        ca_file=tmp_path / "ca.pem", cert_file=tmp_path / "server.pem", key_file=tmp_path / "server.key"
    )
    _, running = server(Bench(), transport)
    address = HostPort("127.0.0.1", free_port(socket.AF_INET))
    await running.start(address, tls)
    trusted = (tmp_path / "ca.pem").read_bytes()
    pair = (tmp_path / "client.key").read_bytes(), (tmp_path / "client.pem").read_bytes()
    try:
        known = grpc.ssl_channel_credentials(trusted, *pair)
        async with grpc.aio.secure_channel(str(address), known) as channel:
            call = channel.stream_stream(PROCESS)()
            await call.write(headers_message())
            assert await call.read() == READ_BODY
            call.cancel()
        unknown = grpc.ssl_channel_credentials(trusted)
        async with grpc.aio.secure_channel(str(address), unknown) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.stream_unary(STREAM_LOGS)(iter([b""]))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await running.stop(0)


def make_certificates(folder: Path) -> None:
    """An authority, and a certificate and key of its for a server and for a client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "1")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "san").write_text("subjectAltName=IP:127.0.0.1")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1", "-extfile", "san")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
