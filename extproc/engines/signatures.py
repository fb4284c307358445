"""How engines say what went wrong with a request, so that another node may be better off with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from extproc.routing.outcome import Failure


@dataclass(frozen=True, slots=True)
class Signature:
    """A failing answer that means `failure`: its status, and one of these texts somewhere in the body.

    Texts are in lower case and so is the body that they are looked for in; without any, every body fits.
    """

    failure: Failure
    statuses: tuple[int, ...]
    texts: tuple[str, ...] = ()


# Each names the allocator: a message may repeat a prompt that speaks of being "out of memory".
MEMORY_TEXTS: Final = (
    *(f"{device} out of memory" for device in ("cuda", "hip", "xpu", "npu", "mps backend")),
    *(f"{device} error: out of memory" for device in ("cuda", "hip", "rocm")),
    "cudamalloc failed: out of memory",
    "outofmemoryerror",
    "erroroutofdevicememory",
)
"""What PyTorch, ggml and the drivers below them say when the memory of a GPU is used up."""
QUEUE_TEXTS: Final = ("queue is full", "overloaded", "too many requests")
"""What servers say that take no more requests for now."""

OUT_OF_MEMORY: Final = Signature(Failure.OUT_OF_MEMORY, (424, 500, 503), MEMORY_TEXTS)
QUEUE_FULL: Final = Signature(Failure.OVERLOADED, (503,), QUEUE_TEXTS)
TOO_MANY: Final = Signature(Failure.OVERLOADED, (429,))
FAILED: Final = Signature(Failure.ENGINE_DEATH, (500,))
"""A server whose engine is gone cannot say more than this."""

ANY_ENGINE: Final = (OUT_OF_MEMORY, QUEUE_FULL, TOO_MANY, FAILED)
"""What holds of an engine that nothing else is known of."""


def failure_of(signatures: Iterable[Signature], status: int, body: bytes) -> Failure | None:
    """What a failing answer means by these signatures, as Envoy reads it; `None`: none of them fits."""
    text = body.lower().decode("utf-8", "replace")
    for signature in signatures:
        fits = any(part in text for part in signature.texts) or not signature.texts
        if status in signature.statuses and fits:
            return signature.failure
    return None
