"""What streams gain when long prompts are computed on other nodes: `prefill_decode_split`, on and off.

    .venv/bin/python -m bench.split [--seconds 120] [--seeds 3] [--json]

Four simulated A100-80G serve an 8B model: 6 streams a second (prompts of 200 tokens, answers of 400), and 1.5
long prompts (8,000 tokens, answers of 100). `whole`: all nodes do both. `split`: two prefill, two decode, and
a network of 100 Gbit/s carries the KV. The router decides as it does in the service.
"""

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.pd_engine import store
from extproc.config import Backend, NodeConfig, Role
from extproc.hardware import PROFILES, Hardware, model_shape
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.routing.feedback import prefilled
from extproc.routing.node import Health, Node
from extproc.routing.router import Decision, Router
from extproc.simulator.batch import Batch, Generation
from extproc.simulator.blocks import BLOCK_TOKENS, BlockCache
from extproc.simulator.roofline import step_s

ROLES: Final = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
MODEL: Final = "simulated-8b"
CARD: Final = Hardware.A100_80G
LINK_BYTES_S: Final = 12.5e9 * 0.6
"""100 Gbit/s, of which so much is reached; the router has a figure of its own."""
WARM_UP_S: Final = 10.0


class Kind(msgspec.Struct, frozen=True):
    """Requests of one kind: how many a second, and their tokens."""

    rate: float
    prompt_tokens: int
    output_tokens: int


STREAMS: Final = Kind(6.0, 200, 400)
LONG: Final = Kind(1.5, 8_000, 100)


class Row(msgspec.Struct):
    """A run. Milliseconds between tokens of the streams; seconds to the first token; requests."""

    run: str
    seed: int
    itl_p50_ms: float
    itl_p99_ms: float
    stream_ttft_p99_s: float
    long_ttft_p50_s: float
    long_ttft_p99_s: float
    answers: int
    split: int


@dataclass(slots=True, eq=False)
class Client:
    """A request on its way."""

    kind: Kind
    arrived_s: float
    decision: Decision
    hashes: list[int]
    generation: Generation
    node: Node
    is_leg: bool
    token_s: list[float] = field(default_factory=list)


class Fleet:
    """Four nodes in simulated time."""

    def __init__(self, splits: bool, seed: int) -> None:
        self.now_s = 0.0
        self.ended: list[Client] = []
        self.splits = splits
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        nodes = [_node(number, role if splits else None) for number, role in enumerate(ROLES)]
        self._engines = {node.id: _engine() for node in nodes}
        self._running: dict[Generation, Client] = {}
        self.router = Router(nodes, rng=random.Random(seed), splits=splits)

    def run(self, seconds: float) -> None:
        """Let requests come for so long."""
        for kind in (STREAMS, LONG):
            at_s = 0.0
            while (at_s := at_s + self._rng.expovariate(kind.rate)) < seconds:
                self._at(at_s, partial(self._arrive, kind))
        while self._events and self._events[0][0] <= seconds:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()

    def _at(self, at_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), happens))

    def _arrive(self, kind: Kind) -> None:
        number = next(self._order)
        decision = self.router.decide(_request(kind, number), self.now_s)
        assert decision is not None
        blocks = (kind.prompt_tokens + kind.output_tokens) // BLOCK_TOKENS
        hashes = [number << 20 | block for block in range(blocks)]
        leg = decision.prefill
        node, output = (decision.node, kind.output_tokens) if leg is None else (leg.node, 1)
        generation = Generation(kind.prompt_tokens, output, hashes)
        self._submit(Client(kind, self.now_s, decision, hashes, generation, node, leg is not None))

    def _submit(self, client: Client) -> None:
        self._running[client.generation] = client
        self._engines[client.node.id].submit(client.generation, self.now_s)
        self._await_step(client.node)

    def _await_step(self, node: Node) -> None:
        if (due_s := self._engines[node.id].next_at_s) is not None:
            self._at(due_s, partial(self._step, node, due_s))

    def _step(self, node: Node, due_s: float) -> None:
        engine = self._engines[node.id]
        if engine.next_at_s != due_s:
            return
        moved = engine.advance(self.now_s)
        self._await_step(node)
        for generation in moved:
            self._moved(self._running[generation], generation)

    def _moved(self, client: Client, generation: Generation) -> None:
        if client.is_leg:
            if generation.ended:
                self._hand_over(client)
            return
        if not client.token_s:
            client.decision.booking.begun(self.now_s, self.now_s)
        client.token_s.append(self.now_s)
        if generation.ended:
            del self._running[generation]
            client.decision.booking.release(self.now_s)
            self.ended.append(client)

    def _hand_over(self, client: Client) -> None:
        """The prompt is computed: its KV goes to the decode node."""
        del self._running[client.generation]
        prefilled(self.router, client.decision, self.now_s - client.arrived_s, None, self.now_s)
        kv_bytes = client.kind.prompt_tokens * model_shape(MODEL).kv_bytes_per_token
        self._at(self.now_s + kv_bytes / LINK_BYTES_S, partial(self._decode, client))

    def _decode(self, client: Client) -> None:
        client.is_leg, client.node = False, client.decision.node
        held = client.hashes[: client.kind.prompt_tokens // BLOCK_TOKENS]
        store(self._engines[client.node.id].cache, held)
        client.generation = Generation(client.kind.prompt_tokens, client.kind.output_tokens, client.hashes)
        self._submit(client)


def measure(splits: bool, seed: int, seconds: float) -> Row:
    """One run, without its beginning."""
    fleet = Fleet(splits, seed)
    fleet.run(seconds)
    counted = [client for client in fleet.ended if client.arrived_s >= WARM_UP_S]
    streams = [client for client in counted if client.kind is STREAMS]
    gaps_s = sorted(
        after - before for client in streams for before, after in itertools.pairwise(client.token_s)
    )
    first_s = {
        kind: sorted(client.token_s[0] - client.arrived_s for client in counted if client.kind is kind)
        for kind in (STREAMS, LONG)
    }
    return Row(
        run="split" if splits else "whole",
        seed=seed,
        itl_p50_ms=percentile(gaps_s, 50) * 1e3,
        itl_p99_ms=percentile(gaps_s, 99) * 1e3,
        stream_ttft_p99_s=percentile(first_s[STREAMS], 99),
        long_ttft_p50_s=percentile(first_s[LONG], 50),
        long_ttft_p99_s=percentile(first_s[LONG], 99),
        answers=len(counted),
        split=sum(client.decision.prefill is not None for client in counted),
    )


def percentile(ordered: list[float], pct: int) -> float:
    """Nearest rank."""
    return ordered[(pct * len(ordered) - 1) // 100]


def gain_pct(rows: list[Row]) -> float:
    """By how much the p99 between tokens is shorter with the split, on average over the seeds."""
    p99_ms = {
        run: statistics.fmean(row.itl_p99_ms for row in rows if row.run == run) for run in ("whole", "split")
    }
    return 100 * (1 - p99_ms["split"] / p99_ms["whole"])


def _request(kind: Kind, number: int) -> RoutingRequest:
    text = f"{number:08}".ljust(kind.prompt_tokens * 4, "x")
    body = {"model": MODEL, "prompt": text, "max_tokens": kind.output_tokens, "stream": True}
    return parse(Api.COMPLETIONS, json.dumps(body).encode())


def _node(number: int, role: Role | None) -> Node:
    config = NodeConfig(
        id=f"node-{number}",
        hardware=CARD,
        backend=Backend.VLLM,
        endpoint="http://10.0.0.1:8000",
        models=(MODEL,),
        role=role,
    )
    return Node(config=config, profile=config.profile, health=Health.HEALTHY)


def _engine() -> Batch:
    return Batch(BlockCache(25_000), partial(step_s, PROFILES[CARD], model_shape(MODEL)))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        "bench.split", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated, of each run (120)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (3)")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    rows = [
        measure(splits, seed, options.seconds) for seed in range(options.seeds) for splits in (False, True)
    ]
    if options.json:
        print(json.dumps({"runs": msgspec.to_builtins(rows), "gain_pct": gain_pct(rows)}))
        return
    table = Table(box=SIMPLE_HEAD)
    for name in Row.__struct_fields__:
        table.add_column(name.replace("_", " "), justify="left" if name == "run" else "right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in msgspec.structs.astuple(row)))
    console = Console()
    console.print(table)
    console.print(f"p99 between tokens: {gain_pct(rows):.0f} % shorter with the split")


if __name__ == "__main__":
    main()
