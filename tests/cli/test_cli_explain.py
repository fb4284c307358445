"""`inferact explain`: the sentence, the table, and what is refused."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_support import KEY, LIMIT_S, command_line, environment, inferact, running, url_of, write_config
from rich.console import Console
from test_client import server

from extproc.cli.client import ClientError
from extproc.cli.decision import read_decision
from extproc.cli.explain import _overview
from extproc.openai.usage import Usage
from extproc.routing.outcome import Ended, Outcome
from extproc.verdict import headline, seconds

IDLE = {"wait": 0.0, "prefill": 0.3, "queue": 0.0, "pressure": 0.01, "decode": 0.1, "harm": 0.0}
HAPPENED = Outcome(
    node_id="b", attempts=2, status=200, ended=Ended.COMPLETE, duration_s=2.5, usage=Usage(20, 3, 12)
)
BODY = b'{"model": "a-model", "messages": []}'


def candidate(node: str, role: str | None = "fallback", **changes: Any) -> dict[str, Any]:
    """A candidate as the service tells it; names of terms change these."""
    terms_s = {term: changes.pop(term, value) for term, value in IDLE.items()}
    weight = changes.get("weight", 1.0)
    line = {"node": node, "hardware": "a100-80g", "role": role, "weight": weight, "matched_tokens": 0}
    return {
        **line,
        "put_back": [],
        "terms_s": terms_s,
        "cost_s": sum(terms_s.values()) / (weight or 1.0),
        **changes,
    }


def answer(*candidates: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A decision as the service tells it."""
    return {
        "request_id": "request-1",
        "exchange_id": "exchange-1",
        "decided_at": 1_700_000_000.5,
        "model": "a-model",
        "policy": "prefix-aware",
        "prompt_tokens": 4012,
        "expected_output_tokens": 256,
        "waits": False,
        "waited_s": 0.0,
        "pinned": False,
        "equally_cheap": 1,
        "predicted_ttft_s": 0.31,
        "candidates": list(candidates),
        "fallbacks": [],
        "excluded": [],
        "more_excluded": 0,
        "failed_attempts": [],
        "outcome": None,
        **changes,
    }


def said(*candidates: dict[str, Any], **changes: Any) -> str:
    """The sentence about a decision."""
    return headline(read_decision(answer(*candidates, **changes)))


def shown(told: dict[str, Any], width: int = 160) -> str:
    """All that a terminal shows of a decision."""
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(_overview(read_decision(told), width))
    return captured.get()


class TestHeadline:
    def test_names_what_the_node_holds_where_that_decides(self) -> None:
        holder = candidate("gpu-2", "chosen", prefill=0.02, matched_tokens=3840)
        assert said(holder, candidate("gpu-0")) == (
            "gpu-2 was chosen: 0.13 s, because it holds 3,840 of 4,012 prompt tokens; "
            "runner-up gpu-0 would have cost 0.41 s (mostly prefill)."
        )

    @pytest.mark.parametrize(
        ("term", "words"),
        [
            ("wait", "less work is ahead of it there"),
            ("prefill", "it computes the prompt faster"),
            ("queue", "it keeps fewer later requests waiting there"),
            ("pressure", "more KV memory is free there"),
            ("decode", "it generates the answer faster"),
            ("harm", "it slows down running answers less there"),
        ],
    )
    def test_names_the_term_that_differs_most(self, term: str, words: str) -> None:
        dear = candidate("b", **{"decode": 0.15, term: IDLE[term] + 0.5})
        sentence = said(candidate("a", "chosen"), dear)
        assert f"because {words}; runner-up b would have cost" in sentence

    def test_takes_a_term_of_a_later_version_by_its_name(self) -> None:
        a, b = candidate("a", "chosen"), candidate("b")
        a["terms_s"]["transfer"], b["terms_s"]["transfer"], b["cost_s"] = 0.0, 1.0, 1.41
        assert "because its transfer costs less" in said(a, b)

    def test_does_not_name_a_match_that_the_policy_ignored(self) -> None:
        fast = candidate("a", "chosen", prefill=0.1, matched_tokens=3000)
        assert "because it computes the prompt faster" in said(fast, candidate("b"), policy="lru")

    def test_names_the_weight_where_that_decides(self) -> None:
        sentence = said(candidate("a", "chosen"), candidate("b", weight=0.25, decode=0.11))
        assert "because its weight is 1, against 0.25" in sentence

    def test_looks_past_the_weight_where_the_node_is_better_anyway(self) -> None:
        sentence = said(candidate("a", "chosen"), candidate("b", weight=0.9, decode=1.0))
        assert "because it generates the answer faster" in sentence

    def test_says_that_chance_chose(self) -> None:
        sentence = said(candidate("b", "chosen"), candidate("a"), equally_cheap=3)
        assert sentence == (
            "b was chosen: 0.41 s (mostly prefill); chance chose among 3 equally cheap nodes."
        )

    def test_says_that_the_client_named_the_node(self) -> None:
        sentence = said(candidate("a", "chosen"), pinned=True)
        assert sentence == "a was chosen: 0.41 s (mostly prefill); the client named the node."

    @pytest.mark.parametrize(
        ("excluded", "words"),
        [
            ([], "no other node serves the model"),
            ([{"node": "b", "reason": "x"}], "no other node could take it"),
        ],
    )
    def test_says_that_there_was_no_choice(self, excluded: list[dict[str, str]], words: str) -> None:
        assert said(candidate("a", "chosen"), excluded=excluded).endswith(f"; {words}.")

    def test_says_why_a_cheaper_node_was_passed_over(self) -> None:
        cheap = candidate("c", prefill=0.1, put_back=["at max_batch_size"])
        passed_over = "; c would have cost 0.21 s, but was passed over (at max_batch_size)."
        alone = said(candidate("a", "chosen"), cheap)
        assert alone == f"a was chosen: 0.41 s (mostly prefill){passed_over}"
        besides = said(candidate("a", "chosen"), candidate("b", wait=0.2), cheap)
        assert "because less work is ahead of it there; runner-up b" in besides
        assert besides.endswith(passed_over)

    def test_of_a_dry_run_is_in_the_conditional(self) -> None:
        sentence = said(
            candidate("a", "chosen"),
            candidate("b", wait=0.2),
            candidate("c", prefill=0.1, put_back=["at max_batch_size"]),
            exchange_id=None,
        )
        assert sentence.startswith("a would be chosen: ")
        assert "b would cost 0.61 s" in sentence
        assert "c would cost 0.21 s, but is passed over" in sentence

    def test_says_that_a_request_would_wait(self) -> None:
        sentence = said(candidate("a", "chosen"), exchange_id=None, waits=True)
        assert sentence.startswith("It would wait in the queue: its nodes are full. With room, a would be ")

    def test_names_two_terms_where_none_is_most_of_the_cost(self) -> None:
        even = candidate("a", "chosen", prefill=0.1, decode=0.1, harm=0.09)
        assert "(mostly prefill and decode)" in said(even, pinned=True)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0 s"), (0.00034, "0.34 ms"), (0.0416, "41.6 ms"), (0.412, "0.412 s"), (12.34, "12.3 s"),
     (123456.7, "123,457 s")],
)  # fmt: skip
def test_seconds_have_three_digits(value: float, words: str) -> None:
    assert seconds(value) == words


class TestOverview:
    def test_shows_every_candidate_with_its_terms(self) -> None:
        text = shown(answer(candidate("gpu-2", "chosen", matched_tokens=3840), candidate("gpu-0", wait=0.25)))
        rows = [" ".join(line.split()) for line in text.splitlines() if " a100-80g " in line]
        assert rows == [
            "gpu-2 a100-80g chosen 0.410 s 0.000 0.300 0.000 0.010 0.100 0.000 3,840",
            "gpu-0 a100-80g fallback 0.660 s 0.250 0.300 0.000 0.010 0.100 0.000 0",
        ]

    def test_shows_weights_and_notes_only_where_there_are_any(self) -> None:
        plain = shown(answer(candidate("a", "chosen"), candidate("b")))
        assert "weight" not in plain and "notes" not in plain
        full = shown(answer(candidate("a", "chosen"), candidate("b", weight=0.5, put_back=["at the cap"])))
        assert " 0.5 " in full and "at the cap" in full

    def test_shows_who_was_left_out_who_failed_and_what_happened(self) -> None:
        reasons = [{"node": node, "reason": "drained" if node < "e" else "offline"} for node in "cdef"]
        text = shown(
            answer(
                candidate("a", "chosen"),
                excluded=reasons,
                more_excluded=3,
                failed_attempts=[{"node": "a", "reason": "503"}],
                outcome=msgspec.to_builtins(HAPPENED),
                waited_s=0.25,
            )
        )
        assert (
            "left out (drained): c, d\nleft out (offline): e, f\nleft out: 3 more nodes\nfailed: a (503)\n"
            in text
        )
        assert "what happened: node id b, attempts 2, status 200, ended complete, duration s 2.5, " in text
        assert "prompt tokens 20, output tokens 3, cached tokens 12\n" in text
        assert "0.25 s in the queue, decided 2023-11-14T22:13:20Z" in " ".join(text.split())

    @pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160])
    def test_keeps_ids_whole_in_every_terminal(self, width: int) -> None:
        node = "node-a100-in-rack-0042"
        text = shown(answer(candidate(node, "chosen", put_back=["at max_batch_size"]), candidate("b")), width)
        assert all(len(line) <= width for line in text.splitlines())
        assert re.search(rf"^ {node} ", text, re.MULTILINE) and "…" not in text
        assert ("hardware" in text) == (width >= 160)

    def test_takes_names_for_what_they_are(self) -> None:
        assert "[red]x[/]" in shown(answer(candidate("[red]x[/]", "chosen"), candidate("[/]")))


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"candidates": []},
        answer(),
        answer(candidate("a")) | {"equally_cheap": "many"},
        answer({"node": "a"}),
    ],
)
def test_an_answer_of_another_version_is_told(told: dict[str, Any]) -> None:
    with pytest.raises(ClientError, match="another version"):
        read_decision(told)


# The command.


@pytest.mark.parametrize(
    "arguments",
    [[], [""], ["id", "--body", "-"], ["id", "--path", "/v1/completions"], ["--path", "/v1/completions"]],
)
def test_either_an_id_or_a_body_is_given(arguments: list[str]) -> None:
    assert inferact("explain", *arguments).code == 2


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_body_that_cannot_be_read_is_one_line(name: str, tmp_path: Path) -> None:
    assert name in inferact("explain", "--body", name, folder=tmp_path).complaint


def test_the_id_is_one_path_segment() -> None:
    with server(200, json.dumps(answer(candidate("a", "chosen"))).encode()) as (url, asked):
        outcome = inferact("explain", "a/b?c#é", "--url", url, INFERACT_ADMIN_KEY=KEY)
    assert asked == ["/admin/decisions/a%2Fb%3Fc%23%C3%A9"]
    assert outcome.code == 0 and outcome.out.startswith("a was chosen: ")


def test_an_id_of_any_bytes_can_be_asked_for() -> None:
    with server(404, b"{}") as (url, asked):
        line = [*command_line("explain", "--url", url), b"\xff"]
        done = subprocess.run(line, env=environment(), capture_output=True, timeout=LIMIT_S)
    assert (done.returncode, asked) == (1, ["/admin/decisions/%FF"])


def test_json_is_the_answer_itself() -> None:
    told = answer(candidate("a", "chosen")) | {"of a later version": True}
    with server(200, json.dumps(told).encode()) as (url, _):
        assert json.loads(inferact("explain", "x", "--json", "--url", url).out) == told


class TestARealService:
    def test_refuses_on_one_line_that_says_what_to_do(self, tmp_path: Path) -> None:
        config = write_config(tmp_path, max_body_bytes=8 << 20)
        (tmp_path / "body.json").write_bytes(BODY)
        (tmp_path / "bad.json").write_bytes(b'{"model": "secret", ')
        (tmp_path / "huge.json").write_bytes(BODY.ljust((8 << 20) + 1))
        with running("serve", "-c", config, folder=tmp_path, INFERACT_ADMIN_KEY=KEY) as service:
            service.wait_for("node node-0 is offline")
            service.wait_for("node node-1 is offline")

            def complaint(*arguments: object, key: str = KEY) -> str:
                words = ("explain", *arguments, "--url", url_of(config))
                return inferact(*words, folder=tmp_path, INFERACT_ADMIN_KEY=key).complaint

            assert "offline or drained" in complaint("--body", "body.json")
            assert "not valid JSON" in complaint("--body", "bad.json")
            piped = subprocess.run(
                command_line("explain", "--body", "-", "--url", url_of(config)),
                input=b'{"model": "secret", ',
                env=environment(INFERACT_ADMIN_KEY=KEY),
                capture_output=True,
                timeout=LIMIT_S,
            )
            assert piped.returncode == 1 and b"not valid JSON" in piped.stderr
            assert "too large" in complaint("--body", "huge.json")
            assert "/v1/completions" in complaint("--body", "body.json", "--path", "/v1/completion")
            assert "x-request-id" in complaint("unknown")
            assert "INFERACT_ADMIN_KEY" in complaint("unknown", key="")
            assert "INFERACT_ADMIN_KEY" in complaint("unknown", key="wrong")
            assert "secret" not in service.out + service.err
