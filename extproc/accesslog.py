"""The access-log service: what Envoy says of each attempt, and of each request when it is over."""

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType, HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse

from extproc import headers
from extproc.envoyconfig.routes import FAIL_OPEN, ROUTED
from extproc.exchange import Exchange
from extproc.routing.router import Router
from extproc.telemetry import Telemetry

logger = logging.getLogger(__name__)

UNPAIRED_KEPT = 10_000
"""Requests of which an attempt is known but not the end: older ones are forgotten."""
_DONE = StreamAccessLogsResponse().SerializeToString()


@dataclass(slots=True, frozen=True)
class Attempt:
    """One node's try at a request."""

    key: str
    number: int
    node_id: str
    status: int
    flags: tuple[str, ...]

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


def read_entry(entry: HTTPAccessLogEntry) -> Attempt | Finished | None:
    """What an entry says; `None` where no node was tried."""
    common = entry.common_properties
    ours = common.metadata.filter_metadata[headers.METADATA_NAMESPACE].fields
    key = ours["id"].string_value or common.stream_id or entry.request.request_id
    number, node_id = common.upstream_request_attempt_count, common.upstream_cluster
    if common.route_name not in (ROUTED, FAIL_OPEN) or not number or not node_id:
        return None
    if common.access_log_type == AccessLogType.UpstreamEnd:
        flags = tuple(field.name for field, _ in common.response_flags.ListFields())
        return Attempt(key, number, node_id, entry.response.response_code.value, flags)
    failed_open = common.route_name == FAIL_OPEN
    model = common.metadata.filter_metadata[headers.FAIL_OPEN_NAMESPACE].fields if failed_open else ours
    return Finished(
        key=key,
        attempts=number,
        node_id=node_id,
        model=model["model"].string_value,
        duration_s=common.duration.ToNanoseconds() / 1e9,
        failed_open=failed_open,
    )


class AccessLog:
    """Counts what the entries say, and moves the bookings of running requests to the node that has them."""

    def __init__(self, router: Router, telemetry: Telemetry, live: Mapping[str, Exchange]) -> None:
        self._router = router
        self._telemetry = telemetry
        self._live = live
        self._attempts: OrderedDict[str, list[Attempt]] = OrderedDict()

    async def stream(self, messages: AsyncIterator[bytes], _: object) -> bytes:
        """One stream of Envoy's (one a worker thread), which lives as long as Envoy."""
        async for message in messages:
            self.receive(message)
        return _DONE

    def receive(self, message: bytes) -> None:
        """A batch of entries; one that cannot be read is logged and lost."""
        try:
            entries = StreamAccessLogsMessage.FromString(message).http_logs.log_entry
        except Exception:
            logger.warning("an access-log message of %d bytes cannot be read", len(message))
            return
        for entry in entries:
            match read_entry(entry):
                case Attempt() as attempt:
                    self._on_attempt(attempt)
                case Finished() as finished:
                    self._on_finished(finished)

    def _on_attempt(self, attempt: Attempt) -> None:
        self._attempts.setdefault(attempt.key, []).append(attempt)
        if len(self._attempts) > UNPAIRED_KEPT:
            self._attempts.popitem(last=False)

    def _on_finished(self, finished: Finished) -> None:
        for attempt in self._attempts.pop(finished.key, ()):
            if attempt.number < finished.attempts:
                self._telemetry.retried(attempt.node_id, attempt.reason)
        node = self._router.nodes.get(finished.node_id)
        if finished.failed_open:
            self._telemetry.failed_open()
        if node is not None:
            self._telemetry.served(node, finished.model, finished.duration_s)
