"""An engine in simulated time: continuous batching with chunked prefill, exact to the step, fast over many.

Steps that carry prefill are taken one by one. Between them nothing changes but that every context grows
by a token a step, so a step's seconds grow evenly and a whole run of steps is one sum.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from extproc.hardware import HardwareProfile, ModelShape
from extproc.simulator.replay.cache import UnitCache
from extproc.simulator.replay.picking import NodeMetrics
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceRequest
from extproc.simulator.roofline import StepLoad, step_s

STEP_TOKENS = 2048
"""Tokens a step may compute, decoding included: what vLLM takes on these cards (8192 on an H100)."""
MAX_RUNNING = 256
"""Requests that run at once."""
_EVEN = 1e-9  # relative; a run whose middle is off its chord by more has a kink inside


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through an engine, and what became of it. Times are inf until they come."""

    request: TraceRequest
    node: int | None = None
    """Which node has it; `None` while it waits for one."""
    refused: bool = False
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens in the KV memory."""
    first_token_s: float = math.inf
    finished_s: float = math.inf

    @property
    def tokens(self) -> int:
        """KV room it needs to the end. All of it is held from admission, so that nothing is preempted."""
        return self.request.prompt_tokens + self.request.output_tokens

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_token_s - self.request.arrival_s

    @property
    def latency_s(self) -> float:
        """Arrival to last token."""
        return self.finished_s - self.request.arrival_s


@dataclass(slots=True)
class _Run:
    """Steps taken together: the first lasts `first_s`, each further one `more_s` longer than the last."""

    start_s: float
    steps: int
    first_s: float
    more_s: float = 0.0
    prefill: list[tuple[Job, int]] = field(default_factory=list)
    """Prompt tokens to compute; a run that has any is one step."""

    def end_s(self, steps: int) -> float:
        """When that many of its steps are done."""
        return self.start_s + steps * self.first_s + self.more_s * (steps * (steps - 1) / 2)

    def steps_by(self, now_s: float) -> int:
        """The least steps, at least one, that end at `now_s` or later, within the run."""
        since_s = now_s - self.start_s
        linear_s = self.first_s - self.more_s / 2
        # more/2 * k^2 + linear * k = since, in the form that also holds for more = 0
        root = 2 * since_s / (linear_s + math.sqrt(linear_s * linear_s + 2 * self.more_s * since_s))
        steps = min(max(math.floor(root), 1), self.steps)
        while steps < self.steps and self.end_s(steps) < now_s:
            steps += 1
        return steps


class Engine:
    """One engine. `next_s` is when its present run ends (inf: idle); call `advance` then, never later."""

    def __init__(self, profile: HardwareProfile, shape: ModelShape, kv_capacity_tokens: int) -> None:
        self.next_s = math.inf
        self.prefill_s = 0.0
        """Seconds of the steps that carried prefill."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._profile = profile
        self._shape = shape
        self._cache = UnitCache(kv_capacity_tokens)
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []  # heap: the step of its last token, a tie-breaker
        self._decoded_tokens = 0  # KV tokens of the decoding jobs
        self._steps = 0
        self._jobs = 0
        self._run: _Run | None = None

    def can_hold(self, job: Job) -> bool:
        """Whether the job fits into the empty KV memory."""
        return job.tokens <= self._cache.capacity_tokens

    def metrics(self, now_s: float) -> NodeMetrics:
        """What the engine would answer a scraper now."""
        return NodeMetrics(
            at_s=now_s,
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._waiting),
            kv_used_ratio=self._cache.held_tokens / self._cache.capacity_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
        )

    def submit(self, job: Job, now_s: float) -> None:
        """Queue a job; it can start when the step under way ends. Raises ValueError if it can never fit."""
        if not self.can_hold(job):
            raise ValueError(f"request {job.request.id} needs more KV memory than the node has")
        self._waiting.append(job)
        run = self._run
        if run is None:
            self._begin(now_s)
        elif not run.prefill:
            run.steps = run.steps_by(now_s)
            self.next_s = run.end_s(run.steps)

    def advance(self) -> tuple[list[Job], list[Job]]:
        """End the present run at `next_s`, begin another; the jobs that got their first token, their last."""
        run, now_s = self._run, self.next_s
        assert run is not None
        if run.prefill:
            self.prefill_s += now_s - run.start_s
        self._steps += run.steps
        self._decoded_tokens += run.steps * len(self._decoding)
        begun = self._finish_prefill(run.prefill)
        ended = []
        while self._decoding and self._decoding[0][0] == self._steps:
            ended.append(heapq.heappop(self._decoding)[2])
        for job in begun:
            job.first_token_s = now_s
        for job in ended:
            job.finished_s = now_s
            self._release(job)
        self._begin(now_s)
        return begun, ended

    def _begin(self, at_s: float) -> None:
        load = self._decode_load(0)
        if prefill := self._plan_prefill(load):
            self._run = _Run(at_s, 1, self._step_s(load), prefill=prefill)
        elif self._decoding:
            self._run = self._decode_run(at_s)
        else:
            self._run, self.next_s = None, math.inf
            return
        self.next_s = self._run.end_s(self._run.steps)

    def _plan_prefill(self, load: StepLoad) -> list[tuple[Job, int]]:
        """Share the step's tokens among the prompts under way, then those that wait; adds them to `load`."""
        work = []
        for job in self._prefilling:
            work.append(self._chunk(job, load))
            if load.tokens >= STEP_TOKENS:
                return work
        while self._waiting and load.tokens < STEP_TOKENS:
            if len(self._prefilling) + len(self._decoding) >= MAX_RUNNING or not self._admit(
                self._waiting[0]
            ):
                break
            job = self._waiting.popleft()
            self._prefilling.append(job)
            work.append(self._chunk(job, load))
        return work

    @staticmethod
    def _chunk(job: Job, load: StepLoad) -> tuple[Job, int]:
        tokens = min(job.request.prompt_tokens - job.computed_tokens, STEP_TOKENS - load.tokens)
        load.add(tokens, job.computed_tokens)
        return job, tokens

    def _admit(self, job: Job) -> bool:
        """Give the job its KV memory, what it can from the cache; False while there is no room."""
        # The last token is always computed: its result is the first token of the answer.
        units = job.request.units[: (job.request.prompt_tokens - 1) // UNIT_TOKENS]
        matched = units[: self._cache.match(units)]
        if not self._cache.hold(matched, job.tokens):
            return False
        job.cached_tokens = job.computed_tokens = len(matched) * UNIT_TOKENS
        self.prompt_tokens += job.request.prompt_tokens
        self.cached_tokens += job.cached_tokens
        return True

    def _finish_prefill(self, work: list[tuple[Job, int]]) -> list[Job]:
        begun = []
        for job, tokens in work:
            published = job.computed_tokens // UNIT_TOKENS
            job.computed_tokens += tokens
            self._cache.publish(job.request.units[published : job.computed_tokens // UNIT_TOKENS])
            if job.computed_tokens < job.request.prompt_tokens:
                continue
            begun.append(job)
            self._prefilling.remove(job)
            self._decoded_tokens += job.request.prompt_tokens
            self._jobs += 1
            last_step = self._steps + job.request.output_tokens - 1
            heapq.heappush(self._decoding, (last_step, self._jobs, job))
        return begun

    def _release(self, job: Job) -> None:
        units = job.request.units[: job.request.prompt_tokens // UNIT_TOKENS]
        self._cache.release(units, job.tokens - len(units) * UNIT_TOKENS)
        self._decoded_tokens -= job.tokens - 1  # the last token's KV is never computed

    def _decode_run(self, at_s: float) -> _Run:
        """The longest run without an end of a job in which a step's seconds grow evenly."""
        steps = self._decoding[0][0] - self._steps
        first_s = self._step_s(self._decode_load(0))
        while steps > 1:
            more_s = (self._step_s(self._decode_load(steps - 1)) - first_s) / (steps - 1)
            middle = steps // 2
            middle_s = self._step_s(self._decode_load(middle))
            if abs(first_s + middle * more_s - middle_s) <= _EVEN * middle_s:
                return _Run(at_s, steps, first_s, more_s)
            steps = middle
        return _Run(at_s, 1, first_s)

    def _decode_load(self, later: int) -> StepLoad:
        """What a decode step reads and computes, `later` steps from now, with the same jobs."""
        jobs = len(self._decoding)
        context = self._decoded_tokens + later * jobs
        return StepLoad(jobs, context + jobs / 2, context)

    def _step_s(self, load: StepLoad) -> float:
        return step_s(self._profile, self._shape, load)
