"""What a replay asks of the one who picks nodes, and what it tells."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from extproc.hardware import Hardware, HardwareProfile, ModelShape
from extproc.simulator.replay.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What is known of a node beforehand: its data sheet and what its engine says of its KV memory."""

    name: str
    hardware: Hardware
    profile: HardwareProfile
    shape: ModelShape
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """What an engine's metrics say at `at_s`: requests, KV memory held (0-1), prompt tokens so far."""

    at_s: float
    running: int
    waiting: int
    kv_used_ratio: float
    prompt_tokens: int
    cached_tokens: int


class Picker(Protocol):
    """Picks a node for each request. Nodes go by their number; time never runs backwards.

    `request.output_tokens` is the future: it may be used in `finished`, as an engine reports it then.
    """

    def pick(self, request: TraceRequest, now_s: float) -> int:
        """The number of the node that takes the request."""
        ...

    def first_token(self, request_id: int, now_s: float) -> None:
        """The first token of a request's answer came by."""
        ...

    def finished(self, request_id: int, now_s: float, cached_tokens: int) -> None:
        """An answer is complete; its engine had `cached_tokens` of the prompt in its cache."""
        ...

    def report(self, node: int, metrics: NodeMetrics) -> None:
        """A node's metrics were scraped, which happens once a second."""
        ...


PickerFactory = Callable[[Sequence[NodeInfo], int], Picker]
"""Makes a picker for these nodes; all its chance comes from the seed."""
