"""What really happened to the nodes, the service and Envoy, and when. Pure; seconds since the start."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from chaos_schedule import DEADLY, ENVOY_AWAY, RECOVERY_S, UNSOUND, Kind

_TELLING_S = 3.0
"""How much of what was before an offence may have to do with it."""


@dataclass(slots=True)
class Span:
    """A fault from the moment before it struck to the moment after it was healed."""

    kind: Kind
    node: str
    from_s: float
    until_s: float = math.inf

    def overlaps(self, from_s: float, until_s: float, grace_s: float = 0.0) -> bool:
        """Whether it held at some moment between, or up to `grace_s` before."""
        return self.from_s <= until_s and from_s <= self.until_s + grace_s

    def __str__(self) -> str:
        until = "the end" if self.until_s == math.inf else f"{self.until_s:.2f}"
        return f"{self.kind}{' of ' + self.node if self.node else ''} from {self.from_s:.2f} to {until}"


class Timeline:
    """The faults as they were; `clock` tells the seconds since the start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.faults: list[Span] = []
        self.drained: list[Span] = []
        """From the answer to a drain to the call that restores the node."""

    @contextlib.contextmanager
    def during(self, kind: Kind, node: str = "") -> Iterator[None]:
        """A fault holds in the block."""
        yield from self._hold(self.faults, kind, node)

    @contextlib.contextmanager
    def while_drained(self, node: str) -> Iterator[None]:
        """The node is drained, as the admin app has said, in the block."""
        yield from self._hold(self.drained, Kind.DRAIN, node)

    def _hold(self, spans: list[Span], kind: Kind, node: str) -> Iterator[None]:
        span = Span(kind, node, self.clock())
        spans.append(span)
        try:
            yield
        finally:
            span.until_s = self.clock()

    def any_sound(self, nodes: Iterable[str], from_s: float, until_s: float) -> bool:
        """Whether one of the nodes was well, and could be known to be, from beginning to end."""
        unsound = {
            span.node
            for span in self.faults
            if span.kind in UNSOUND and span.overlaps(from_s, until_s, RECOVERY_S)
        }
        return "" not in unsound and not unsound.issuperset(nodes)  # a stall is of all nodes

    def broke(self, node: str, from_s: float, until_s: float) -> bool:
        """Whether a fault of the node's held at some moment."""
        return any(
            span.kind in UNSOUND and span.node == node and span.overlaps(from_s, until_s)
            for span in self.faults
        )

    def broke_streams(self, node: str, from_s: float, until_s: float) -> bool:
        """Whether streams of the node may have ended early."""
        return any(
            span.kind in DEADLY and span.node == node and span.overlaps(from_s, until_s)
            for span in self.faults
        )

    def envoy_away(self, from_s: float, until_s: float) -> bool:
        """Whether Envoy was restarted."""
        return any(span.kind in ENVOY_AWAY and span.overlaps(from_s, until_s) for span in self.faults)

    def drained_since(self, node: str, sent_s: float, arrived_s: float) -> Span | None:
        """The drain that was answered before a request was sent, and held when the node got it."""
        return next(
            (
                span
                for span in self.drained
                if span.node == node and span.from_s < sent_s and arrived_s < span.until_s
            ),
            None,
        )

    def around(self, from_s: float, until_s: float) -> list[Span]:
        """The faults that held, or had held shortly before."""
        return [span for span in self.faults if span.overlaps(from_s, until_s, _TELLING_S)]
