"""Switches for what can go wrong with an engine, each for a number of times or with a probability."""

import random
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec

_Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class FaultKind(StrEnum):
    """What goes wrong."""

    ERROR_500 = "error-500"
    ERROR_503 = "error-503"
    ERROR_429 = "error-429"
    OUT_OF_MEMORY = "out-of-memory"
    """500 as vLLM answers when its engine core fails."""
    OUT_OF_MEMORY_TGI = "out-of-memory-tgi"
    """424 as TGI answers: CUDA out of memory."""
    HANG = "hang"
    """No answer, not even a head."""
    RESET = "reset"
    """The TCP connection is reset before the head."""
    HANG_MID_STREAM = "hang-mid-stream"
    RESET_MID_STREAM = "reset-mid-stream"
    ERROR_MID_STREAM = "error-mid-stream"
    """An error event inside a 200 stream, and then `[DONE]`."""
    DIE = "die"
    """The request kills the engine: everything in flight fails, then nothing listens any more."""
    SLOW = "slow"
    """A step takes `factor` times as long."""
    HEALTH_DOWN = "health-down"
    METRICS_SLOW = "metrics-slow"
    METRICS_GARBAGE = "metrics-garbage"


MID_STREAM = frozenset({FaultKind.HANG_MID_STREAM, FaultKind.RESET_MID_STREAM, FaultKind.ERROR_MID_STREAM})
_BEFORE_THE_HEAD = frozenset(
    {
        FaultKind.ERROR_500,
        FaultKind.ERROR_503,
        FaultKind.ERROR_429,
        FaultKind.OUT_OF_MEMORY,
        FaultKind.OUT_OF_MEMORY_TGI,
        FaultKind.HANG,
        FaultKind.RESET,
        FaultKind.DIE,
    }
)


class Fault(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One armed switch. Without `count` it stays armed until cleared."""

    kind: FaultKind
    probability: _Probability = 1.0
    count: _Count | None = None
    """How many more times it strikes."""
    contains: str = ""
    """Requests only: strikes those whose body contains this text."""
    after_chunks: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Mid-stream faults: strike after so many tokens."""
    factor: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """`slow` only."""
    delay_s: _Seconds = 0.5
    """`die`: real seconds until the process is gone; `metrics-slow`: until the answer."""


class Faults:
    """The armed switches of one engine, with a seeded source of chance."""

    def __init__(self, armed: Iterable[Fault] = (), seed: int = 0) -> None:
        self.armed = [msgspec.structs.replace(fault) for fault in armed]
        self._random = random.Random(seed)

    def arm(self, faults: Iterable[Fault]) -> None:
        """Add switches; earlier ones are asked first."""
        self.armed.extend(faults)

    def clear(self) -> None:
        """Disarm everything."""
        self.armed.clear()

    def strike(self, kind: FaultKind) -> Fault | None:
        """The fault of this kind that strikes now, if one does."""
        return self._strike(frozenset({kind})) if self.armed else None

    def strike_request(self, body: bytes, stream: bool) -> Fault | None:
        """The fault that strikes this request, if one does; mid-stream ones need a stream."""
        if not self.armed:
            return None
        return self._strike(_BEFORE_THE_HEAD | MID_STREAM if stream else _BEFORE_THE_HEAD, body)

    def slowdown(self) -> float:
        """The factor on the step that begins now."""
        fault = self.strike(FaultKind.SLOW)
        return fault.factor if fault else 1.0

    def _strike(self, kinds: frozenset[FaultKind], body: bytes = b"") -> Fault | None:
        for fault in self.armed:
            if fault.kind not in kinds or fault.contains.encode() not in body:
                continue
            if fault.probability < 1 and self._random.random() >= fault.probability:
                continue
            if fault.count is not None:
                fault.count -= 1
                if fault.count == 0:
                    self.armed.remove(fault)
            return fault
        return None
