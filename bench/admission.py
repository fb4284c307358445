"""What the queue is worth to a fleet at twice its capacity, and what it costs.

    .venv/bin/python -m bench.admission [--seconds 60] [--json]

Four simulated engines of 16 slots get twice the requests that they can answer: 10 % of priority 10, 40 % of
5, 50 % of 0, each to be answered within 30 s. `capped` has `max_batch_size` at the engines' slots; `inferred`
has only the engines' metrics to tell that they are full; with `no queue` requests wait in the engines.

Then the queue alone: microseconds to put a request into it and to take one out, with 5,000 waiting, without
the choice of the node.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.overload import SHARES, SLOTS, Outcome, Overload, capacity, make_node, request_of
from extproc.openai.request import RoutingRequest
from extproc.routing.admission import Admission
from extproc.routing.blocks import PromptBlocks
from extproc.routing.node import Node
from extproc.routing.router import Decision, Router
from extproc.routing.waiting import Waiter

WAITING = 5_000


class Row(msgspec.Struct):
    """One priority of one run; waits in seconds."""

    run: str
    priority: int
    asked: int
    served: int
    wait_p50_s: float
    wait_p99_s: float
    longest_wait_s: float


class Run(msgspec.Struct):
    """One run: whole answers a second, and requests that engines kept waiting."""

    run: str
    throughput: float
    engine_waiting_mean: float
    engine_waiting_most: int


class QueueCost(msgspec.Struct):
    """Medians, in microseconds."""

    enqueue_us: float
    dequeue_us: float


def runs(seconds: float) -> dict[str, Outcome]:
    """The same load with each kind of queue."""
    rate = 2.0 * capacity()
    kinds = {"capped": (SLOTS, False), "inferred": (None, True), "no queue": (None, False)}
    return {name: Overload(cap, reports, seed=1).run(rate, seconds) for name, (cap, reports) in kinds.items()}


def rows(name: str, outcome: Outcome) -> list[Row]:
    """What became of each priority."""
    return [
        Row(
            name,
            priority,
            len(clients := outcome.of(priority)),
            sum(client.is_served for client in clients),
            outcome.wait_s(priority, 50),
            outcome.wait_s(priority, 99),
            max(client.wait_s for client in clients),
        )
        for priority in SHARES
    ]


class _TimedRouter(Router):
    """Adds up the seconds of its decisions."""

    decided_s = 0.0

    def decide(
        self,
        request: RoutingRequest,
        now_s: float,
        blocks: PromptBlocks | None = None,
        pick: Callable[[Node], bool] | None = None,
    ) -> Decision | None:
        started_s = time.perf_counter()
        try:
            return super().decide(request, now_s, blocks, pick)
        finally:
            self.decided_s += time.perf_counter() - started_s


def queue_cost() -> QueueCost:
    """Fill the queue, and serve it with one slot."""
    router = _TimedRouter([make_node(0)], cap=1)
    admission = Admission(router, WAITING + 1, 1 << 40)
    requests = [request_of(number % 11, number) for number in range(WAITING + 1)]
    running: list[Decision] = []
    enqueues_s, dequeues_s = [], []
    for request in requests:
        started_s = time.perf_counter()
        outcome = admission.submit(request, 1000, 0.0, lambda: None)
        enqueues_s.append(time.perf_counter() - started_s)
        if isinstance(outcome, Decision):
            running.append(outcome)
            continue
        outcome.wake = _keeps(running, outcome)
    for _ in range(WAITING):
        running.pop().booking.release(0.0)
        router.decided_s, started_s = 0.0, time.perf_counter()
        admission.freed(0.0)
        dequeues_s.append(time.perf_counter() - started_s - router.decided_s)
    assert admission.waiting == 0
    return QueueCost(statistics.median(enqueues_s) * 1e6, statistics.median(dequeues_s) * 1e6)


def _keeps(running: list[Decision], waiter: Waiter) -> Callable[[], None]:
    def keep() -> None:
        assert isinstance(waiter.outcome, Decision)
        running.append(waiter.outcome)

    return keep


def measure(seconds: float) -> tuple[list[Run], list[Row], QueueCost]:
    """All figures."""
    outcomes = runs(seconds)
    summaries = [
        Run(name, one.throughput, statistics.fmean(one.engine_waiting), max(one.engine_waiting))
        for name, one in outcomes.items()
    ]
    return summaries, [row for name, one in outcomes.items() for row in rows(name, one)], queue_cost()


def _show(kind: type[msgspec.Struct], listed: list[msgspec.Struct]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for field in kind.__struct_fields__:
        table.add_column(field.replace("_", " "), justify="left" if field == "run" else "right")
    for one in listed:
        table.add_row(*(_text(value) for value in msgspec.structs.astuple(one)))
    return table


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) and math.isfinite(value) else str(value)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        "bench.admission", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated, of each run (60)")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    summaries, priorities, cost = measure(options.seconds)
    if options.json:
        print(json.dumps(msgspec.to_builtins({"runs": summaries, "priorities": priorities, "queue": cost})))
        return
    console = Console()
    for listed in (summaries, priorities, [cost]):
        console.print(_show(type(listed[0]), list(listed)))


if __name__ == "__main__":
    main()
