"""One HTTP exchange as a state machine: ext_proc messages in, replies out.

Envoy sends the request's headers, then its whole body; the exchange answers each, and learns of the end of
the exchange from the end of the stream. No socket, no clock, no task: `calls.py` pumps the messages.
"""

import itertools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import msgspec
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest

from extproc import replies
from extproc.openai.cut import cut
from extproc.openai.errors import ApiError, ErrorCode
from extproc.openai.members import members
from extproc.openai.request import Api, Prompt, RoutingRequest, parse
from extproc.routing.admission import Admission
from extproc.routing.node import Node
from extproc.routing.patience import STREAM_RATIO
from extproc.routing.receipts import LONGEST_ID
from extproc.routing.router import Decision
from extproc.routing.waiting import Waiter
from extproc.telemetry import Telemetry

_PREFIX = os.urandom(6).hex()
_NO_PROMPT = Prompt()
_COUNTER = itertools.count(1)
_JSON = re.compile(
    r"application/([\w.+-]+\+)?json\s*(;(?!.*charset).*|;\s*charset=\"?utf-?8\"?\s*)?", re.IGNORECASE
)


class ProtocolError(Exception):
    """Envoy sent what this phase does not allow; the stream is of no more use."""


class Phase(Enum):
    """How far an exchange has come."""

    HEADERS = auto()
    BODY = auto()
    QUEUED = auto()
    ANSWERED = auto()
    OVER = auto()


@dataclass(slots=True, frozen=True)
class Limits:
    """`request_timeout_ms` (here in seconds, from the end of the body on) and `max_body_bytes`."""

    timeout_s: float
    body_bytes: int


OnRouted = Callable[[Decision, RoutingRequest, bytes], None]
"""Gets each decision, its request, and the body as the node gets it."""


class Exchange:
    """One request, from its headers to its end."""

    __slots__ = (
        "_admission", "_api", "_body", "_content_type", "_due_s", "_encoded", "_limits", "_on_routed",
        "_started_s", "_telemetry", "_waiter", "arrived_s", "deadline_s", "decision", "id", "phase",
        "request", "request_id", "wake",
    )  # fmt: skip

    def __init__(
        self,
        admission: Admission,
        telemetry: Telemetry,
        limits: Limits,
        on_routed: OnRouted | None = None,
    ) -> None:
        self.id = f"{_PREFIX}-{next(_COUNTER):x}"
        self.phase = Phase.HEADERS
        self.request: RoutingRequest | None = None
        self.request_id = ""
        self.arrived_s = math.inf
        self.decision: Decision | None = None
        self.wake: Callable[[], None] = _nobody
        self.deadline_s = math.inf
        """When a request in the queue gets its 504, on the clock handed in."""
        self._admission = admission
        self._telemetry = telemetry
        self._limits = limits
        self._on_routed = on_routed
        self._started_s = self._due_s = math.inf
        self._api: Api | None = None
        self._content_type = ""
        self._encoded: str | None = None
        self._body = b""
        self._waiter: Waiter | None = None

    @property
    def is_held(self) -> bool:
        """Whether Envoy waits for a reply that `resume` will give."""
        return self.phase is Phase.QUEUED

    @property
    def resume_s(self) -> float:
        """When a request in the queue must be resumed though nobody woke it."""
        return min(self._due_s, self.deadline_s)

    def receive(self, message: bytes, now_s: float) -> bytes:
        """The reply to a message.

        Raises `ProtocolError` for a message that is malformed or out of order.
        """
        try:
            incoming = ProcessingRequest.FromString(message)
        except Exception as error:
            raise ProtocolError("not a ProcessingRequest") from error
        kind = incoming.WhichOneof("request")
        if kind == "request_headers" and self.phase is Phase.HEADERS:
            return self._on_headers(incoming.request_headers, now_s)
        if kind == "request_body" and self.phase is Phase.BODY:
            return self._on_body(incoming.request_body.body, now_s)
        if kind in replies.GO_ON and self.phase is Phase.ANSWERED:
            return replies.GO_ON[kind]  # an Envoy set up to show us the answer as well
        raise ProtocolError(f"{kind} in phase {self.phase.name}")

    def resume(self, now_s: float) -> bytes | None:
        """The reply to a request in the queue, once it may go or its time is up; `None`: wait on."""
        waiter = self._waiter
        if self.phase is not Phase.QUEUED or waiter is None:
            return None
        if waiter.outcome is None and now_s >= self._due_s:
            self._due_s = math.inf
            self._admission.freed(now_s)
        if waiter.outcome is None:
            if now_s < self.deadline_s:
                return None
            self._admission.leave(waiter)
        self._telemetry.queued(now_s - waiter.since_s)
        if waiter.outcome is None:
            message = "No node was free early enough to answer within `request_timeout_ms`."
            return self._reject(ApiError(ErrorCode.REQUEST_TIMEOUT, message))
        if isinstance(waiter.outcome, ApiError):
            return self._reject(waiter.outcome)
        return self._route(waiter.outcome, now_s)

    def attempt_failed(self, node_id: str, now_s: float) -> None:
        """A node failed; Envoy goes on to the next, and so does the booking."""
        if self.decision is None or self.request is None:
            return
        router = self._admission.router
        if router.attempt_failed(self.decision, node_id, self.request, now_s):
            self._admission.freed(now_s)

    def end(self, now_s: float) -> None:
        """The exchange is over, however it came; the second call does nothing."""
        if self.phase is Phase.OVER:
            return
        self.phase = Phase.OVER
        if self._waiter is not None:
            self._abandon(self._waiter)
        if self.decision is not None and self.decision.booking.release(now_s):
            self._admission.freed(now_s)

    def answered(self, duration_s: float) -> None:
        """The client has a whole answer, so long after the request came; a stream may take its time."""
        request, decision = self.request, self.decision
        if request is not None and decision is not None and not request.stream:
            seconds = self.arrived_s + duration_s - decision.picked_s
            self._admission.patience.answered(request.model, seconds)

    def names(self, node: Node) -> bool:
        """Whether the request may still go to the node: it is the choice, or a fallback."""
        chosen = self.decision
        if chosen is None and self._waiter is not None and isinstance(self._waiter.outcome, Decision):
            chosen = self._waiter.outcome
        return chosen is not None and any(node is one for one in (chosen.node, *chosen.fallbacks))

    def _longest_wait_s(self, request: RoutingRequest) -> float:
        timeout_s = self._limits.timeout_s
        if request.stream:
            longest_s = timeout_s * STREAM_RATIO
        else:
            longest_s = self._admission.patience.longest_s(request.model, timeout_s)
        return min(longest_s, replies.LONGEST_HOLD_S)

    def _abandon(self, waiter: Waiter) -> None:
        """Leave the queue; give back a slot that came too late to be answered."""
        self._admission.leave(waiter)
        if self.decision is None and isinstance(waiter.outcome, Decision):
            self.decision = waiter.outcome

    def _on_headers(self, message: HttpHeaders, now_s: float) -> bytes:
        self.phase = Phase.BODY
        self.arrived_s = now_s
        seen = {header.key: header.raw_value or header.value.encode() for header in message.headers.headers}
        self.request_id = seen.get("x-request-id", b"").decode("utf-8", "replace")[:LONGEST_ID]
        self._encoded = seen.get("content-encoding", b"").decode("latin-1").lower() or None
        self._content_type = seen.get("content-type", b"").decode("latin-1")
        self._api = Api.from_path(seen.get(":path", b"").decode("latin-1"))
        if message.end_of_stream:
            return self._on_body(b"", now_s)  # which no API takes
        return replies.READ_BODY

    def _on_body(self, body: bytes, now_s: float) -> bytes:
        self._started_s = now_s
        try:
            if len(body) > self._limits.body_bytes:  # Envoy enforces no limit below 1 MiB
                raise ApiError(ErrorCode.BODY_TOO_LARGE, "The body is too large.")
            self.request = self._parse(body)
            self._body = body
            outcome = self._admission.submit(self.request, len(body), now_s, self._awake)
        except ApiError as error:
            return self._reject(error)
        if isinstance(outcome, Decision):
            return self._route(outcome, now_s)
        self._waiter, self._due_s = outcome, self._admission.due_s(outcome)
        longest_s = self._longest_wait_s(self.request)
        self.deadline_s = now_s + longest_s
        self.phase = Phase.QUEUED
        return replies.hold(longest_s)

    def _parse(self, body: bytes) -> RoutingRequest:
        if self._api is None:
            raise ApiError(ErrorCode.NOT_FOUND, "There is nothing at this path.")
        if self._content_type and not _JSON.fullmatch(self._content_type):
            message = "The content-type must be application/json, in UTF-8."
            raise ApiError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message)
        if self._encoded not in (None, "identity"):
            message = "The content-encoding is not supported; send the body plain, or as gzip, br or zstd."
            raise ApiError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message)
        return parse(self._api, body)

    def _route(self, decision: Decision, now_s: float) -> bytes:
        assert self.request is not None
        self.phase = Phase.ANSWERED
        self.decision = decision
        alias = decision.engine_model
        changed = None
        if alias is not None or self.request.needs_cut:
            try:
                changed = cut(self._body, self.request.members or members(self._body), alias)
            except ApiError as error:  # the body has too many members to replace one of them
                return self._reject(error)
        waited_s = now_s - self._waiter.since_s if self._waiter else 0.0
        self._admission.router.receipts.keep(decision.receipt, self.id, self.request_id, waited_s)
        if self._on_routed is not None:
            self._on_routed(decision, self.request, self._body if changed is None else changed)
        self._body, self._waiter = b"", None
        self.request = _without_body(self.request)
        left_s = self._started_s + self._limits.timeout_s - now_s
        return replies.route(decision, self.request, self.id, changed, left_s)

    def _reject(self, error: ApiError) -> bytes:
        self.phase = Phase.ANSWERED
        self._body = b""
        self._telemetry.rejected(error.code)
        return replies.reject(error)

    def _awake(self) -> None:
        self.wake()


def _without_body(request: RoutingRequest) -> RoutingRequest:
    """A copy without its JSON values: each keeps the whole body alive, and an answer may take minutes."""
    follows = request.prompt.previous_response_id
    prompt = _NO_PROMPT if follows is None else Prompt(previous_response_id=follows)
    return msgspec.structs.replace(request, members=(), prompt=prompt)


def _nobody() -> None:
    """Nobody listens: the exchange was never pumped."""
