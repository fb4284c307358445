"""The gRPC server that Envoy talks to: ext_proc streams and access-log streams, bytes in and bytes out."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from extproc.accesslog import LOGS_READ, AccessLog
from extproc.config import HostPort
from extproc.exchange import Exchange, Limits, OnRouted, ProtocolError, StartLeg
from extproc.exchanges import Exchanges
from extproc.routing.admission import Admission
from extproc.telemetry import Telemetry

logger = logging.getLogger(__name__)

_EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
_ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"
PROCESS = f"/{_EXT_PROC}/Process"
STREAM_LOGS = f"/{_ACCESS_LOG}/StreamAccessLogs"

Clock = Callable[[], float]
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # the default, 4 MiB, breaks big bodies
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # else a stale process would take half of the connections
]


class BindError(Exception):
    """The address cannot be listened on."""


class ExtProc:
    """Pumps messages between Envoy's streams and exchanges."""

    def __init__(
        self,
        admission: Admission,
        telemetry: Telemetry,
        limits: Limits,
        clock: Clock = time.monotonic,
        on_routed: OnRouted | None = None,
    ) -> None:
        self.exchanges = Exchanges()
        self.idle = asyncio.Event()
        """Set while no exchange lives."""
        self.idle.set()
        self._admission = admission
        self._telemetry = telemetry
        self._clock = clock
        self.limits = limits
        """Of exchanges that begin from now on; so are `on_routed` and `start_leg`."""
        self.on_routed = on_routed
        self.start_leg: StartLeg | None = None

    async def process(self, _: object, context: Any) -> None:
        """One stream, which lives as long as its HTTP exchange."""
        exchange = Exchange(self._admission, self._telemetry, self.limits, self.on_routed, self.start_leg)
        self.exchanges.begin(exchange)
        self.idle.clear()
        try:
            await self._pump(exchange, context)
        except ProtocolError as error:
            logger.warning("ext_proc stream refused: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            # The end of the stream shows as EOF or as a cancellation, at random: both mean that it is over.
            self.exchanges.end(exchange, self._clock())
            if not self.exchanges.live:
                self.idle.set()

    async def _pump(self, exchange: Exchange, context: Any) -> None:
        reading: Awaitable[bytes] = context.read()
        while (message := await reading) is not grpc.aio.EOF:
            reply = self._receive(exchange, message)
            del message  # the body: this frame lives as long as the answer takes
            await context.write(reply)
            del reply  # which may hold the body without its hints
            reading = context.read()
            if exchange.is_held:
                reading = asyncio.ensure_future(reading)
                answer = await self._wait_in_queue(exchange, reading)
                if answer is not None:
                    await context.write(answer)

    def _receive(self, exchange: Exchange, message: bytes) -> bytes:
        started_s = time.perf_counter()
        undecided = exchange.decision is None
        reply = exchange.receive(message, self._clock())
        if undecided and exchange.decision is not None:
            self._telemetry.decided(time.perf_counter() - started_s)
            if logger.isEnabledFor(logging.DEBUG):
                order = [node.id for node in (exchange.decision.node, *exchange.decision.fallbacks)]
                logger.debug("request %.80r goes to %s", exchange.request_id, ", then ".join(order))
        return reply

    async def _wait_in_queue(self, exchange: Exchange, reading: asyncio.Future[bytes]) -> bytes | None:
        """The reply, once a node is free or time is up; `None` when the stream ends or speaks first."""
        ready = asyncio.Event()
        exchange.wake = ready.set
        while (reply := exchange.resume(self._clock())) is None:
            ready.clear()
            woken: asyncio.Future[Any] = asyncio.ensure_future(ready.wait())
            left_s = max(0.0, exchange.resume_s - self._clock())
            try:
                await asyncio.wait({reading, woken}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                woken.cancel()
            if reading.done():
                return None
        return reply


class GrpcServer:
    """The listening server: `start`, then `stop`."""

    def __init__(self, extproc: ExtProc, access_log: AccessLog) -> None:
        self._extproc = extproc
        self._access_log = access_log
        self._closing = asyncio.Event()
        self._server: Any = grpc.aio.server(options=_OPTIONS)
        # No (de)serializers, so that messages stay bytes.
        process = grpc.stream_stream_rpc_method_handler(extproc.process)
        stream_logs = grpc.stream_unary_rpc_method_handler(self._stream_logs)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(_EXT_PROC, {"Process": process}),
                grpc.method_handlers_generic_handler(_ACCESS_LOG, {"StreamAccessLogs": stream_logs}),
            )
        )

    async def start(self, address: Path | HostPort, credentials: Any = None) -> None:
        """Listen on a Unix socket or on host and port. Raises `BindError`."""
        if isinstance(address, Path):
            await asyncio.to_thread(address.parent.mkdir, parents=True, exist_ok=True)
            target = f"unix:{address}"
        else:
            target = str(address)
        try:
            if credentials is None:
                self._server.add_insecure_port(target)
            else:
                self._server.add_secure_port(target, credentials)
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

    async def _stream_logs(self, _: object, context: Any) -> bytes:
        """One stream of entries (one a worker thread of Envoy's), until Envoy ends it or we close."""
        closing: asyncio.Future[Any] = asyncio.ensure_future(self._closing.wait())
        try:
            while True:
                reading: asyncio.Future[Any] = asyncio.ensure_future(context.read())
                await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    return LOGS_READ
                message = reading.result()
                if message is grpc.aio.EOF:
                    return LOGS_READ
                self._access_log.receive(message)
        finally:
            closing.cancel()
