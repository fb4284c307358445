"""The access-log service: what Envoy says of each attempt, and of each request when it is over."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsResponse
from google.protobuf.message import DecodeError

from extproc import headers
from extproc.entries import read_batch
from extproc.exchanges import Exchanges
from extproc.openai.errors import ErrorCode
from extproc.openai.usage import read_usage
from extproc.routing.blame import Blame, Watch
from extproc.routing.decision import Decision
from extproc.routing.feedback import learn, with_cached
from extproc.routing.node import Node
from extproc.routing.outcome import TOLD_BY_ENGINES, Attempt, Ended, Failure, Outcome
from extproc.routing.router import Router
from extproc.telemetry import Telemetry

logger = logging.getLogger(__name__)

LOGS_READ: Final[bytes] = StreamAccessLogsResponse().SerializeToString()
"""The answer at the end of a stream of entries."""

_ROUTED, _FAIL_OPEN, _ADMIN = headers.ROUTED.encode(), headers.FAIL_OPEN.encode(), headers.ADMIN.encode()
_METADATA, _FAIL_OPEN_METADATA = headers.METADATA_NAMESPACE.encode(), headers.FAIL_OPEN_NAMESPACE.encode()
_EXCHANGE, _REASON, _ANSWERED = headers.EXCHANGE.encode(), headers.REASON.encode(), headers.ANSWERED.encode()
_FAILURE = headers.FAILURE.encode()
_ANSWER = headers.ANSWER_NAMESPACE.encode()
_FIRST_TOKEN, _USAGE, _ERROR = headers.FIRST_TOKEN.encode(), headers.USAGE.encode(), headers.ERROR.encode()
_LEFT = frozenset({"downstream_connection_termination", "downstream_remote_reset"})
_LATE = frozenset(
    {
        "upstream_request_timeout",
        "stream_idle_timeout",
        "duration_timeout",
        "upstream_max_stream_duration_reached",
    }
)
_TIME_DIGITS, _CLOCK_SLACK_S = 17, 0.05
_FLAGGED = {
    "upstream_connection_failure": Failure.UNREACHED,
    "upstream_connection_termination": Failure.LOST,
    "upstream_remote_reset": Failure.LOST,
    "upstream_protocol_error": Failure.LOST,
    **dict.fromkeys(_LATE, Failure.TIMED_OUT),
}
_MARKED = {failure.value.encode(): failure for failure in TOLD_BY_ENGINES}
_CODES = {code.value.encode(): code for code in ErrorCode}


@dataclass(slots=True, frozen=True)
class Finished:
    """A request that is over, with as many attempts as nodes were tried: 0 where it came to none."""

    key: str
    exchange_id: str
    """Empty where the service was away: then `key` is the client's."""
    model: str
    failed_open: bool
    refused: ErrorCode | None
    """Why Envoy itself answered with an error."""
    outcome: Outcome


@dataclass(slots=True, frozen=True)
class Begun:
    """A stream that runs: its first token came `ttft_s` after the request."""

    exchange_id: str
    ttft_s: float


def read_entry(entry: Any) -> Attempt | Begun | Finished | None:
    """What an entry (see `entries.py`) says; `None` where it is about no request to a node, or no failure."""
    common = entry.common
    node_id, route = _text(common.upstream_cluster), common.route_name
    exchange_id = _text(_find(entry.request.headers, _EXCHANGE))
    key = exchange_id or _text(entry.request.request_id)
    routed = route in (_ROUTED, _FAIL_OPEN) and bool(node_id)
    if common.kind == AccessLogType.UpstreamEnd and routed:
        return _attempt(entry, key, node_id)
    if common.kind == AccessLogType.DownstreamPeriodic:
        return _begun(common, exchange_id)
    if common.kind != AccessLogType.DownstreamEnd:
        return None
    attempts = common.attempts if routed else 0
    refused = None if route == _ADMIN else _refused(entry.response)
    if not attempts and refused is None:
        return None
    failed_open = route == _FAIL_OPEN
    namespace = _FAIL_OPEN_METADATA if failed_open else _METADATA
    return Finished(
        key=key,
        exchange_id=exchange_id,
        model=_text(_values(common.metadata, namespace).get(b"model", b"")),
        failed_open=failed_open,
        refused=refused,
        outcome=_outcome(entry, node_id, attempts),
    )


def _begun(common: Any, exchange_id: str) -> Begun | None:
    first_token_us = _values(common.metadata, _ANSWER).get(_FIRST_TOKEN, b"")
    ttft_s = _ttft_s(common.start_time, first_token_us, math.inf)
    return Begun(exchange_id, ttft_s) if exchange_id and ttft_s is not None else None


def _attempt(entry: Any, key: str, node_id: str) -> Attempt | None:
    """`None`: Envoy does not go on to another node, be the answer good or bad."""
    common, status = entry.common, entry.response.code.value
    flags = _flags(common)
    if not _LEFT.isdisjoint(flags) or 0 < status < HTTPStatus.BAD_REQUEST:
        return None
    if flags:
        failure = _FLAGGED.get(flags[0], Failure.ERROR)
        return Attempt(key, node_id, failure, flags[0], _duration_s(common))
    if status not in headers.RETRIED_STATUS:
        return None
    failure = _MARKED.get(_find(entry.response.headers, _FAILURE), Failure.ERROR)
    return Attempt(key, node_id, failure, str(status), _duration_s(common))


def _outcome(entry: Any, node_id: str, attempts: int) -> Outcome:
    common, status = entry.common, entry.response.code.value
    answer = _values(common.metadata, _ANSWER)
    ended = _ended(_flags(common), status, bool(answer.get(_ERROR)))
    duration_s = _duration_s(common)
    return Outcome(
        node_id=node_id,
        attempts=attempts,
        status=status,
        ended=ended,
        duration_s=duration_s,
        ttft_s=_ttft_s(common.start_time, answer.get(_FIRST_TOKEN, b""), duration_s),
        usage=read_usage(answer.get(_USAGE, b"")) if ended is Ended.COMPLETE else None,
    )


def _ended(flags: Sequence[str], status: int, broke_within: bool) -> Ended:
    if not _LEFT.isdisjoint(flags):
        return Ended.CLIENT_LEFT
    if not _LATE.isdisjoint(flags):
        return Ended.TIMED_OUT
    if status >= HTTPStatus.BAD_REQUEST or broke_within:
        return Ended.ERROR
    return Ended.BROKEN if flags else Ended.COMPLETE


def _ttft_s(start: Any, first_token_us: bytes, duration_s: float) -> float | None:
    """By Envoy's clock of the day, which someone may set meanwhile: what cannot be is unknown."""
    if not first_token_us.isdigit() or len(first_token_us) > _TIME_DIGITS:
        return None
    ttft_s = (int(first_token_us) - start.seconds * 1_000_000 - start.nanos // 1_000) / 1e6
    return ttft_s if 0.0 <= ttft_s <= duration_s + _CLOCK_SLACK_S else None


def _refused(response: Any) -> ErrorCode | None:
    """The reason that Envoy gave; the service counts its own answers itself."""
    reason = _find(response.headers, _REASON)
    if not reason or response.details.startswith(_ANSWERED):
        return None
    return _CODES.get(reason)


def _duration_s(common: Any) -> float:
    return float(common.duration.seconds + common.duration.nanos / 1e9)


def _flags(common: Any) -> tuple[str, ...]:
    return tuple(field.name for field, _ in common.response_flags.ListFields())


def _values(metadata: Any, namespace: bytes) -> dict[bytes, bytes]:
    """The texts that Envoy or we have noted of the request."""
    for held in metadata.namespaces:
        if held.key == namespace:
            return {field.key: field.value.text for field in held.value.fields}
    return {}


def _find(pairs: Iterable[Any], key: bytes) -> bytes:
    return next((pair.value for pair in pairs if pair.key == key), b"")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _was_transferred(decision: Decision | None, node: Node) -> bool:
    """Whether the node did not compute the prompt, but fetched it from another."""
    if decision is None or decision.receipt.prefill is None or node is not decision.node:
        return False
    return decision.receipt.prefill.took_s is not None


def _nobody(exchange_id: str, outcome: Outcome) -> None:
    """Nobody wants to know."""


class AccessLog:
    """Counts what the entries say, moves the bookings of running requests to the node that has them, has
    failures judged, and tells the router what became of its decisions. `on_outcome` gets each exchange's id
    and outcome.
    """

    def __init__(
        self,
        router: Router,
        telemetry: Telemetry,
        exchanges: Exchanges,
        watch: Watch,
        clock: Callable[[], float] = time.monotonic,
        on_outcome: Callable[[str, Outcome], None] = _nobody,
    ) -> None:
        self._router = router
        self._telemetry = telemetry
        self._exchanges = exchanges
        self._blame = Blame(router, watch)
        self._clock = clock
        self._on_outcome = on_outcome

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
                case Begun() as begun:
                    self._on_begun(begun)
                case Finished() as finished:
                    self._on_finished(finished)

    def leg_failed(self, attempt: Attempt) -> None:
        """The prefill leg of a request has failed: of these Envoy knows nothing."""
        self._blame.leg_failed(attempt, self._decision(attempt.key), self._clock())

    def leg_served(self, key: str, node: Node) -> None:
        """The prefill leg of a request is done."""
        self._blame.leg_served(node, self._decision(key), self._clock())

    def _decision(self, key: str) -> Decision | None:
        exchange = self._exchanges.find(key)
        return exchange.decision if exchange is not None else None

    def _on_attempt(self, attempt: Attempt) -> None:
        now_s, exchange = self._clock(), self._exchanges.find(attempt.key)
        decision = exchange.decision if exchange is not None else None
        self._blame.failed(attempt, decision, now_s)  # while the node still has its booking
        if exchange is not None and decision is not None:
            decision.receipt.failed.append((attempt.node_id, attempt.cause))
            exchange.attempt_failed(attempt.node_id, now_s)

    def _on_begun(self, begun: Begun) -> None:
        exchange = self._exchanges.live.get(begun.exchange_id)
        if exchange is not None and exchange.decision is not None:
            exchange.decision.booking.begun(exchange.arrived_s + begun.ttft_s, self._clock())

    def _on_finished(self, finished: Finished) -> None:
        outcome, now_s = finished.outcome, self._clock()
        exchange = self._exchanges.take(finished.exchange_id) if finished.exchange_id else None
        decision = exchange.decision if exchange is not None else None
        if finished.refused is not None:
            self._telemetry.rejected(finished.refused)
        followed = self._blame.ended(finished.key, outcome, decision, now_s)
        for attempt in followed.attempts:
            self._telemetry.retried(attempt.node_id, attempt.reason)
        for node_id in followed.out_of_memory:
            self._telemetry.oom(node_id)
        if finished.failed_open:
            self._telemetry.failed_open()
        node = self._router.roster.find(outcome.node_id)  # the last answers of one that has left count too
        if node is not None and exchange is not None and exchange.request is not None:
            outcome = with_cached(outcome, node, exchange.request.api, now_s)
        if node is not None and outcome.attempts:
            self._telemetry.served(node, finished.model, outcome.duration_s)
            self._telemetry.answered(node, outcome, _was_transferred(decision, node))
        if (
            exchange is not None
            and outcome.ended is Ended.COMPLETE
            and outcome.status < HTTPStatus.BAD_REQUEST
        ):
            exchange.answered(outcome.duration_s)
        if exchange is not None and decision is not None and exchange.request is not None:
            learn(self._router, decision, exchange.request, outcome, exchange.arrived_s, now_s)
        if finished.exchange_id:
            self._on_outcome(finished.exchange_id, outcome)
