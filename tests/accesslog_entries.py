"""Access-log entries as Envoy sends them, and the service that reads them, on the test bench."""

from typing import Any

from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType, HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from exchanges import MODEL, Bench

from extproc import accesslog
from extproc.accesslog import AccessLog, Begun, Finished
from extproc.entries import read_batch
from extproc.exchange import Exchange
from extproc.exchanges import Exchanges
from extproc.routing.health import Event
from extproc.routing.outcome import Attempt, Outcome

STARTED_US = 1_800_000_000_123_456
"""When the requests of all entries came, since 1970."""


class Watched:
    """Notes what happened to which node."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Event]] = []
        self.doubted: list[str] = []

    def happened(self, node_id: str, event: Event) -> None:
        """As of `Fleet`."""
        self.events.append((node_id, event))

    def doubt(self, node_id: str) -> None:
        """As of `Fleet`."""
        self.doubted.append(node_id)


class Log(Bench):
    """The access-log service on the test bench."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exchanges = Exchanges()
        self.outcomes: dict[str, Outcome] = {}
        self.watch = Watched()
        self.log = AccessLog(
            self.router,
            self.telemetry,
            self.exchanges,
            self.watch,
            clock=lambda: 5.0,
            on_outcome=self.outcomes.__setitem__,
        )

    def receive(self, *entries: HTTPAccessLogEntry) -> None:
        """One message of Envoy's with these entries."""
        self.log.receive(message(*entries))

    def lives(self, exchange: Exchange) -> Exchange:
        """Let the exchange be found by its id."""
        self.exchanges.begin(exchange)
        return exchange

    def ended(self, now_s: float = 4.0, **members: Any) -> Exchange:
        """An exchange that was on a node and is over; its entry has not come."""
        exchange = self.lives(self.running(**members))
        self.exchanges.end(exchange, now_s)
        return exchange

    @property
    def retries(self) -> dict[tuple[str, ...], float]:
        return self.metrics("inferact_retries_total")

    @property
    def served(self) -> dict[tuple[str, ...], float]:
        return self.metrics("inferact_requests_total")

    @property
    def unpaired(self) -> int:
        return self.log._blame.unpaired


def message(*entries: HTTPAccessLogEntry) -> bytes:
    batch = StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=entries)
    return bytes(StreamAccessLogsMessage(http_logs=batch).SerializeToString())


def entry(
    kind: int, node_id: str, key: str, route: str, status: int, flags: tuple[str, ...]
) -> HTTPAccessLogEntry:
    made = HTTPAccessLogEntry()
    made.common_properties.access_log_type = kind
    made.common_properties.upstream_cluster = node_id
    made.common_properties.route_name = route
    for flag in flags:
        setattr(made.common_properties.response_flags, flag, True)
    made.response.response_code.value = status
    made.request.request_id = "from-the-client"
    if key:
        made.request.request_headers["x-inferact-id"] = key
    return made


def read_entry(entry: HTTPAccessLogEntry) -> Attempt | Begun | Finished | None:
    """What the service reads from an entry that comes over the wire."""
    (read,) = read_batch(message(entry))
    return accesslog.read_entry(read)


def attempt(
    node_id: str,
    key: str = "x-1",
    status: int = 0,
    *flags: str,
    route: str = "routed",
    seconds: float = 0.1,
    mark: str | None = None,
) -> HTTPAccessLogEntry:
    """An attempt on a node is over; `mark`: what Envoy read in a failing answer."""
    made = entry(AccessLogType.UpstreamEnd, node_id, key, route, status, flags)
    made.common_properties.duration.FromNanoseconds(int(seconds * 1e9))
    if mark is not None:
        made.response.response_headers["x-inferact-failure"] = mark
    return made


def begun(first_token_s: float | None, key: str = "x-1", **answer: str) -> HTTPAccessLogEntry:
    """A stream runs, and has begun so long after it came."""
    made = end("a", key, first_token_s=first_token_s, **answer)
    made.common_properties.access_log_type = AccessLogType.DownstreamPeriodic
    made.common_properties.ClearField("duration")
    return made


def end(
    node_id: str,
    key: str = "x-1",
    attempts: int = 1,
    *flags: str,
    status: int = 200,
    seconds: float = 0.5,
    route: str = "routed",
    model: str = MODEL,
    first_token_s: float | None = None,
    **answer: str,
) -> HTTPAccessLogEntry:
    """A request is over, its first token so long after it came; `answer`: what Envoy read in the answer."""
    made = entry(AccessLogType.DownstreamEnd, node_id, key, route, status, flags)
    made.common_properties.upstream_request_attempt_count = attempts
    made.common_properties.duration.FromNanoseconds(int(seconds * 1e9))
    namespace = "inferact" if route == "routed" else "inferact.failopen"
    metadata = made.common_properties.metadata.filter_metadata[namespace]
    metadata.fields["model"].string_value = model
    made.common_properties.start_time.FromMicroseconds(STARTED_US)
    if first_token_s is not None:
        answer["first_token_us"] = str(STARTED_US + int(first_token_s * 1e6))
    for key, value in answer.items():
        found = made.common_properties.metadata.filter_metadata["inferact.answer"]
        found.fields[key].string_value = value
    return made
