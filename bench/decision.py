"""What a request costs the service in CPU. One process, no network.

    .venv/bin/python bench/decision.py [--json]

`decision`: parse, hash, match, cost, pick, book, receipt. `exchange`: with all that Envoy's two messages
take to read and to answer, and with hints that must be cut out of the body.

The index holds 400,000 blocks of prompts, every second prompt is new, and every other one was seen before.
Sizes are taken in turn, so that a machine whose speed drifts does it for all of them alike.
"""

import argparse
import json
import statistics
import time

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest

from extproc.config import Backend, Config, NodeConfig
from extproc.exchange import Exchange, Limits
from extproc.hardware import Hardware
from extproc.openai.request import Api, parse
from extproc.routing.admission import Admission
from extproc.routing.blocks import MAX_BLOCKS, unit_blocks
from extproc.routing.loads import Work
from extproc.routing.node import EngineReport, Health, Node
from extproc.routing.router import Router
from extproc.telemetry import Telemetry

MODEL = "meta-llama/Llama-3-8B-Instruct"
NODES = (4, 64, 512)
KILOBYTES = (1, 10, 100)
ROUNDS = 300
BLOCKS = 400_000
LIMITS = Limits(timeout_s=30.0, body_bytes=64 << 20)


def scheduler(nodes: int) -> tuple[Admission, Telemetry]:
    """A router over so many healthy nodes of mixed hardware, each with a few requests in flight."""
    listed = [kind for kind in Hardware if kind is not Hardware.CUSTOM]
    config = Config(
        nodes=tuple(
            NodeConfig(
                id=f"node-{i}",
                hardware=listed[i % len(listed)],
                backend=Backend.VLLM,
                endpoint=f"http://10.0.{i // 250}.{i % 250 + 1}:8000",
                models=(MODEL,),
            )
            for i in range(nodes)
        )
    )
    made = [Node(config=node, profile=node.profile, health=Health.HEALTHY) for node in config.nodes]
    router = Router(made)
    for i, node in enumerate(made):
        router.book(node, Work(1000.0, 256.0, 0.1 * (i % 7)), 0.0)
        node.take_report(EngineReport(0.0, running=1, kv_capacity_tokens=1 << 28), ours=1)
        router.reported(node)
    for i in range(BLOCKS // MAX_BLOCKS):
        blocks = unit_blocks(range(i * MAX_BLOCKS, (i + 1) * MAX_BLOCKS), 1 << 16, MAX_BLOCKS << 16, 1)
        router.caches.insert(made[i % nodes], blocks)
    admission = Admission(router, 1000, 1 << 30)
    return admission, Telemetry(router, admission)


def plain_body(kilobytes: int, number: int) -> bytes:
    """A chat of this size."""
    text = f"{number} " + "What is the capital of a country? " * (kilobytes * 1024 // 34)
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}).encode()


def messages(kilobytes: int, number: int) -> tuple[bytes, bytes]:
    """The two messages that Envoy sends for a chat request of this size, with hints to cut out."""
    names = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
    names |= {"x-request-id": "3d2f8f0e-2f0c-4a8e-9d4e-8c9d5e1f2a3b"}
    head = HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in names.items()])
    body = plain_body(kilobytes, number)[:-1] + b', "x-inferact": {"priority": 7}}'
    return (
        ProcessingRequest(request_headers=HttpHeaders(headers=head)).SerializeToString(),
        ProcessingRequest(request_body=HttpBody(body=body)).SerializeToString(),
    )


def decision_us(router: Router, body: bytes) -> float:
    """Microseconds from a body to a booked node, with its receipt kept."""
    started_s = time.perf_counter()
    request = parse(Api.CHAT_COMPLETIONS, body)
    decision = router.decide(request, started_s)
    assert decision is not None
    router.receipts.keep(decision.receipt, "exchange", "request", 0.0)
    taken_s = time.perf_counter() - started_s
    decision.booking.release(started_s)
    return taken_s * 1e6


def exchange_us(admission: Admission, telemetry: Telemetry, head: bytes, body: bytes) -> float:
    """Microseconds of one exchange, from its first message to its end."""
    started_s = time.perf_counter()
    exchange = Exchange(admission, telemetry, LIMITS)
    exchange.receive(head, started_s)
    exchange.receive(body, started_s)
    exchange.end(started_s)
    return (time.perf_counter() - started_s) * 1e6


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Median microseconds, by what is measured, nodes and body size."""
    bodies = {size: [plain_body(size, number // 2) for number in range(ROUNDS)] for size in KILOBYTES}
    pairs = {size: [messages(size, number // 2) for number in range(ROUNDS)] for size in KILOBYTES}
    table: dict[str, dict[str, dict[str, float]]] = {"decision": {}, "exchange": {}}
    for nodes in NODES:
        admission, telemetry = scheduler(nodes)
        decisions, exchanges = ({size: list[float]() for size in KILOBYTES} for _ in range(2))
        for number in range(ROUNDS):
            for size in KILOBYTES:
                decisions[size].append(decision_us(admission.router, bodies[size][number]))
                exchanges[size].append(exchange_us(admission, telemetry, *pairs[size][number]))
        for name, samples in (("decision", decisions), ("exchange", exchanges)):
            table[name][f"{nodes} nodes"] = {
                f"{size} KB": round(statistics.median(samples[size]), 1) for size in KILOBYTES
            }
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args()
    table = measure()
    if arguments.json:
        print(json.dumps(table))
        return
    for name, rows in table.items():
        print(f"{name}, median microseconds of {ROUNDS} rounds")
        print(f"{'':10}" + "".join(f"{size:>9} KB" for size in KILOBYTES))
        for nodes, row in rows.items():
            print(f"{nodes:>10}" + "".join(f"{value:>12.1f}" for value in row.values()))


if __name__ == "__main__":
    main()
