"""Whose fault a failure was: attempts and ends of requests in, events in the health of nodes out.

* An answer that failed counts against its node once another node has served the request. So what fails
  everywhere, and a fleet of one node, blames nobody.
* A lost connection makes the node doubted at once: a probe decides. So does an engine that says it failed.
* A full queue is no fault. Running out of memory is an event of its own, one a node and second.
* An attempt that timed out is a hang only if the engine did nothing else meanwhile: an honest long answer
  may run out of its client's time.
* A stream that breaks off cannot go elsewhere. It makes the node doubted, and counts against it if meanwhile
  another node of its models served a whole answer and it did not; a prompt counts once within `WINDOW_S`.
  So no client's streams ever take the last node of a model, and one that repeats itself takes none.
* Where Envoy chose by itself, the key of a request is the client's and its entries may be old: nothing that
  needs either counts against a node.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Protocol

from extproc.routing.health import WINDOW_S, Event
from extproc.routing.node import REPORT_FRESH_S, Node
from extproc.routing.outcome import DEADLY, Attempt, Ended, Failure, Outcome
from extproc.routing.router import FALLBACKS, Decision, Router

UNPAIRED_KEPT: Final = 10_000
"""Requests of which a failed attempt is known but not the end: older ones are forgotten."""
MEMORY_EVENT_S: Final = 1.0
"""Attempts that fail for want of memory within this time are one event: a whole batch fails together."""
SILENT_TIMEOUTS: Final = 3
"""Timeouts in a row that are a hang of an engine without a counter of its work."""
SILENCE_S: Final = 10.0
"""How far back a node is looked at whose stream fell silent."""
LEAST_HANG_S: Final = 0.5
"""A shorter wait in vain says nothing."""
LOG_LAG_S: Final = 0.25
"""How late the log may tell of an attempt's end."""

_DOUBTFUL: Final = frozenset({Failure.ENGINE_DEATH, Failure.UNREACHED, Failure.LOST, Failure.TIMED_OUT})
_CUT: Final = frozenset({Ended.BROKEN, Ended.ERROR})
_BLAMELESS: Final = frozenset({Failure.OVERLOADED, Failure.OUT_OF_MEMORY, Failure.TIMED_OUT})
"""Not counted as errors: they are no fault, or were judged at once."""


class Watch(Protocol):
    """What keeps the health of the nodes."""

    def happened(self, node_id: str, event: Event) -> None:
        """A request told something of a node."""

    def doubt(self, node_id: str) -> None:
        """A node is to be probed now."""


@dataclass(slots=True)
class _Record:
    """What requests told of a node: when it served last, timeouts since, and its last loss of memory."""

    served_s: float = float("-inf")
    timeouts: int = 0
    out_of_memory_s: float = float("-inf")
    is_counted: bool = True


@dataclass(slots=True, frozen=True)
class Followed:
    """Attempts that another followed, and nodes whose loss of memory was made good by others."""

    attempts: tuple[Attempt, ...] = ()
    out_of_memory: tuple[str, ...] = ()


@dataclass(slots=True)
class Blame:
    """Judges failures, and keeps what is needed for it. The clock is the router's.

    A request comes with the decision on it; with `None` where Envoy chose the node.
    """

    router: Router
    watch: Watch
    _failed: OrderedDict[str, list[tuple[Attempt, float]]] = field(default_factory=OrderedDict)
    _legs: OrderedDict[str, tuple[Attempt, float]] = field(default_factory=OrderedDict)
    _records: dict[str, _Record] = field(default_factory=dict)
    _broken_s: OrderedDict[int, float] = field(default_factory=OrderedDict)

    @property
    def unpaired(self) -> int:
        """Attempts whose request has not ended."""
        return sum(map(len, self._failed.values()))

    def failed(self, attempt: Attempt, decision: Decision | None, now_s: float) -> None:
        """An attempt has failed; another may follow."""
        attempts = self._failed.setdefault(attempt.key, [])
        if len(attempts) <= FALLBACKS:
            attempts.append((attempt, now_s))
        if len(self._failed) > UNPAIRED_KEPT:
            self._failed.popitem(last=False)
        self._judge(attempt, decision, now_s)

    def leg_failed(self, attempt: Attempt, decision: Decision | None, now_s: float) -> None:
        """A prefill leg has failed; the request goes on without."""
        self._legs[attempt.key] = attempt, now_s
        if len(self._legs) > UNPAIRED_KEPT:
            self._legs.popitem(last=False)
        self._judge(attempt, decision, now_s)

    def leg_served(self, node: Node, decision: Decision | None, now_s: float) -> None:
        """A prefill node has done its part of a request."""
        if self.router.nodes.get(node.id) is node:
            self._served(node, decision, now_s)

    def _judge(self, attempt: Attempt, decision: Decision | None, now_s: float) -> None:
        """What a failed attempt says by itself."""
        node = self.router.nodes.get(attempt.node_id)
        if node is None:
            return
        if attempt.failure in DEADLY:
            self.router.quarantine.broken(_fingerprint(decision), node.id, now_s)
        if attempt.failure in _DOUBTFUL:
            self.watch.doubt(node.id)
        if attempt.failure is Failure.OUT_OF_MEMORY:
            self._lost_memory(node, now_s)
        if attempt.failure is Failure.TIMED_OUT and decision is not None:
            self._timed_out(node, now_s - attempt.duration_s, now_s)

    def ended(self, key: str, outcome: Outcome, decision: Decision | None, now_s: float) -> Followed:
        """A request is over, and with it the time of its failed attempts."""
        failed = self._failed.pop(key, [])[: max(0, outcome.attempts - 1)]
        followed = tuple(attempt for attempt, _ in failed)
        if (leg := self._legs.pop(key, None)) is not None:
            failed.append(leg)
        node = self.router.nodes.get(outcome.node_id)
        if node is None or not outcome.attempts:
            return Followed(followed)
        if outcome.ended is Ended.COMPLETE and outcome.status < HTTPStatus.BAD_REQUEST:
            self._served(node, decision, now_s)
            return Followed(followed, tuple(self._made_good(node, failed, decision)))
        began_s = decision.picked_s if decision is not None else now_s - outcome.duration_s
        began_s += sum(attempt.duration_s for attempt in followed)
        if outcome.ended is Ended.TIMED_OUT:
            self.watch.doubt(node.id)
            if decision is not None:
                self._timed_out(node, began_s if outcome.ttft_s is None else now_s - SILENCE_S, now_s)
        elif outcome.ended in _CUT and outcome.status < HTTPStatus.BAD_REQUEST:
            self._broke(node, outcome, decision, began_s, now_s)
        return Followed(followed)

    def _served(self, node: Node, decision: Decision | None, now_s: float) -> None:
        record = self._record(node)
        record.served_s, record.timeouts = now_s, 0
        self.router.quarantine.served(_fingerprint(decision), now_s)
        self.watch.happened(node.id, Event.SERVED)

    def _made_good(
        self, served: Node, failed: Iterable[tuple[Attempt, float]], decision: Decision | None
    ) -> Iterator[str]:
        """The request was none that fails everywhere. Gives the nodes that lost their memory."""
        for attempt, failed_s in failed:
            node = self.router.nodes.get(attempt.node_id)
            if node is None or node is served:
                continue
            record = self._record(node)
            if attempt.failure is Failure.OUT_OF_MEMORY and not record.is_counted:
                record.is_counted = True
                yield node.id
            is_old = failed_s <= node.fell_s  # it has paid for that
            if attempt.failure not in _BLAMELESS and decision is not None and not is_old:
                self.watch.happened(node.id, Event.FAILED)

    def _lost_memory(self, node: Node, now_s: float) -> None:
        record = self._record(node)
        if now_s - record.out_of_memory_s < MEMORY_EVENT_S:
            return
        record.out_of_memory_s, record.is_counted = now_s, False
        self.watch.happened(node.id, Event.OUT_OF_MEMORY)

    def _timed_out(self, node: Node, since_s: float, now_s: float) -> None:
        """Nothing came since then of a request that the node had."""
        record = self._record(node)
        if record.served_s >= since_s - LOG_LAG_S or now_s - since_s < LEAST_HANG_S:
            return
        record.timeouts += 1
        if _stood_still(node, (since_s + now_s) / 2, now_s, otherwise=record.timeouts >= SILENT_TIMEOUTS):
            self.watch.happened(node.id, Event.HUNG)

    def _broke(
        self, node: Node, outcome: Outcome, decision: Decision | None, began_s: float, now_s: float
    ) -> None:
        """The node began an answer and did not end it."""
        self.watch.doubt(node.id)
        if outcome.ttft_s is None:
            self.router.quarantine.broken(_fingerprint(decision), node.id, now_s)
        rivals = [other for other in self.router.nodes.values() if _are_rivals(node, other)]
        others_served = any(self._record(rival).served_s >= began_s for rival in rivals)
        it_served = self._record(node).served_s >= began_s
        if others_served and not it_served and self._is_news(_fingerprint(decision), now_s):
            self.watch.happened(node.id, Event.FAILED)

    def _is_news(self, fingerprint: int, now_s: float) -> bool:
        """Whether no stream of this prompt has been counted lately. An unknown prompt never is."""
        while self._broken_s and now_s - next(iter(self._broken_s.values())) > WINDOW_S:
            self._broken_s.popitem(last=False)
        if not fingerprint or fingerprint in self._broken_s:
            return False
        self._broken_s[fingerprint] = now_s
        return True

    def _record(self, node: Node) -> _Record:
        return self._records.setdefault(node.id, _Record())


def _fingerprint(decision: Decision | None) -> int:
    """Of the prompt; 0 where it is not known."""
    return 0 if decision is None else decision.blocks.fingerprint


def _are_rivals(node: Node, other: Node) -> bool:
    return node is not other and not set(node.config.serves).isdisjoint(other.config.serves)


def _stood_still(node: Node, since_s: float, now_s: float, otherwise: bool) -> bool:
    """Whether the engine did nothing since then, although it had a request; `otherwise`: it does not tell."""
    report = node.report
    if report is None or report.work is None:
        return otherwise
    fell_silent = node.fresh_report(now_s) is None and since_s - report.at_s <= REPORT_FRESH_S
    is_told = report.at_s >= since_s or fell_silent
    return is_told and node.worked_s < since_s
