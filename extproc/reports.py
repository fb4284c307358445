"""What the admin app tells of decisions, as JSON: it writes these, and the command reads them."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from extproc.routing.outcome import LegFailure, Outcome


class Role(StrEnum):
    """What a candidate became."""

    CHOSEN = "chosen"
    FALLBACK = "fallback"


class CandidateReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node that could take the request. `cost_s`: the sum of the terms over the divisor."""

    node: str
    hardware: str
    role: Role | None
    weight: float
    cost_s: float
    terms_s: dict[str, float]
    matched_tokens: int
    put_back: tuple[str, ...]

    @property
    def divisor(self) -> float:
        """The weight, but 0 counts as 1: it only puts a node behind others."""
        return self.weight or 1.0


class NodeReason(msgspec.Struct, frozen=True):
    """A node, and why it was out or failed."""

    node: str
    reason: str


class PrefillReport(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill leg of a split request: as predicted, and what came of it (`None`: not known)."""

    node: str
    uncached_tokens: int
    wait_s: float
    prefill_s: float
    transfer_s: float
    saved_s: float
    """What the decode nodes are spared: the prefill, and what it would slow down there."""
    delay_s: float
    """How much longer the first token takes than without a split; may be negative."""
    took_s: float | None
    failure: LegFailure | None
    """Why the request went on whole."""


class DecisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, or a dry run, which has no ids; token counts are what the router expected.

    `candidates` are the best eight in order; `fallbacks` may lie beyond them. `decided_at`: Unix seconds.
    """

    request_id: str | None
    exchange_id: str | None
    decided_at: float
    model: str
    policy: str
    prompt_tokens: int
    expected_output_tokens: int
    waits: bool
    waited_s: float
    pinned: bool
    equally_cheap: int
    predicted_ttft_s: float
    candidates: Annotated[list[CandidateReport], Meta(min_length=1)]
    fallbacks: list[str]
    excluded: list[NodeReason]
    more_excluded: int
    failed_attempts: list[NodeReason]
    prefill: PrefillReport | None = None
    """The leg before, where the request is split."""
    outcome: Outcome | None = None
    """What really happened, once the access log tells."""
    why: str = ""
    """What decided, in a sentence or two."""

    @property
    def is_dry(self) -> bool:
        """Whether nothing was sent."""
        return self.exchange_id is None


class DecisionList(msgspec.Struct, frozen=True):
    """The latest decisions, the newest first."""

    decisions: list[DecisionReport]
