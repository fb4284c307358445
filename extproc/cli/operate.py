"""`inferact drain` and `inferact restore`: commands to a running service."""

import os
import time
from typing import Annotated

import typer

from extproc.cli.adminkey import AdminKeyError, admin_key
from extproc.cli.client import Answer, Client, ClientError
from extproc.cli.shared import URL, AsJson, Url, fail, one_line, print_json

_ASK_EVERY_S = 0.5

NodeId = Annotated[str, typer.Argument(metavar="NODE", help="The node's id in the configuration.")]


def drain(
    node: NodeId,
    wait: Annotated[bool, typer.Option("--wait", help="Return when its running requests are done.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Send a node no new requests; running ones end as usual. It stays drained until `restore`.

    Needs the admin key, in INFERACT_ADMIN_KEY or in the file that INFERACT_ADMIN_KEY_FILE names.
    """
    with one_line(ClientError, AdminKeyError):
        client = Client(url, admin_key(os.environ))
        answer = client.drain(node)
        if wait and in_flight(answer):
            _tell(f"{node} is drained; {_requests(in_flight(answer))} still running")
            answer = _idle(client, node)
    _show(answer, f"{node} is drained; {_requests(in_flight(answer))} running", as_json)


def restore(node: NodeId, url: Url = URL, as_json: AsJson = False) -> None:
    """Send requests to a drained node again.

    Needs the admin key, in INFERACT_ADMIN_KEY or in the file that INFERACT_ADMIN_KEY_FILE names.
    """
    with one_line(ClientError, AdminKeyError):
        answer = Client(url, admin_key(os.environ)).restore(node)
    _show(answer, f"{node} takes requests again (it is {answer.get('status', 'unknown')})", as_json)


def in_flight(node: Answer) -> int:
    """Requests running on a node, from its state."""
    return int(node.get("requests_in_flight") or 0)


def _idle(client: Client, node_id: str) -> Answer:
    """Wait until nothing runs on the node; its state then."""
    before = -1
    while True:
        found = [node for node in client.status().get("nodes", []) if node.get("id") == node_id]
        if not found:
            fail(f"{node_id} is no longer in the configuration")
        node: Answer = found[0]
        if not node.get("drained", True):
            fail(f"{node_id} was restored meanwhile")
        running = in_flight(node)
        if not running:
            return node
        if running != before:
            _tell(f"waiting for {_requests(running)}")
        before = running
        time.sleep(_ASK_EVERY_S)


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
