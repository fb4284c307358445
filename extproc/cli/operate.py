"""`inferact drain` and `inferact restore`: commands to a running service."""

import os
import time
from typing import Annotated

import typer

from extproc.cli.adminkey import AdminKeyError, admin_key
from extproc.cli.client import Answer, Client, ClientError
from extproc.cli.shared import URL, AsJson, Url, fail, one_line, print_json

_ASK_EVERY_S = 0.5
_REPORT_LIMIT_S = 6.0
"""An engine whose report is not there by then reports nothing: they come once a second, or 5 s late."""


def node_ids(ctx: typer.Context) -> list[str]:
    """The nodes of the running service, for the shell to complete; none where it does not answer."""
    try:
        nodes = Client(ctx.params.get("url") or os.environ.get("INFERACT_URL", URL)).status().get("nodes", [])
    except ClientError:
        return []
    return [str(node.get("id")) for node in nodes]


NodeId = Annotated[
    str,
    typer.Argument(metavar="NODE", help="The node's id in the configuration.", autocompletion=node_ids),
]


def drain(
    node: NodeId,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when nothing runs on it, as service and engine report.")
    ] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Send a node no new requests; running ones end as usual. It stays drained until `restore`.

    Needs the admin key, in INFERACT_ADMIN_KEY or in the file that INFERACT_ADMIN_KEY_FILE names.
    """
    with one_line(ClientError, AdminKeyError):
        client = Client(url, admin_key(os.environ))
        answer = client.drain(node)
        if wait:
            answer = _idle(client, node)
    _show(answer, f"{node} is drained; {_load(answer)} running", as_json)


def restore(node: NodeId, url: Url = URL, as_json: AsJson = False) -> None:
    """Send requests to a drained node again.

    Needs the admin key, in INFERACT_ADMIN_KEY or in the file that INFERACT_ADMIN_KEY_FILE names.
    """
    with one_line(ClientError, AdminKeyError):
        answer = Client(url, admin_key(os.environ)).restore(node)
    _show(answer, f"{node} takes requests again (it is {answer.get('status', 'unknown')})", as_json)


def awaited(node: Answer, drained_for_s: float) -> str | None:
    """What keeps a drained node from being idle; `None`: nothing that can be known.

    The service knows only what it sent itself since it started, and Envoy may have sent more without it. So
    the engine must say that it is idle, in a report from after the drain, unless it reports nothing at all.
    """
    if _in_flight(node) or _in_engine(node):
        return _load(node)
    age_s = node.get("report_age_s")
    if age_s is not None and age_s < drained_for_s:
        return None
    silent = node.get("status") == "offline" or drained_for_s > _REPORT_LIMIT_S
    return None if silent else "its engine's next report"


def _idle(client: Client, node_id: str) -> Answer:
    """Wait until nothing runs on the node; its state then."""
    since_s, told, first = time.monotonic(), "", None
    while True:
        drained_for_s = time.monotonic() - since_s
        node = _still_drained(client, node_id)
        obstacle = awaited(node, drained_for_s)
        first = _running(node) if first is None else first
        if obstacle is None:
            break
        if obstacle != told:
            _tell(f"{node_id} is drained; waiting for {obstacle}{_left(node, first, drained_for_s)}")
        told = obstacle
        time.sleep(_ASK_EVERY_S)
    if _in_engine(node) is None:
        _tell(f"the engine of {node_id} reports nothing: only requests of this service were waited for")
    return node


def _still_drained(client: Client, node_id: str) -> Answer:
    nodes: dict[str, Answer] = {node.get("id"): node for node in client.status().get("nodes", [])}
    if node_id not in nodes:
        fail(f"{node_id} is no longer in the configuration")
    if not nodes[node_id].get("drained", True):
        fail(f"{node_id} was restored meanwhile")
    return nodes[node_id]


def _load(node: Answer) -> str:
    """What runs on a node, in words."""
    ours, engine = _in_flight(node), _in_engine(node) or 0
    return f"{_requests(engine)} ({ours} of them from this service)" if engine > ours else _requests(ours)


def left_s(running: int, ended: int, drained_for_s: float, p99_s: float | None) -> float | None:
    """About how long `running` requests take to end; `None`: nobody can know.

    By the pace since the drain, and before the first has ended by the slowest answers until now.
    """
    if not running:
        return None
    if ended > 0:
        return running * drained_for_s / ended
    return None if p99_s is None or p99_s <= drained_for_s else p99_s - drained_for_s


def _left(node: Answer, first: int, drained_for_s: float) -> str:
    """The estimate, in words."""
    running, p99_ms = _running(node), node.get("p99_latency_ms")
    estimate_s = left_s(
        running, first - running, drained_for_s, None if p99_ms is None else float(p99_ms) / 1000
    )
    return "" if estimate_s is None else f", about {estimate_s:.0f} s more"


def _running(node: Answer) -> int:
    """Requests on a node, whoever sent them."""
    return max(_in_flight(node), _in_engine(node) or 0)


def _in_flight(node: Answer) -> int:
    """Requests that the service has on a node, from its state."""
    return int(node.get("requests_in_flight") or 0)


def _in_engine(node: Answer) -> int | None:
    """Requests in its engine, running or waiting, whoever sent them; `None`: it does not say."""
    running = node.get("engine_running")
    return None if running is None else int(running) + int(node.get("queue_depth") or 0)


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def _tell(message: str) -> None:
    """Progress goes to stderr, so that stdout holds the result alone."""
    typer.echo(message, err=True)


def _show(answer: Answer, message: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        typer.echo(message)
