"""Prompts that kill engines: known by their fingerprint, kept from every node for a while.

With the prompt that kills an engine, all others on it are lost, and some of them follow it to the next
engine that it kills. So a prompt is held only once more nodes have died of it than of any other that was
lost with it; until then it is a suspect, and gets no second node to kill.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

DEATH_S: Final = 5.0
"""A node that goes offline so soon after it broke a request off may have died of it."""
FATAL_NODES: Final = 2
"""Nodes that died of a prompt before it is kept from others."""
QUARANTINE_S: Final = 600.0
"""How long that lasts; suspicion lasts as long."""
SERVED_S: Final = 60.0
"""A prompt that some node answered so lately is not what another dies of."""
KEPT: Final = 10_000
"""Prompts remembered: those that were served, and those that are under suspicion."""


@dataclass(slots=True)
class _Suspect:
    """`broken_s`: when each node broke it off; `dead`: those of them that died."""

    broken_s: dict[str, float] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    seen_s: float = 0.0


@dataclass(slots=True, frozen=True)
class Quarantined:
    """A prompt in quarantine; `key` is its fingerprint in hexadecimal digits."""

    key: str
    nodes: tuple[str, ...]
    """The nodes that died of it."""
    left_s: float


class Quarantine:
    """Which prompts are kept from the nodes. Fingerprint 0 stands for prompts that are not known."""

    def __init__(self) -> None:
        self._served_s: OrderedDict[int, float] = OrderedDict()
        self._suspects: OrderedDict[int, _Suspect] = OrderedDict()
        self._died_s: dict[str, float] = {}
        self._until_s: dict[int, float] = {}
        """Prompts of which enough nodes died, as it seems: when each is forgotten."""

    def holds(self, fingerprint: int, now_s: float) -> bool:
        """Whether no node may get the prompt."""
        if not self._until_s or fingerprint not in self._until_s:
            return False
        if now_s < self._until_s[fingerprint]:
            return not self._has_accomplice(fingerprint)
        self._release(fingerprint)
        return False

    def dead_nodes(self, fingerprint: int) -> int:
        """How many nodes have died of the prompt, as it seems."""
        suspect = self._suspects.get(fingerprint) if self._suspects else None
        return 0 if suspect is None else len(suspect.dead)

    def served(self, fingerprint: int, now_s: float) -> None:
        """A node answered the prompt and lives: it is not what engines die of."""
        self._release(fingerprint)
        self._served_s[fingerprint] = now_s
        self._served_s.move_to_end(fingerprint)
        if len(self._served_s) > KEPT:
            self._served_s.popitem(last=False)

    def broken(self, fingerprint: int, node_id: str, now_s: float) -> None:
        """The node lost the connection before it answered the prompt at all."""
        if not fingerprint or now_s - self._served_s.get(fingerprint, -math.inf) < SERVED_S:
            return
        suspect = self._suspects.setdefault(fingerprint, _Suspect())
        self._suspects.move_to_end(fingerprint)
        suspect.broken_s[node_id] = suspect.seen_s = now_s
        if len(self._suspects) > KEPT:
            self._release(next(iter(self._suspects)))
        if now_s - self._died_s.get(node_id, -DEATH_S) < DEATH_S:
            self._blame(fingerprint, suspect, node_id, now_s)

    def died(self, node_id: str, now_s: float) -> None:
        """The node's engine is gone."""
        self._died_s[node_id] = now_s
        for fingerprint in reversed(list(self._suspects)):
            suspect = self._suspects[fingerprint]
            if now_s - suspect.seen_s > QUARANTINE_S:
                self._release(fingerprint)
            elif now_s - suspect.broken_s.get(node_id, -DEATH_S) < DEATH_S:
                self._blame(fingerprint, suspect, node_id, now_s)

    def listed(self, now_s: float) -> list[Quarantined]:
        """The prompts in quarantine."""
        return [
            Quarantined(
                f"{fingerprint:016x}", tuple(sorted(self._suspects[fingerprint].dead)), until_s - now_s
            )
            for fingerprint, until_s in self._until_s.items()
            if until_s > now_s and not self._has_accomplice(fingerprint)
        ]

    def clear(self, key: str) -> bool:
        """Let a prompt out; `False`: it is not in quarantine."""
        try:
            fingerprint = int(key, 16)
        except ValueError:
            return False
        held = fingerprint in self._until_s
        self._release(fingerprint)
        return held

    def _blame(self, fingerprint: int, suspect: _Suspect, node_id: str, now_s: float) -> None:
        suspect.dead.add(node_id)
        if len(suspect.dead) >= FATAL_NODES:
            self._until_s[fingerprint] = now_s + QUARANTINE_S

    def _has_accomplice(self, fingerprint: int) -> bool:
        """Whether another prompt was on every node that died of this one: then either may be the killer."""
        dead = self._suspects[fingerprint].dead
        others = (other for other in self._until_s if other != fingerprint)
        return any(dead <= self._suspects[other].dead for other in others)

    def _release(self, fingerprint: int) -> None:
        self._suspects.pop(fingerprint, None)
        self._until_s.pop(fingerprint, None)
