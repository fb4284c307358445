"""The event loop of a replay: arrivals, ends of steps and scrapes, in order of time."""

import heapq
import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

from extproc.simulator.replay.engine import Job
from extproc.simulator.replay.fleet import Fleet
from extproc.simulator.replay.picking import NodeInfo, Picker, RefusedError
from extproc.simulator.replay.traces import TraceRequest

SCRAPE_S = 1.0
"""Each node's metrics are told once in this time: what a picker knows of them is up to so old."""
LATE_RATIO = 0.03
"""A fleet is saturated when more of the requests than this have no first token as the last one arrives."""
ENOUGH_REQUESTS = 100
"""Of fewer, those that happen to be late are too many: the last one always is."""


@dataclass(slots=True)
class Outcome:
    """What became of every request, in order of arrival, and of the nodes."""

    jobs: list[Job]
    nodes: list[NodeInfo]
    prefill_s: list[float]
    """Seconds each node spent on steps that carried prefill. Decoding keeps all nodes busy nearly always."""
    pick_s: list[float]
    """Real seconds of each pick."""

    @property
    def late_ratio(self) -> float:
        """Share of the requests (0-1) that waited for their first token as the last one arrived."""
        last_s = self.jobs[-1].request.arrival_s
        return sum(job.first_token_s > last_s and not job.refused for job in self.jobs) / len(self.jobs)


def replay(requests: Iterable[TraceRequest], fleet: Fleet, picker: Picker, seed: int = 0) -> Outcome:
    """Send the requests, in order of arrival, where the picker says, and wait for all answers.

    Raises ValueError for a pick that is no node. A request is refused by the picker, or by a node that could
    never hold it.
    """
    loop = _Loop(fleet, picker, random.Random(f"{seed} scrapes"))
    for request in requests:
        loop.run_until(request.arrival_s)
        loop.arrive(request)
    loop.run_until(math.inf)
    return Outcome(
        jobs=loop.jobs,
        nodes=fleet.nodes,
        prefill_s=[engine.prefill_s for engine in fleet.engines],
        pick_s=loop.pick_s,
    )


class _Loop:
    def __init__(self, fleet: Fleet, picker: Picker, rng: random.Random) -> None:
        self.jobs: list[Job] = []
        self.pick_s: list[float] = []
        self._waiting: dict[int, Job] = {}
        self._engines = fleet.engines
        self._picker = picker
        self._ends: list[tuple[float, int]] = []  # heap of (run's end, node); outdated entries are skipped
        self._scrapes = [(rng.uniform(0, SCRAPE_S), node) for node in range(len(fleet.engines))]
        heapq.heapify(self._scrapes)

    def arrive(self, request: TraceRequest) -> None:
        job = Job(request)
        self.jobs.append(job)
        started_s = time.perf_counter()
        try:
            node = self._picker.pick(request, request.arrival_s)
        except RefusedError:
            job.refused = True
            return
        finally:
            self.pick_s.append(time.perf_counter() - started_s)
        if node is None:
            self._waiting[request.id] = job
            return
        self._send(job, node, request.arrival_s)
        self._send_released(request.arrival_s)

    def _send_released(self, now_s: float) -> None:
        """Send those that an end, a refusal or a report made room for."""
        while released := self._picker.released():
            for request_id, node in released:
                self._send(self._waiting.pop(request_id), node, now_s)

    def _send(self, job: Job, node: int, now_s: float) -> None:
        if not 0 <= node < len(self._engines):
            raise ValueError(f"request {job.request.id} was sent to node {node} of {len(self._engines)}")
        job.node = node
        if not self._engines[node].can_hold(job):
            job.refused = True
            self._picker.finished(job.request.id, now_s, 0)
            return
        self._engines[node].submit(job, now_s)
        self._note_end(node)

    def run_until(self, until_s: float) -> None:
        """Let all happen that happens by then; for ever means until no engine has work."""
        while self._ends or until_s < math.inf:
            end_s, node = self._ends[0] if self._ends else (math.inf, -1)
            if min(end_s, self._scrapes[0][0]) > until_s:
                return
            if self._scrapes[0][0] <= end_s:
                self._scrape()
                continue
            heapq.heappop(self._ends)
            if self._engines[node].next_s == end_s:
                self._advance(node, end_s)

    def _advance(self, node: int, now_s: float) -> None:
        begun, ended = self._engines[node].advance()
        for job in begun:
            self._picker.first_token(job.request.id, now_s)
        for job in ended:
            self._picker.finished(job.request.id, now_s, job.cached_tokens)
        self._note_end(node)
        if ended:
            self._send_released(now_s)

    def _note_end(self, node: int) -> None:
        end_s = self._engines[node].next_s
        if end_s < math.inf:
            heapq.heappush(self._ends, (end_s, node))

    def _scrape(self) -> None:
        at_s, node = self._scrapes[0]
        heapq.heapreplace(self._scrapes, (at_s + SCRAPE_S, node))
        self._picker.report(node, self._engines[node].metrics(at_s))
        self._send_released(at_s)
