"""The access-log service: what Envoy says of each attempt, and of each request when it is over."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsResponse
from google.protobuf.message import DecodeError

from extproc import headers
from extproc.entries import read_batch
from extproc.exchange import Exchange
from extproc.openai.errors import ErrorCode
from extproc.routing.router import FALLBACKS, Router
from extproc.telemetry import Telemetry

logger = logging.getLogger(__name__)

UNPAIRED_KEPT = 10_000
"""Requests of which a failed attempt is known but not the end: older ones are forgotten."""
LOGS_READ: Final[bytes] = StreamAccessLogsResponse().SerializeToString()
"""The answer at the end of a stream of entries."""

_ROUTED, _FAIL_OPEN, _ADMIN = headers.ROUTED.encode(), headers.FAIL_OPEN.encode(), headers.ADMIN.encode()
_METADATA, _FAIL_OPEN_METADATA = headers.METADATA_NAMESPACE.encode(), headers.FAIL_OPEN_NAMESPACE.encode()
_EXCHANGE, _REASON, _ANSWERED = headers.EXCHANGE.encode(), headers.REASON.encode(), headers.ANSWERED.encode()
_CODES = {code.value.encode(): code for code in ErrorCode}


@dataclass(slots=True, frozen=True)
class Attempt:
    """One node's try at a request, over now. `key` joins the entries of a request."""

    key: str
    node_id: str
    status: int
    flags: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether Envoy may have gone on to another node."""
        return self.status in headers.RETRIED_STATUS or bool(self.flags)

    @property
    def reason(self) -> str:
        """Why it failed: Envoy's flag where no answer came, else the status."""
        return self.flags[0] if self.flags else str(self.status)


@dataclass(slots=True, frozen=True)
class Finished:
    """A request that is over, with as many `attempts` as nodes were tried; `node_id` is the last."""

    key: str
    attempts: int
    node_id: str
    model: str
    duration_s: float
    failed_open: bool
    refused: ErrorCode | None
    """Why Envoy itself answered with an error."""


def read_entry(entry: Any) -> Attempt | Finished | None:
    """What an entry (see `entries.py`) says; `None` where it is about no request to a node."""
    common = entry.common
    node_id, route = _text(common.upstream_cluster), common.route_name
    # Where the service was away, a request has no id of ours.
    key = _text(_find(entry.request.headers, _EXCHANGE) or entry.request.request_id)
    routed = route in (_ROUTED, _FAIL_OPEN) and bool(node_id)
    if common.kind == AccessLogType.UpstreamEnd and routed:
        flags = tuple(field.name for field, _ in common.response_flags.ListFields())
        return Attempt(key, node_id, entry.response.code.value, flags)
    if common.kind != AccessLogType.DownstreamEnd:
        return None
    attempts = common.attempts if routed else 0
    refused = None if route == _ADMIN else _refused(entry.response)
    if not attempts and refused is None:
        return None
    failed_open = route == _FAIL_OPEN
    return Finished(
        key=key,
        attempts=attempts,
        node_id=node_id,
        model=_model(common.metadata, _FAIL_OPEN_METADATA if failed_open else _METADATA),
        duration_s=common.duration.seconds + common.duration.nanos / 1e9,
        failed_open=failed_open,
        refused=refused,
    )


def _refused(response: Any) -> ErrorCode | None:
    """The reason that Envoy gave; the service counts its own answers itself."""
    reason = _find(response.headers, _REASON)
    if not reason or response.details.startswith(_ANSWERED):
        return None
    return _CODES.get(reason)


def _model(metadata: Any, namespace: bytes) -> str:
    for held in metadata.namespaces:
        if held.key == namespace:
            return next((_text(field.value.text) for field in held.value.fields if field.key == b"model"), "")
    return ""


def _find(pairs: Iterable[Any], key: bytes) -> bytes:
    return next((pair.value for pair in pairs if pair.key == key), b"")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


class AccessLog:
    """Counts what the entries say, and moves the bookings of running requests to the node that has them."""

    def __init__(
        self,
        router: Router,
        telemetry: Telemetry,
        live: Mapping[str, Exchange],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._telemetry = telemetry
        self._live = live
        self._clock = clock
        self._failed: OrderedDict[str, list[Attempt]] = OrderedDict()

    def receive(self, message: bytes) -> None:
        """A batch of entries; one that cannot be read is logged and lost."""
        try:
            entries = read_batch(message)
        except DecodeError:
            logger.warning("an access-log message of %d bytes cannot be read", len(message))
            return
        for entry in entries:
            match read_entry(entry):
                case Attempt() as attempt:
                    self._on_attempt(attempt)
                case Finished() as finished:
                    self._on_finished(finished)

    def _on_attempt(self, attempt: Attempt) -> None:
        if not attempt.failed:
            return
        exchange = self._live.get(attempt.key)
        if exchange is not None:
            exchange.attempt_failed(attempt.node_id, self._clock())
        failed = self._failed.setdefault(attempt.key, [])
        if len(failed) <= FALLBACKS:
            failed.append(attempt)
        if len(self._failed) > UNPAIRED_KEPT:
            self._failed.popitem(last=False)

    def _on_finished(self, finished: Finished) -> None:
        if finished.refused is not None:
            self._telemetry.rejected(finished.refused)
        if not finished.attempts:
            return
        for attempt in self._failed.pop(finished.key, [])[: finished.attempts - 1]:
            self._telemetry.retried(attempt.node_id, attempt.reason)
        if finished.failed_open:
            self._telemetry.failed_open()
        node = self._router.nodes.get(finished.node_id)
        if node is not None:
            self._telemetry.served(node, finished.model, finished.duration_s)
