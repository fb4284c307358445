"""What runs over a transport: one object a stream, messages in and replies out, and no socket.

`server.py` (gRPC) and `lean/` carry them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from extproc.accesslog import LOGS_READ, AccessLog
from extproc.exchange import Exchange, Limits, OnRouted, StartLeg
from extproc.exchanges import Exchanges
from extproc.routing.admission import Admission
from extproc.telemetry import Telemetry

logger = logging.getLogger(__name__)

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
STREAM_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"

Clock = Callable[[], float]


class BindError(Exception):
    """The address cannot be listened on."""


class Call(Protocol):
    """One stream of messages."""

    def receive(self, message: bytes) -> bytes | None:
        """The reply, if there is one now. Raises `ProtocolError`: the stream is of no more use."""

    @property
    def waits(self) -> bool:
        """Whether a further reply is to come without a further message: see `resume`."""

    def resume(self) -> bytes | None:
        """That reply; `None`: not yet. To be called when the call says so, by the callback of its `Open`."""

    def finish(self) -> bytes | None:
        """The last reply, now that the peer has said all, or is to be cut short."""

    def end(self) -> None:
        """The stream is over, however it came; the second time nothing happens."""


Open = Callable[[Callable[[], None]], Call]
"""Begins a call; the callback is called, from the event loop, whenever `resume` may have a reply."""


class ExtProc:
    """Begins exchanges, and keeps those that live."""

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
        self.clock = clock
        self.limits = limits
        """Of exchanges that begin from now on; so are `on_routed` and `start_leg`."""
        self.on_routed = on_routed
        self.start_leg: StartLeg | None = None
        self._admission = admission
        self._telemetry = telemetry

    def open(self, ready: Callable[[], None]) -> "ExchangeCall":
        """One stream, which lives as long as its HTTP exchange."""
        exchange = Exchange(self._admission, self._telemetry, self.limits, self.on_routed, self.start_leg)
        self.exchanges.begin(exchange)
        self.idle.clear()
        return ExchangeCall(self, exchange, ready)

    def decided(self, exchange: Exchange, seconds: float) -> None:
        """A node was chosen."""
        self._telemetry.decided(seconds)
        if exchange.decision is not None and logger.isEnabledFor(logging.DEBUG):
            order = [node.id for node in (exchange.decision.node, *exchange.decision.fallbacks)]
            logger.debug("request %.80r goes to %s", exchange.request_id, ", then ".join(order))

    def over(self, exchange: Exchange) -> None:
        """Its stream has ended."""
        self.exchanges.end(exchange, self.clock())
        if not self.exchanges.live:
            self.idle.set()


class ExchangeCall:
    """Pumps messages between a stream of Envoy's and its exchange; wakes an exchange that is held."""

    __slots__ = ("_exchange", "_extproc", "_look", "_ready")

    def __init__(self, extproc: ExtProc, exchange: Exchange, ready: Callable[[], None]) -> None:
        self._extproc = extproc
        self._exchange: Exchange | None = exchange
        self._ready = ready
        self._look: asyncio.Handle | None = None

    def receive(self, message: bytes) -> bytes | None:
        """The exchange's reply."""
        exchange = self._exchange
        assert exchange is not None
        started_s = time.perf_counter()
        undecided = exchange.decision is None
        reply = exchange.receive(message, self._extproc.clock())
        if undecided and exchange.decision is not None:
            self._extproc.decided(exchange, time.perf_counter() - started_s)
        if exchange.is_held:
            exchange.wake = self._soon
            self._soon()  # it may have been its turn before there was a `wake`
        return reply

    @property
    def waits(self) -> bool:
        """Whether the exchange is held."""
        return self._exchange is not None and self._exchange.is_held

    def resume(self) -> bytes | None:
        """The reply to a request that was held."""
        exchange = self._exchange
        if exchange is None:
            return None
        now_s = self._extproc.clock()
        self._cancel_look()
        reply = exchange.resume(now_s)
        if exchange.is_held and self._look is None:  # it may have been woken meanwhile
            left_s = max(0.0, exchange.resume_s - now_s)
            self._look = asyncio.get_running_loop().call_later(left_s, self._ready)
        return reply

    def finish(self) -> None:
        """Nothing: each reply answers a message."""

    def end(self) -> None:
        """The exchange is over."""
        exchange, self._exchange = self._exchange, None
        self._cancel_look()
        if exchange is not None:
            self._extproc.over(exchange)

    def _soon(self) -> None:
        """Not at once: the admission is at work, perhaps for another call."""
        self._cancel_look()
        if self._exchange is not None:
            self._look = asyncio.get_running_loop().call_soon(self._ready)

    def _cancel_look(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None


class LogCall:
    """One stream of log entries: Envoy has one a worker thread, for as long as it lives."""

    __slots__ = ("_access_log",)

    def __init__(self, access_log: AccessLog) -> None:
        self._access_log = access_log

    waits = False

    def receive(self, message: bytes) -> None:
        """Entries are not answered one by one."""
        self._access_log.receive(message)

    def resume(self) -> None:
        """Nothing is held."""

    def finish(self) -> bytes:
        """All entries are read."""
        return LOGS_READ

    def end(self) -> None:
        """Nothing is kept."""
