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
from typing import Final

import msgspec
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest

from extproc import replies
from extproc.config import Protocol
from extproc.openai.cut import cut
from extproc.openai.errors import ApiError, ErrorCode
from extproc.openai.members import members
from extproc.openai.request import Api, Prompt, RoutingRequest, parse
from extproc.routing.admission import Admission
from extproc.routing.decision import Decision, Prefill
from extproc.routing.feedback import prefilled
from extproc.routing.node import Node
from extproc.routing.outcome import LegFailure
from extproc.routing.patience import STREAM_RATIO
from extproc.routing.receipts import LONGEST_ID
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
    PREFILLING = auto()
    ANSWERED = auto()
    OVER = auto()


@dataclass(slots=True, frozen=True)
class Limits:
    """`request_timeout_ms` (here in seconds, from the end of the body on) and `max_body_bytes`."""

    timeout_s: float
    body_bytes: int


OnRouted = Callable[[Decision, RoutingRequest, bytes], None]
"""Gets each decision, its request, and the body as the node gets it."""

LEG_SHARE: Final = 0.5
"""The part of its time that a request may spend on its prefill leg: the rest is for doing without."""
_LEG_MARGIN_S: Final = 1.0
"""After its time, a leg that has not been told over is given up all the same."""


@dataclass(slots=True, frozen=True)
class PrefillLeg:
    """What goes to a prefill node: the request as any node would get it, and how long that may take."""

    key: str
    """The exchange's id."""
    node: Node
    protocol: Protocol
    path: str
    body: bytes
    timeout_s: float


@dataclass(slots=True, frozen=True)
class Transfer:
    """What lets the decode node fetch the prompt's KV: members for its body, as JSON.

    `once`: they work one time, so that no other node may get them.
    """

    members: bytes
    once: bool


StartLeg = Callable[[PrefillLeg, "Exchange"], Callable[[], object]]
"""Sends a leg, and tells the exchange by `go_on` and `leg_over`; gives what to call to cancel it."""


class Exchange:
    """One request, from its headers to its end."""

    __slots__ = (
        "_admission", "_api", "_body", "_cancel_leg", "_content_type", "_due_s", "_encoded", "_goes_on",
        "_limits", "_on_routed", "_start_leg", "_started_s", "_telemetry", "_transfer", "_waited_s",
        "_waiter", "arrived_s", "deadline_s", "decision", "id", "phase", "request", "request_id", "wake",
    )  # fmt: skip

    def __init__(
        self,
        admission: Admission,
        telemetry: Telemetry,
        limits: Limits,
        on_routed: OnRouted | None = None,
        start_leg: StartLeg | None = None,
    ) -> None:
        self.id = f"{_PREFIX}-{next(_COUNTER):x}"
        self.phase = Phase.HEADERS
        self.request: RoutingRequest | None = None
        self.request_id = ""
        self.arrived_s = math.inf
        self.decision: Decision | None = None
        self.wake: Callable[[], None] = _nobody
        self.deadline_s = math.inf
        """When a request in the queue gets its 504, or a leg is given up, on the clock handed in."""
        self._admission = admission
        self._telemetry = telemetry
        self._limits = limits
        self._on_routed = on_routed
        self._start_leg = start_leg
        self._cancel_leg: Callable[[], object] = _nobody
        self._transfer: Transfer | None = None
        self._goes_on = False
        self._waited_s = 0.0
        self._started_s = self._due_s = math.inf
        self._api: Api | None = None
        self._content_type = ""
        self._encoded: str | None = None
        self._body = b""
        self._waiter: Waiter | None = None

    @property
    def is_held(self) -> bool:
        """Whether Envoy waits for a reply that `resume` will give."""
        return self.phase is Phase.QUEUED or self.phase is Phase.PREFILLING

    @property
    def resume_s(self) -> float:
        """When a request that is held must be resumed though nobody woke it."""
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
        """The reply to a request that is held, once it may go or its time is up; `None`: wait on."""
        if self.phase is Phase.PREFILLING:
            return self._after_leg(now_s)
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
        self._waited_s = now_s - waiter.since_s
        self._telemetry.queued(self._waited_s)
        if waiter.outcome is None:
            message = "No node was free early enough to answer within `request_timeout_ms`."
            return self._reject(ApiError(ErrorCode.REQUEST_TIMEOUT, message))
        if isinstance(waiter.outcome, ApiError):
            return self._reject(waiter.outcome)
        return self._route(waiter.outcome, now_s) or None

    def go_on(self, transfer: Transfer | None) -> None:
        """The decode leg may go, with these parameters; `None`: as a whole request."""
        self._transfer, self._goes_on = transfer, True
        self.wake()

    def leg_over(self, took_s: float, failure: LegFailure | None, now_s: float) -> None:
        """The prefill node has done its part, or has failed to."""
        decision = self.decision
        if decision is not None and prefilled(self._admission.router, decision, took_s, failure, now_s):
            self._admission.freed(now_s)

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
        if self.decision is not None and self._release(self.decision, now_s):
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
        if chosen is None:
            return False
        leg = chosen.prefill
        prefills = leg is not None and leg.node is node and not leg.booking.released
        return prefills or any(node is one for one in (chosen.node, *chosen.fallbacks))

    def _release(self, decision: Decision, now_s: float) -> bool:
        """Free what is booked for it on either node; whether anything was."""
        self._cancel_leg()
        freed = decision.booking.release(now_s)
        return (decision.prefill is not None and decision.prefill.booking.release(now_s)) or freed

    @property
    def _longest_hold_s(self) -> float:
        """Envoy can be told once how long to wait: what waits first and prefills then has all of its time."""
        return min(self._limits.timeout_s, replies.LONGEST_HOLD_S)

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
        return replies.hold(longest_s if self._start_leg is None else self._longest_hold_s)

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
        """The reply of an exchange that was decided; empty where Envoy is held already, and goes on to be."""
        self.decision, self._waiter = decision, None
        leg = decision.prefill
        if leg is not None and self._start_leg is not None:
            return self._prefill(leg, self._start_leg, now_s)
        if leg is not None:  # it came before the split was turned on
            self.leg_over(0.0, LegFailure.UNSUPPORTED, now_s)
            decision.booking.redo(leg.whole, now_s)
        return self._send(decision, now_s)

    def _prefill(self, prefill: Prefill, start: StartLeg, now_s: float) -> bytes:
        """Send the prompt to the prefill node, and hold the request meanwhile."""
        assert self.request is not None and self._api is not None
        try:
            body = self._edited(prefill.engine_model)
        except ApiError as error:
            return self._reject(error)
        left_s = self._started_s + self._limits.timeout_s - now_s
        leg_s = min(left_s, replies.LONGEST_HOLD_S) * LEG_SHARE
        held = b"" if self.phase is Phase.QUEUED else replies.hold(min(left_s, replies.LONGEST_HOLD_S))
        self.phase = Phase.PREFILLING
        self._due_s, self.deadline_s = math.inf, now_s + leg_s + _LEG_MARGIN_S
        leg = PrefillLeg(self.id, prefill.node, prefill.protocol, self._api.value, body, leg_s)
        self._cancel_leg = start(leg, self)
        return held

    def _after_leg(self, now_s: float) -> bytes | None:
        """The reply once the parameters are there, or will not come any more."""
        decision = self.decision
        assert decision is not None and decision.prefill is not None
        if not self._goes_on:
            if now_s < self.deadline_s:
                return None
            self._cancel_leg()
            self.leg_over(0.0, LegFailure.TIMED_OUT, now_s)
        if self._transfer is None:
            self._telemetry.went_whole()
            decision.booking.redo(decision.prefill.whole, now_s)
        return self._send(decision, now_s)

    def _send(self, decision: Decision, now_s: float) -> bytes:
        """Let Envoy send the request to the node."""
        assert self.request is not None
        self.phase = Phase.ANSWERED
        transfer = self._transfer
        added = transfer.members if transfer is not None else b""
        try:
            changed = self._edited(decision.engine_model, added)
        except ApiError as error:  # the body has too many members to replace one of them
            return self._reject(error)
        self._admission.router.receipts.keep(decision.receipt, self.id, self.request_id, self._waited_s)
        if self._on_routed is not None:
            self._on_routed(decision, self.request, changed)
        replaces = None if changed is self._body else changed
        self._body = b""
        self.request = _without_body(self.request)
        left_s = self._started_s + self._limits.timeout_s - now_s
        once_bytes = len(added) + 1 if transfer is not None and transfer.once else 0  # and its comma
        return replies.route(decision, self.request, self.id, replaces, left_s, once_bytes)

    def _edited(self, model: str | None, first: bytes = b"") -> bytes:
        """The body as a node gets it. Raises `ApiError` where it has too many members for that."""
        request, body = self.request, self._body
        assert request is not None
        if model == request.model:
            model = None
        if model is None and not request.needs_cut and not first:
            return body
        return cut(body, request.members or members(body), model, first=first)

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
