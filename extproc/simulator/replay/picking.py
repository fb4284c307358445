"""What a replay asks of the one who picks nodes, and what it tells."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from extproc.config import NodeConfig
from extproc.hardware import HardwareProfile, ModelShape
from extproc.simulator.replay.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What is known of a node beforehand: its configuration and what its engine says of its KV memory."""

    config: NodeConfig
    profile: HardwareProfile
    shape: ModelShape
    kv_capacity_tokens: int

    @property
    def name(self) -> str:
        """Its id in the configuration."""
        return self.config.id


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """What an engine's metrics say at `at_s`: requests, KV memory held (0-1), prompt tokens so far."""

    at_s: float
    running: int
    waiting: int
    kv_used_ratio: float
    prompt_tokens: int
    cached_tokens: int


class RefusedError(Exception):
    """A picker turns a request away, for good."""


class Picker(Protocol):
    """Picks a node for each request. Nodes go by their number; time never runs backwards.

    `request.output_tokens` is the future: it may be used in `finished`, as an engine reports it then, and to
    pass over nodes that could never hold the request.
    """

    def pick(self, request: TraceRequest, now_s: float) -> int | None:
        """The number of the node that takes the request; `None`: it waits. Raises `RefusedError`."""
        ...

    def released(self) -> Sequence[tuple[int, int]]:
        """The requests that wait no more, by id, each with its node; asked after `finished`, told once."""
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
