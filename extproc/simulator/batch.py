"""Continuous batching with chunked prefill, as vLLM schedules it. No clock and no I/O of its own."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from extproc.simulator.blocks import BLOCK_TOKENS, BlockCache, Lease, blocks_for
from extproc.simulator.roofline import StepLoad


class State(Enum):
    """Where a generation is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()
    ABORTED = auto()


@dataclass(slots=True, eq=False)
class Generation:
    """A prompt and the tokens to make of it. `hashes`: those of all full blocks, prompt and output.

    `output_tokens` 0 asks for the prompt's computation alone, as an embedding does.
    """

    prompt_tokens: int
    output_tokens: int
    hashes: list[int]
    arrival_s: float = 0.0
    state: State = State.WAITING
    computed_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the KV cache when first admitted; None before."""
    lease: Lease | None = None
    ids: bytes = b""
    """The tokens of the full blocks, 4 bytes each; needed only where someone watches the cache."""
    salt: str | None = None

    @property
    def known_tokens(self) -> int:
        """Tokens that exist: the prompt's and those generated."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def ended(self) -> bool:
        """No more tokens will come."""
        return self.state in (State.FINISHED, State.ABORTED)


@dataclass(slots=True)
class Counters:
    """Totals since the start, as the engine's metrics show them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Step:
    ends_at_s: float
    work: list[tuple[Generation, int]]


class Watcher(Protocol):
    """Whom the cache's changes are told, step by step."""

    def stored(self, generation: Generation, first: int, end: int) -> None:
        """The cache has the generation's blocks number `first` to `end` now."""

    def step_done(self) -> None:
        """A step is over."""


class Batch:
    """The waiting queue, the running batch and the step under way.

    `step_s` tells the seconds of a step. Times are seconds of one clock of the caller's choice.
    """

    def __init__(
        self,
        cache: BlockCache,
        step_s: Callable[[StepLoad], float],
        max_num_seqs: int = 256,
        step_tokens: int = 2048,
        watcher: Watcher | None = None,
    ) -> None:
        self.cache = cache
        self.counters = Counters()
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._step_tokens = step_tokens
        self._watcher = watcher
        self._step: _Step | None = None

    @property
    def next_at_s(self) -> float | None:
        """When the step under way ends; None while idle."""
        return self._step.ends_at_s if self._step else None

    def submit(self, generation: Generation, now_s: float) -> None:
        """Queue a generation. Raises ValueError if the cache could never hold it."""
        if blocks_for(generation.prompt_tokens + generation.output_tokens) > self.cache.capacity:
            raise ValueError("the generation needs more KV blocks than the engine has")
        generation.arrival_s = now_s
        self.waiting.append(generation)
        if self._step is None:
            self._begin_step(now_s)

    def abort(self, generation: Generation) -> None:
        """Drop a generation and free its blocks and slot at once. Harmless if it has ended or never came."""
        if generation.state is State.WAITING:
            if generation not in self.waiting:
                return
            self.waiting.remove(generation)
        elif generation.state is State.RUNNING:
            self.running.remove(generation)
        else:
            return
        self._end(generation, State.ABORTED)

    def advance(self, now_s: float, max_work: int | None = None) -> list[Generation]:
        """Finish the steps that end by `now_s`; the generations that got tokens or ended, each once.

        Stops early after `max_work` pieces of work, so that a caller far behind can catch up in slices.
        """
        moved: dict[Generation, None] = {}
        work = 0
        while (step := self._step) and step.ends_at_s <= now_s and (max_work is None or work < max_work):
            work += len(step.work)
            self._finish_step(step, moved)
            self._begin_step(step.ends_at_s)
        return list(moved)

    def _begin_step(self, at_s: float) -> None:
        if not self.running and self.waiting:
            at_s = max(at_s, self.waiting[0].arrival_s)
        work: list[tuple[Generation, int]] = []
        load = StepLoad()
        self._continue_running(work, load)
        self._admit_waiting(at_s, work, load)
        self._step = _Step(at_s + self._step_s(load), work) if work else None

    def _continue_running(self, work: list[tuple[Generation, int]], load: StepLoad) -> None:
        """Plan the next tokens of the running generations, oldest first."""
        index = 0
        while index < len(self.running) and load.tokens < self._step_tokens:
            generation = self.running[index]
            missing = generation.known_tokens - generation.computed_tokens
            tokens = min(missing, self._step_tokens - load.tokens)
            if self._make_room(generation, generation.computed_tokens + tokens):
                load.add(tokens, generation.computed_tokens)
                work.append((generation, tokens))
                index += 1

    def _make_room(self, generation: Generation, tokens: int) -> bool:
        """Get blocks for `tokens` tokens, if need be from the youngest; False if that was itself."""
        assert generation.lease is not None
        while not self.cache.grow(generation.lease, blocks_for(tokens)):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is generation:
                return False
        return True

    def _preempt(self, generation: Generation) -> None:
        self._release(generation)
        generation.state = State.WAITING
        generation.computed_tokens = 0
        self.waiting.appendleft(generation)
        self.counters.preemptions += 1

    def _admit_waiting(self, at_s: float, work: list[tuple[Generation, int]], load: StepLoad) -> None:
        """Start the waiting generations that have arrived, first come first served, while there is room."""
        while self.waiting and load.tokens < self._step_tokens and len(self.running) < self._max_num_seqs:
            generation = self.waiting[0]
            if generation.arrival_s > at_s:
                return
            # The last token is always computed: its result is the next token.
            matchable = generation.hashes[: (generation.known_tokens - 1) // BLOCK_TOKENS]
            matched = matchable[: self.cache.match(matchable)]
            cached = len(matched) * BLOCK_TOKENS
            tokens = min(generation.known_tokens - cached, self._step_tokens - load.tokens)
            lease = self.cache.lease(matched, blocks_for(cached + tokens))
            if lease is None:
                return
            self._start(self.waiting.popleft(), lease, cached)
            load.add(tokens, cached)
            work.append((generation, tokens))

    def _start(self, generation: Generation, lease: Lease, cached_tokens: int) -> None:
        generation.lease = lease
        generation.state = State.RUNNING
        generation.computed_tokens = cached_tokens
        self.running.append(generation)
        if generation.cached_tokens is None:
            generation.cached_tokens = cached_tokens
            self.counters.prompt_tokens += generation.prompt_tokens
            self.counters.cached_tokens += cached_tokens

    def _finish_step(self, step: _Step, moved: dict[Generation, None]) -> None:
        ended = False
        for generation, tokens in step.work:
            if generation.state is not State.RUNNING:
                continue  # aborted while the step ran
            generation.computed_tokens += tokens
            self._publish_full_blocks(generation)
            if generation.computed_tokens < generation.known_tokens:
                continue  # a chunk of a longer prompt
            if generation.generated_tokens < generation.output_tokens:
                generation.generated_tokens += 1
                self.counters.generated_tokens += 1
            moved[generation] = None
            if generation.generated_tokens >= generation.output_tokens:
                self._end(generation, State.FINISHED)
                ended = True
        if self._watcher is not None:
            self._watcher.step_done()
        if ended:
            self.running = [generation for generation in self.running if not generation.ended]

    def _publish_full_blocks(self, generation: Generation) -> None:
        assert generation.lease is not None
        published = len(generation.lease.published)
        full = generation.computed_tokens // BLOCK_TOKENS
        if full > published:
            if self._watcher is not None:
                known = self.cache.match(generation.hashes[published:full])
                self._watcher.stored(generation, published + known, full)
            self.cache.publish(generation.lease, generation.hashes[published:full])

    def _end(self, generation: Generation, state: State) -> None:
        self._release(generation)
        generation.state = state

    def _release(self, generation: Generation) -> None:
        if generation.lease is not None:
            self.cache.release(generation.lease)
            generation.lease = None
