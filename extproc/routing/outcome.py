"""What really happened to a request, and to each attempt at it, once it is over."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from extproc.openai.usage import Usage


class Ended(StrEnum):
    """How the exchange came to its end."""

    COMPLETE = "complete"  # the client has the whole answer
    ERROR = "error"  # an error was the answer, or came within the stream
    BROKEN = "broken"  # the node's connection ended within the answer
    TIMED_OUT = "timed_out"
    CLIENT_LEFT = "client_left"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The node that served, or was the last to fail, and what came of it. `None` is unknown."""

    node_id: str
    attempts: int
    status: int
    """HTTP status of the answer; 0 when the client left before it began."""
    ended: Ended
    duration_s: float
    """From the request's first byte until Envoy had the answer's last: a slow client may be 1 MiB behind."""
    ttft_s: float | None = None
    """From the request's first byte to the first token of a stream."""
    usage: Usage | None = None
    """Of a whole answer, where it carries one."""


class Failure(StrEnum):
    """Why another node may do better than the one that had the request."""

    OUT_OF_MEMORY = "out_of_memory"  # the engine says so
    ENGINE_DEATH = "engine_death"  # the engine failed, and may be gone soon
    OVERLOADED = "overloaded"  # its queue is full, which is no fault of its health
    ERROR = "error"  # another answer that Envoy retries
    UNREACHED = "unreached"  # no connection: the engine never saw the request
    LOST = "lost"  # the connection ended before an answer began
    TIMED_OUT = "timed_out"  # no answer began in time


DEADLY: Final = frozenset({Failure.ENGINE_DEATH, Failure.LOST})
"""How it looks when an engine dies of a prompt."""


class LegFailure(StrEnum):
    """Why a prefill leg came to nothing: a failure as above, or one that is no fault of the node's."""

    OUT_OF_MEMORY = Failure.OUT_OF_MEMORY
    ENGINE_DEATH = Failure.ENGINE_DEATH
    OVERLOADED = Failure.OVERLOADED
    ERROR = Failure.ERROR
    UNREACHED = Failure.UNREACHED
    LOST = Failure.LOST
    TIMED_OUT = Failure.TIMED_OUT
    REFUSED = "refused"  # the engine does not take the request: it will say why when it gets it whole
    NO_PARAMETERS = "no_parameters"  # an answer without what the decode node needs
    UNSUPPORTED = "unsupported"  # the request asks for what a decode node cannot tell; no leg was sent

    @property
    def fault(self) -> Failure | None:
        """What it says of the node."""
        return Failure(self.value) if self.value in _FAULTS else None


_FAULTS: Final = frozenset(Failure)
TOLD_BY_ENGINES = frozenset({Failure.OUT_OF_MEMORY, Failure.ENGINE_DEATH, Failure.OVERLOADED})
"""What is read in a failing answer; the others follow from its status, or from there being none."""


@dataclass(slots=True, frozen=True)
class Attempt:
    """A node's try at a request that failed. `key` joins what is known of a request."""

    key: str
    node_id: str
    failure: Failure
    reason: str
    """Envoy's flag where no answer came, else the status."""
    duration_s: float = 0.0
    """From the first byte to the node until the failure."""

    @property
    def cause(self) -> str:
        """The reason, and what the engine said of itself."""
        return f"{self.reason} {self.failure}" if self.failure in TOLD_BY_ENGINES else self.reason
