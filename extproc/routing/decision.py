"""What is decided on a request."""

import msgspec

from extproc.config import Protocol
from extproc.routing.blocks import PromptBlocks
from extproc.routing.loads import Work
from extproc.routing.node import Booking, Node
from extproc.routing.receipts import Receipt


class Prefill(msgspec.Struct, eq=False):
    """The first leg of a split request."""

    node: Node
    protocol: Protocol
    engine_model: str
    booking: Booking
    whole: Work
    """What the request is to the decode node if that must compute the prompt after all."""
    matched_bytes: float
    """How much of the prompt the node held before."""
    predicted_s: float
    """Seconds until the leg is done, as the data sheet has it."""


class Decision(msgspec.Struct, eq=False):
    """The node that takes a request, its booking, and where the request goes if that node fails."""

    node: Node
    fallbacks: tuple[Node, ...]
    booking: Booking
    engine_model: str | None
    """The model's name on these nodes, where an alias changes it."""
    blocks: PromptBlocks
    matched_bytes: float
    """How much of the prompt the node that has the booking held before."""
    picked_s: float
    predicted_s: float
    """Seconds from the pick to the first token, as the data sheet has it."""
    receipt: Receipt
    prefill: Prefill | None = None
    """The leg that comes first, where the request is split."""
