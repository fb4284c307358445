"""`inferact explain`: why a request went where it did, or where one would go now."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from extproc.cli.adminkey import AdminKeyError, admin_key
from extproc.cli.client import Client, ClientError
from extproc.cli.decision import read_decision
from extproc.cli.shared import URL, AsJson, Url, one_line, print_json
from extproc.cli.table import Columns, fitted, terminal
from extproc.reports import CandidateReport, DecisionReport, Role
from extproc.verdict import headline, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_STDIN = Path("-")
_TEXTS = ("node", "hardware", "role", "notes")
_EXPENDABLE = (
    "hardware", "pressure", "harm", "queue", "weight", "wait", "decode", "prefill", "held", "notes", "role",
)  # fmt: skip


def explain(
    request_id: Annotated[
        str | None, typer.Argument(metavar="REQUEST_ID", help="The x-request-id of the answer.")
    ] = None,
    body: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A request's JSON body to try instead; - is standard input."),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="With --body: the API it is for; else /v1/chat/completions."),
    ] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Tell why a request went where it did; with --body, where one would go now (nothing is sent).

    What a node would cost is a sum of seconds:

    wait: until the work ahead of it is done

    prefill: the part of the prompt that the node does not hold

    queue: what later requests wait for that

    pressure: the KV memory that it fills

    decode: the answer

    harm: what it slows down answers that run there

    Needs the admin key, in INFERACT_ADMIN_KEY or in the file that INFERACT_ADMIN_KEY_FILE names.
    """
    if bool(request_id) == (body is not None):
        raise typer.BadParameter("give either REQUEST_ID or --body FILE")
    if path is not None and body is None:
        raise typer.BadParameter("--path is for --body")
    with one_line(ClientError, AdminKeyError):
        client = Client(url, admin_key(os.environ))
        answer = client.decision(request_id) if request_id else client.explain(_read(body or _STDIN), path)
        if as_json:
            print_json(answer)
            return
        decision, console = read_decision(answer), terminal()
        console.print(_overview(decision, console.width))


def _read(path: Path) -> bytes:
    return sys.stdin.buffer.read() if path == _STDIN else path.read_bytes()


def _overview(decision: DecisionReport, width: int) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    happened = msgspec.to_builtins(decision.outcome)
    return Group(
        Text(headline(decision), "bold"),
        Text(_circumstances(decision)),
        Text(),
        fitted(_columns(decision.candidates), map(_cells, decision.candidates), width),
        *(Text(line) for line in _left_out(decision)),
        *(
            [Text(f"prefill leg: {', '.join(_facts(msgspec.to_builtins(decision.prefill)))}")]
            if decision.prefill
            else []
        ),
        *(Text(f"failed: {attempt.node} ({attempt.reason})", "red") for attempt in decision.failed_attempts),
        *([Text(f"what happened: {', '.join(_facts(happened))}")] if happened else []),
    )


def _columns(candidates: list[CandidateReport]) -> Columns:
    """Those that tell nodes apart."""
    titles = ["node", "hardware", "role", "cost", *candidates[0].terms_s, "held"]
    if any(candidate.weight != 1.0 for candidate in candidates):
        titles.append("weight")
    if any(candidate.put_back for candidate in candidates):
        titles.append("notes")
    return Columns(titles, texts=_TEXTS, wraps="notes", expendable=_EXPENDABLE)


def _circumstances(decision: DecisionReport) -> str:
    said = [
        f"{decision.model}: prompt of about {decision.prompt_tokens:,} tokens",
        f"answer of about {decision.expected_output_tokens:,}",
        f"first token expected after {seconds(decision.predicted_ttft_s)}",
        f"policy {decision.policy}",
    ]
    if decision.waited_s:
        said.append(f"{seconds(decision.waited_s)} in the queue")
    if not decision.is_dry:
        time = datetime.fromtimestamp(decision.decided_at, UTC)
        said.append(f"decided {time.strftime('%Y-%m-%dT%H:%M:%SZ')}")
    return ", ".join(said)


def _cells(candidate: CandidateReport) -> dict[str, str]:
    """A candidate's row, by the titles of the columns."""
    from rich.markup import escape

    role = candidate.role or ""
    return {
        "node": escape(candidate.node),
        "hardware": escape(candidate.hardware),
        "role": f"[green]{role}[/]" if candidate.role is Role.CHOSEN else escape(role),
        "cost": f"{candidate.cost_s:.3f} s",
        **{term: f"{value:.3f}" for term, value in candidate.terms_s.items()},
        "held": f"{candidate.matched_tokens:,}",
        "weight": f"{candidate.weight:g}",
        "notes": escape(", ".join(candidate.put_back)),
    }


def _left_out(decision: DecisionReport) -> Iterator[str]:
    """A line a reason, with its nodes."""
    nodes = defaultdict(list)
    for excluded in decision.excluded:
        nodes[excluded.reason].append(excluded.node)
    for reason, names in nodes.items():
        yield f"left out ({reason}): {', '.join(names)}"
    if decision.more_excluded:
        yield f"left out: {decision.more_excluded} more nodes"


def _facts(outcome: dict[str, Any]) -> Iterator[str]:
    """What is known of an outcome, in the words of its keys."""
    for name, value in outcome.items():
        if isinstance(value, dict):
            yield from _facts(value)
        elif value is not None:
            yield f"{name.replace('_', ' ')} {value}"
