"""One HTTP exchange with a simulated engine: reading it, counting how it ends, and failing it."""

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from aiohttp import web

from extproc.simulator.faults import MID_STREAM, Fault, FaultKind
from extproc.simulator.journal import Outcome, Passage, RecordedRequest
from extproc.simulator.runtime import EngineDeadError
from extproc.simulator.schema import ApiError, api_error
from extproc.simulator.state import ENGINE, Engine

_CORE_FAILED = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_TGI_OUT_OF_MEMORY = (
    b'{"error":"Request failed during generation: Server error: CUDA out of memory. '
    b'Tried to allocate 2.00 GiB.","error_type":"generation"}'
)


class InjectedResetError(ConnectionResetError):
    """The connection was reset because a fault asked for it."""


class Call:
    """A request under way. However it ends, it is counted once."""

    def __init__(self, engine: Engine, request: web.Request, body: bytes) -> None:
        self.engine = engine
        self.request = request
        self.body = body
        self._outcome: Outcome | None = None
        headers = request.headers
        attempt = headers.get("x-envoy-attempt-count", "")
        self._passage = Passage(
            headers.get("x-request-id", ""), int(attempt) if attempt.isdecimal() else 1, time.monotonic()
        )
        if engine.options.record:
            engine.stats.passages.append(self._passage)

    def end(self, outcome: Outcome) -> None:
        """Count how the call ends. The first to say it is right."""
        if self._outcome is None:
            self._outcome = self._passage.outcome = outcome
            self._passage.ended_s = time.monotonic()
            self.engine.stats.outcomes[outcome] += 1

    def reset(self) -> NoReturn:
        """Reset the TCP connection."""
        self.end(Outcome.FAILED)
        if self.request.transport is not None:
            reset_connection(self.request.transport)
        raise InjectedResetError

    async def meet_fault(self, stream: bool = False) -> Fault | None:
        """Fail here if a fault strikes before the head; one that strikes in mid-stream is given back."""
        fault = self.engine.faults.strike_request(self.body, stream)
        if fault is not None and fault.kind not in MID_STREAM:
            await self._fail(fault)
        return fault

    async def _fail(self, fault: Fault) -> NoReturn:
        match fault.kind:
            case FaultKind.HANG:
                await hang()
            case FaultKind.RESET:
                self.reset()
            case FaultKind.DIE:
                self.engine.die(fault.delay_s)
                raise EngineDeadError
            case FaultKind.OUT_OF_MEMORY:
                raise core_failure()
            case FaultKind.OUT_OF_MEMORY_TGI:
                raise ApiError(424, _TGI_OUT_OF_MEMORY)
            case FaultKind.ERROR_503:
                raise api_error(503, "The simulated request queue is full.", "ServiceUnavailableError")
            case FaultKind.ERROR_429:
                raise api_error(
                    429, "The simulated engine takes no more requests now.", "TooManyRequestsError"
                )
            case _:
                raise api_error(500, "The simulated engine fails this request.", "InternalServerError")


def core_failure() -> ApiError:
    """What vLLM answers once its engine core has failed."""
    return api_error(500, _CORE_FAILED, "InternalServerError")


async def hang() -> NoReturn:
    """Wait until cancelled, as when the client gives up."""
    while True:
        await asyncio.Event().wait()


def reset_connection(transport: asyncio.Transport) -> None:
    """Close a connection with a TCP reset instead of an orderly end."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def json_response(body: bytes, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=body, status=status, content_type="application/json")


def endpoint(
    handler: Callable[[Call], Awaitable[web.StreamResponse]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Make an inference handler of an aiohttp one: count, read, record, and answer errors as vLLM does."""

    async def handle(request: web.Request) -> web.StreamResponse:
        engine = request.app[ENGINE]
        engine.stats.attempts[request.path] += 1
        call = Call(engine, request, b"")
        try:
            call.body = await request.read()
            _record(call)
            if request.content_type != "application/json":
                raise _wrong_content_type()
            response = await handler(call)
            call.end(Outcome.COMPLETED)
        except ApiError as error:
            call.end(Outcome.FAILED)
            return json_response(error.body, error.status)
        except EngineDeadError:
            call.end(Outcome.FAILED)
            return json_response(core_failure().body, 500)
        except InjectedResetError:
            return web.Response()
        except (asyncio.CancelledError, ConnectionError):
            call.end(Outcome.ABORTED)
            raise
        return response

    return handle


def _record(call: Call) -> None:
    if call.engine.options.record:
        headers = tuple(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in call.request.raw_headers
        )
        call.engine.stats.recorded.append(RecordedRequest(call.request.path, headers, call.body))


def _wrong_content_type() -> ApiError:
    message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return api_error(400, message, "Bad Request")
