"""What really happened to a request, once it is over."""

from enum import StrEnum

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
    """From the request's first byte to the answer's last."""
    ttft_s: float | None = None
    """From the request's first byte to the first token of a stream."""
    usage: Usage | None = None
    """Of a whole answer, where it carries one."""
