"""Receipts: why each of the last requests went where it went, and what came of it."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final

import msgspec

from extproc.config import CachePolicy
from extproc.routing.cost import SCALE, Term
from extproc.routing.loads import Floats
from extproc.routing.node import Node
from extproc.routing.outcome import LegFailure, Outcome

CANDIDATES: Final = 8
"""Nodes on a receipt: the first of the ranking."""
RECEIPTS: Final = 10_000
"""Receipts kept: the latest."""
LONGEST_ID: Final = 128
"""Characters of a request's id that count: clients may choose it."""


class Reason(StrEnum):
    """Why a node that serves the model was no candidate, or came after dearer ones."""

    DRAINED = "drained"
    OFFLINE = "offline"
    NO_ROOM = "its KV memory is too small for the prompt"
    SPARE = "weight 0: only where no other is left"
    FULL = "at max_batch_size, or at the limit of a node that is not trusted yet"
    CROWDED = "over eviction_threshold_pct"
    PREFILLS = "role prefill: whole requests only where no other is left"


@dataclass(slots=True, frozen=True)
class Candidate:
    """A line of a receipt: a node, what the request would have cost there, and why."""

    node: Node
    cost_s: float
    """What decides: the sum of the terms over the node's weight."""
    terms_s: dict[Term, float]
    matched_tokens: int
    put_back: tuple[Reason, ...]


class SplitTerms(msgspec.Struct, eq=False):
    """The prefill leg of a split request: why it was worth it, and what came of it. Seconds are predicted."""

    node: Node
    uncached_tokens: float
    wait_s: float
    prefill_s: float
    transfer_s: float
    saved_s: float
    """What the decode pool is spared: the prefill, and what it would slow down there."""
    delay_s: float
    """How much longer the first token takes than on the best node for the whole request; may be negative."""
    took_s: float | None = None
    """What the leg really took."""
    failure: LegFailure | None = None
    """Why the request went on whole."""


class Receipt(msgspec.Struct, eq=False):
    """What a decision was made of, packed; read it through `candidates`."""

    model: str
    policy: CachePolicy
    prompt_tokens: float
    output_tokens: float
    bytes_per_token: float
    pinned: bool
    """Whether the client named the node."""
    equals: int
    """How many were as cheap as the cheapest: chance chose among them."""
    waits: bool
    """Whether none of them took more."""
    nodes: tuple[Node, ...]
    fallbacks: tuple[Node, ...]
    """Not always the next of `nodes`: they know the model by the same name as the first."""
    put_back: tuple[tuple[Reason, ...], ...]
    """Of each node, why it came after others; empty where none did."""
    excluded: tuple[tuple[Node, Reason], ...]
    """The first of those that serve the model and were no candidates."""
    more_excluded: int
    """How many more there were."""
    """Nodes that serve the model and were no candidates; none where the client named the node."""
    predicted_s: float
    """Seconds until the first token, at the pace observed of the node."""
    parts: Floats
    """As in `Costs`, of these nodes only."""
    matched_bytes: Floats | None
    request_id: str = ""
    exchange_id: str = ""
    decided_s: float = 0.0
    """On the router's clock."""
    waited_s: float = 0.0
    failed: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Attempts that failed: the node's id and why."""
    outcome: Outcome | None = None
    prefill: SplitTerms | None = None

    def candidates(self) -> Iterator[Candidate]:
        """The nodes in the order of the ranking: the first was chosen."""
        for at, node in enumerate(self.nodes):
            terms_s = {term: float(self.parts[term, at] * SCALE[term]) for term in Term}
            matched_bytes = 0.0 if self.matched_bytes is None else float(self.matched_bytes[at])
            matched_tokens = min(matched_bytes / self.bytes_per_token, self.prompt_tokens)
            cost_s = sum(terms_s.values()) / (node.config.weight or 1.0)
            put_back = self.put_back[at] if self.put_back else ()
            yield Candidate(node, cost_s, terms_s, round(matched_tokens), put_back)


class Receipts:
    """The latest receipts, by the id of the request and that of the exchange."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Receipt] = OrderedDict()
        self._latest: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, receipt: Receipt, exchange_id: str, request_id: str, waited_s: float) -> None:
        """A decision was carried out. A client may use a request id again: its latest request is found."""
        request_id = request_id[:LONGEST_ID]
        receipt.exchange_id, receipt.request_id, receipt.waited_s = exchange_id, request_id, waited_s
        self._kept[exchange_id] = receipt
        self._latest[request_id] = exchange_id
        if len(self._kept) > RECEIPTS:
            oldest, gone = self._kept.popitem(last=False)
            if self._latest.get(gone.request_id) == oldest:
                del self._latest[gone.request_id]

    def happened(self, exchange_id: str, outcome: Outcome) -> None:
        """What came of a request; ignored where its receipt is gone."""
        if receipt := self._kept.get(exchange_id):
            receipt.outcome = outcome

    def find(self, any_id: str) -> Receipt | None:
        """The receipt of a request, by either id."""
        any_id = any_id[:LONGEST_ID]
        return self._kept.get(self._latest.get(any_id, any_id))

    def latest(self, most: int) -> list[Receipt]:
        """The last ones, the newest first."""
        return list(islice(reversed(self._kept.values()), most))
