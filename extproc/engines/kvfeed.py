"""One engine's feed of KV events: its messages in order and without a gap, or the word that some are gone.

What was missed is asked for again, where the engine can repeat it. Else what it holds is forgotten, and the
index answers alone until the events tell all there is again: after a start of the engine, after it cleared
its cache, or once it has stored as many blocks as it has.
"""

import logging
import math
from typing import Final, Protocol

from extproc.engines.kvevents import LAST, Message, read_message, read_number
from extproc.routing.exact import ExactCaches
from extproc.routing.node import EngineReport, Node
from extproc.routing.tokenblocks import Cleared, Stored

logger = logging.getLogger(__name__)

MESSAGES: Final = 2
"""Read at a time: a millisecond's work, where engines compute 8,000 tokens a step."""
REPLAY_S: Final = 3.0
"""How long an engine may take to begin to repeat, or to go on."""
SILENT_TOKENS: Final = 2048
"""Prompt tokens that the engine computed by its metrics: they fill blocks, so there must be events."""
SILENT_S: Final = 3.0
"""How long these may take to come: a step, as a rule."""
ASK_AGAIN_S: Final = 10.0
"""When to ask an engine again that did not answer: it may have been busy, and be idle ever since."""
MOST_RESCUES: Final = 2
"""Times in a row that an engine may have to be asked for what it never sent."""
_STALE_S: Final = 5.0
_ADVICE: Final = "does it listen at `kv_events.endpoint`? vLLM does where it is told tcp://*:PORT"


class Source(Protocol):
    """Where messages come from: each a number and a payload; nothing waits."""

    @property
    def can_replay(self) -> bool: ...  # noqa: D102
    def receive(self) -> tuple[bytes, bytes] | None: ...  # noqa: D102
    def ask(self, number: int) -> None: ...  # noqa: D102
    def repeated(self) -> tuple[bytes, bytes] | None: ...  # noqa: D102
    def hush(self) -> None: ...  # noqa: D102


class Feed:
    """Applies one node's events, and keeps the node's `events` up to date."""

    def __init__(self, node: Node, source: Source, exact: ExactCaches) -> None:
        self._node = node
        self._source = source
        self._exact = exact
        self._next = 0
        self._at_s = -math.inf
        """The engine's time of the last message."""
        self._since_s = math.inf
        """The same of the first one that counts."""
        self._whole = False
        self._new_blocks = 0
        """Stored since."""
        self._patience_s: float | None = None
        """Until when the engine may begin to repeat; `None` while it is not asked to."""
        self._ahead: Message | None = None
        self._is_behind = source.can_replay
        """Whether to ask for all there is, rather than to wait for a message."""
        self._silence = _Silence()

    def tick(self, now_s: float) -> bool:
        """Take what has come; whether there is more."""
        more = True
        if self._is_behind and self._patience_s is None:
            self._is_behind = False
            self._ask(now_s)
        for _ in range(MESSAGES):
            if not (more := self._take(now_s)):
                break
        if self._patience_s is not None and now_s > self._patience_s:
            self._end_replay(now_s, answered=False)
        self._look(now_s)
        if self._patience_s is None:
            self._judge(now_s)
        return more

    def _take(self, now_s: float) -> bool:
        if self._patience_s is None:
            frames = self._source.receive()
            if frames is not None:
                self._silence.broken(now_s)
                self._received(frames, now_s)
        else:
            frames = self._source.repeated()
            if frames is not None:
                self._repeated(frames, now_s)
        return frames is not None

    def _received(self, frames: tuple[bytes, bytes], now_s: float) -> None:
        message = self._read(frames)
        if message is None:
            return
        if message.number < self._next:
            if message.at_s <= self._at_s:
                return  # it was repeated before it came
            self._restarted()
        if message.number > self._next:
            self._node.events.gaps += 1
            if self._source.can_replay:
                self._ahead = message
                self._ask(now_s)
                return
        self._apply(message)

    def _repeated(self, frames: tuple[bytes, bytes], now_s: float) -> None:
        if frames[0] == LAST:
            self._end_replay(now_s, answered=True)
            return
        self._patience_s = now_s + REPLAY_S
        message = self._read(frames)
        if message is not None and message.number >= self._next:
            self._apply(message)

    def _read(self, frames: tuple[bytes, bytes]) -> Message | None:
        message = read_message(*frames)
        if message is None:
            self._node.events.unreadable += 1
            self._forget("a message cannot be read")
            if (number := read_number(frames[0])) is not None:
                self._next = max(self._next, number + 1)
        return message

    def _apply(self, message: Message) -> None:
        """Messages before this one, if any are missing, are lost."""
        if message.number > self._next:
            self._forget("messages are missing")
        self._whole |= message.number == 0
        for event in message.events:
            self._exact.happened(self._node, event)
            self._whole |= isinstance(event, Cleared)
            self._new_blocks += len(event.hashes) if isinstance(event, Stored) else 0
        self._whole |= self._turned_over()
        self._next, self._at_s = message.number + 1, message.at_s
        self._since_s = min(self._since_s, message.at_s)
        self._node.events.messages += 1

    def _ask(self, now_s: float) -> None:
        self._source.ask(self._next)
        self._patience_s = now_s + REPLAY_S

    def _end_replay(self, now_s: float, *, answered: bool) -> None:
        self._source.hush()
        self._patience_s = None
        self._whole |= answered and self._next == 0  # it has said nothing yet
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            if self._silence.asked(answered, self._next, now_s):
                logger.warning("node %s: KV events come only when asked for: %s", self._node.id, _ADVICE)
        elif ahead.number >= self._next:
            self._apply(ahead)

    def _forget(self, why: str) -> None:
        if self._whole:
            logger.warning("node %s: KV events: %s; the prompt index answers alone", self._node.id, why)
        self._exact.forget(self._node)
        self._whole, self._new_blocks, self._since_s = False, 0, math.inf

    def _restarted(self) -> None:
        """The engine is another now: it counts from 0, and holds nothing."""
        self._source.hush()
        self._patience_s = self._ahead = None
        self._exact.happened(self._node, Cleared())
        self._next, self._at_s = 0, -math.inf
        self._whole, self._new_blocks, self._since_s = False, 0, math.inf

    def _turned_over(self) -> bool:
        """Whether the engine has stored as many blocks as it has, so that the older ones are gone."""
        report, block_tokens = self._node.report, self._exact.block_tokens(self._node)
        capacity_tokens = report.kv_capacity_tokens if report else None
        return bool(capacity_tokens and block_tokens) and (
            self._new_blocks * (block_tokens or 0) >= (capacity_tokens or 0)
        )

    def _look(self, now_s: float) -> None:
        """Hold the feed against what the engine's metrics say."""
        report = self._node.report
        if report is None:
            return
        if report.started_unix_s is not None and self._since_s < report.started_unix_s:
            self._restarted()
            self._is_behind = self._source.can_replay
        doubt = self._silence.is_odd(report, now_s) or self._silence.is_due(now_s)
        if doubt and self._patience_s is None:
            self._silence.asks(self._next)
            if self._source.can_replay:
                self._ask(now_s)
            else:
                self._silence.asked(False, self._next, now_s)

    def _judge(self, now_s: float) -> None:
        alive = now_s - self._silence.heard_s < _STALE_S or self._node.fresh_report(now_s) is not None
        exact = self._whole and alive and not self._silence.is_proven
        if exact and not self._node.events.exact:
            logger.info("node %s: KV events tell what its cache holds", self._node.id)
        self._node.events.exact = exact


class _Silence:
    """Whether a feed says nothing though its engine fills blocks."""

    def __init__(self) -> None:
        self.heard_s = -math.inf
        self.is_proven = False
        self._again_s = math.inf
        """When to ask an engine once more that did not answer."""
        self._asked_from: int | None = None
        self._rescues = 0
        self._report: EngineReport | None = None
        self._computed: int | None = None
        """Prompt tokens that the engine had computed when the feed last spoke."""
        self._odd_since_s: float | None = None

    def broken(self, now_s: float) -> None:
        """A message has come."""
        self.heard_s = now_s
        self._rescues = 0
        self._again_s = math.inf
        self._settle(is_proven=False)

    def asks(self, number: int) -> None:
        """The engine is asked whether it has said something from this message on."""
        self._asked_from = number

    def is_due(self, now_s: float) -> bool:
        """Whether to ask an engine again that did not answer."""
        return now_s >= self._again_s

    def asked(self, answered: bool, number: int, now_s: float) -> bool:
        """It has repeated what was missed up to this message, or did not answer; whether that proves it now.

        A last message may get lost; but where none ever comes by itself, what is known is always old.
        """
        if answered and self._asked_from is not None and number > self._asked_from:
            self._rescues += 1
        before = self.is_proven
        self._settle(is_proven=not answered or self._rescues >= MOST_RESCUES)
        self._again_s = math.inf if answered else now_s + ASK_AGAIN_S
        return answered and self.is_proven and not before

    def _settle(self, is_proven: bool) -> None:
        self.is_proven = is_proven
        self._odd_since_s = self._computed = self._asked_from = None

    def is_odd(self, report: EngineReport, now_s: float) -> bool:
        """Whether events are overdue by the engine's own metrics."""
        if (
            report is not self._report
            and report.prefix_queries is not None
            and report.prefix_hits is not None
        ):
            self._report = report
            computed = report.prefix_queries - report.prefix_hits
            if self._computed is None or computed < self._computed:
                self._computed, self._odd_since_s = computed, None
            elif computed - self._computed > SILENT_TOKENS and self._odd_since_s is None:
                self._odd_since_s = now_s
        return self._odd_since_s is not None and now_s - self._odd_since_s > SILENT_S
