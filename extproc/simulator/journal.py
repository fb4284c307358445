"""What a simulated engine remembers of the requests it got, so that tests can ask."""

import base64
import hashlib
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from extproc.simulator.batch import Batch

_RECORDED = 100
_PASSAGES = 100_000


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    """The client left."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as it came over the wire: header names and values in order, body bytes."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def summary(self) -> dict[str, Any]:
        """For people and programs: the body by its digest."""
        digest = hashlib.sha256(self.body).hexdigest()
        return {"path": self.path, "headers": self.headers, "sha256": digest, "bytes": len(self.body)}

    def whole(self) -> dict[str, Any]:
        """The summary and the body in base64."""
        return self.summary() | {"body_base64": base64.b64encode(self.body).decode()}


@dataclass(slots=True)
class Passage:
    """When a request came and went, by the monotonic clock; `attempt` is Envoy's count of tries."""

    request_id: str
    attempt: int
    began_s: float
    ended_s: float = math.inf
    outcome: Outcome | None = None


@dataclass(slots=True)
class Stats:
    """Counts since the start."""

    batch: Batch
    attempts: Counter[str] = field(default_factory=Counter)
    """Requests whose head arrived, by path."""
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    recorded: deque[RecordedRequest] = field(default_factory=lambda: deque(maxlen=_RECORDED))
    """The last requests, where the options say `record`."""
    passages: deque[Passage] = field(default_factory=lambda: deque(maxlen=_PASSAGES))
    """The same, of many more."""

    @property
    def completed(self) -> int:
        """Requests answered with success."""
        return self.outcomes[Outcome.COMPLETED]

    @property
    def aborted(self) -> int:
        """Requests whose client left."""
        return self.outcomes[Outcome.ABORTED]

    @property
    def failed(self) -> int:
        """Requests refused or struck by a fault."""
        return self.outcomes[Outcome.FAILED]

    @property
    def running(self) -> int:
        """Generations in the batch now."""
        return len(self.batch.running)

    @property
    def waiting(self) -> int:
        """Generations in the queue now."""
        return len(self.batch.waiting)

    def as_dict(self) -> dict[str, Any]:
        """What `GET /sim/stats` answers."""
        return {
            "attempts": dict(self.attempts),
            "completed": self.completed,
            "aborted": self.aborted,
            "failed": self.failed,
            "running": self.running,
            "waiting": self.waiting,
            "recorded": [request.summary() for request in self.recorded],
        }
