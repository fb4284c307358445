"""The gRPC server that Envoy talks to: ext_proc streams and access-log streams, bytes in and bytes out."""

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc

from extproc.accesslog import AccessLog
from extproc.calls import PROCESS, STREAM_LOGS, BindError, Call, ExtProc, LogCall
from extproc.config import HostPort, ListenerTls
from extproc.exchange import ProtocolError

logger = logging.getLogger(__name__)

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # the default, 4 MiB, breaks big bodies
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # else a stale process would take half of the connections
]


class GrpcServer:
    """The listening server: `start`, then `stop`."""

    def __init__(self, extproc: ExtProc, access_log: AccessLog) -> None:
        self._extproc = extproc
        self._access_log = access_log
        self._closing = asyncio.Event()
        self._server: Any = grpc.aio.server(options=_OPTIONS)
        # No (de)serializers, so that messages stay bytes.
        process = grpc.stream_stream_rpc_method_handler(self._process)
        stream_logs = grpc.stream_unary_rpc_method_handler(self._stream_logs)
        self._server.add_generic_rpc_handlers(
            (_handlers(PROCESS, process), _handlers(STREAM_LOGS, stream_logs))
        )

    async def start(self, address: Path | HostPort, tls: ListenerTls | None = None) -> None:
        """Listen on a Unix socket or on host and port. Raises `BindError`."""
        if isinstance(address, Path):
            await asyncio.to_thread(address.parent.mkdir, parents=True, exist_ok=True)
            target = f"unix:{address}"
        else:
            target = str(address)
        try:
            if tls is None:
                self._server.add_insecure_port(target)
            else:
                self._server.add_secure_port(target, _credentials(tls))
        except RuntimeError as error:
            raise BindError(f"cannot listen on {target}: is another `inferact` running?") from error
        await self._server.start()
        if isinstance(address, Path):
            await asyncio.to_thread(address.chmod, 0o660)

    async def stop(self, grace_s: float) -> None:
        """Take no new stream, give the running exchanges `grace_s` seconds to end; may be repeated.

        One call at a time: gRPC crashes when a server is stopped while its stop is under way.
        """
        if self._server is None:
            return
        closing = asyncio.create_task(self._close_logs_when_idle())
        try:
            await self._server.stop(grace_s)
        finally:
            closing.cancel()
        self._server = None  # gRPC's thread ends with its last server, and may crash at the interpreter's end

    async def _close_logs_when_idle(self) -> None:
        """Log streams live as long as Envoy does, and would use up the whole grace."""
        await self._extproc.idle.wait()
        self._closing.set()

    async def _process(self, _: object, context: Any) -> None:
        """One ext_proc stream, until Envoy ends it."""
        ready = asyncio.Event()
        call = self._extproc.open(ready.set)
        try:
            await _pump(call, ready, context)
        except ProtocolError as error:
            logger.warning("ext_proc stream refused: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            # The end of the stream shows as EOF or as a cancellation, at random: both mean that it is over.
            call.end()

    async def _stream_logs(self, _: object, context: Any) -> bytes:
        """One stream of entries (one a worker thread of Envoy's), until Envoy ends it or we close."""
        call = LogCall(self._access_log)
        closing: asyncio.Future[Any] = asyncio.ensure_future(self._closing.wait())
        try:
            while True:
                reading: asyncio.Future[Any] = asyncio.ensure_future(context.read())
                await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    return call.finish()
                message = reading.result()
                if message is grpc.aio.EOF:
                    return call.finish()
                call.receive(message)
        finally:
            closing.cancel()


async def _pump(call: Call, ready: asyncio.Event, context: Any) -> None:
    reading: Awaitable[bytes] = context.read()
    while (message := await reading) is not grpc.aio.EOF:
        reply = call.receive(message)
        del message  # the body: this frame lives as long as the answer takes
        if reply is not None:
            await context.write(reply)
        del reply  # which may hold the body without its hints
        reading = context.read()
        if call.waits:
            reading = asyncio.ensure_future(reading)
            late = await _late_reply(call, ready, reading)
            if late is not None:
                await context.write(late)


async def _late_reply(call: Call, ready: asyncio.Event, reading: asyncio.Future[Any]) -> bytes | None:
    """The reply of a call that waits; `None` when the stream ends or speaks first."""
    while True:
        woken: asyncio.Future[Any] = asyncio.ensure_future(ready.wait())
        try:
            await asyncio.wait({reading, woken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        if reading.done():
            return None
        ready.clear()
        if (reply := call.resume()) is not None:
            return reply


def _handlers(path: str, handler: Any) -> Any:
    service, _, method = path.strip("/").partition("/")
    return grpc.method_handlers_generic_handler(service, {method: handler})


def _credentials(tls: ListenerTls) -> grpc.ServerCredentials:
    """Mutual TLS for Envoys on other machines."""
    pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
    return grpc.ssl_server_credentials([pair], tls.ca_file.read_bytes(), require_client_auth=True)
