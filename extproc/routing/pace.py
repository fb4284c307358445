"""How fast the nodes really are: observed over predicted seconds, per node."""

from collections import deque
from statistics import median

KEPT = 64
"""Observations a node."""
ENOUGH = 8
"""Observations before they count."""
LEAST_PREFILL_S = 0.05
"""Predictions below this are lost in what the network adds."""
LEAST_OUTPUT_TOKENS = 8
SLOWEST, FASTEST = 10.0, 0.1
"""Bounds of the factors."""


class Pace:
    """Factors on the predicted seconds of prefill and of decoding, each one a slot; 1 is as predicted."""

    def __init__(self) -> None:
        self.prefill: list[float] = []
        self.decode: list[float] = []
        self._first_tokens: list[deque[tuple[float, float]]] = []
        self._steps: list[deque[float]] = []

    def add(self, slot: int) -> None:
        """A node has this slot now, the next one or one that was free; nothing is known of it."""
        self.prefill[slot : slot + 1] = self.decode[slot : slot + 1] = [1.0]
        self._first_tokens[slot : slot + 1] = [deque(maxlen=KEPT)]
        self._steps[slot : slot + 1] = [deque(maxlen=KEPT)]

    def knows_prefill(self, slot: int) -> bool:
        """Whether the node's factor is observed, and not just taken to be 1."""
        return len(self._first_tokens[slot]) >= ENOUGH

    def first_token(self, slot: int, observed_s: float, predicted_s: float) -> None:
        """A stream's first token: `predicted_s` is the wait and the prefill at factor 1."""
        if predicted_s <= LEAST_PREFILL_S:
            return
        seen = self._first_tokens[slot]
        seen.append((observed_s, predicted_s))
        if len(seen) >= ENOUGH:
            ratio = sum(observed for observed, _ in seen) / sum(predicted for _, predicted in seen)
            self.prefill[slot] = min(max(ratio, FASTEST), SLOWEST)

    def decoded(self, slot: int, tokens: float, observed_s: float, step_s: float) -> None:
        """An answer's decoding: `step_s` is a predicted step at factor 1, with the batch at its end."""
        if tokens <= LEAST_OUTPUT_TOKENS or step_s <= 0 or observed_s <= 0:
            return
        seen = self._steps[slot]
        seen.append(observed_s / tokens / step_s)
        if len(seen) >= ENOUGH:
            self.decode[slot] = min(max(median(seen), FASTEST), SLOWEST)
