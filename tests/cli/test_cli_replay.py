"""`inferact replay`: a recorded load over the fleet of a configuration."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from cli_support import Outcome, inferact, write_config

from extproc.config import CachePolicy

POLICIES = set(CachePolicy)


def write_trace(folder: Path, count: int = 40, gap_ms: int = 500, tokens: int = 1500) -> Path:
    """Mooncake's format; every prompt begins as one of five others did."""
    units = -(-tokens // 512)
    rows = [
        {
            "timestamp": gap_ms * i,
            "input_length": tokens,
            "output_length": 20,
            "hash_ids": [i % 5, *range(100 * i + 100, 100 * i + 99 + units)],
        }
        for i in range(count)
    ]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replayed(folder: Path, *options: object) -> Outcome:
    """A replay of a usual trace over a usual fleet."""
    trace, config = write_trace(folder), write_config(folder)
    return inferact("replay", trace, "-c", config, *options)


def data(outcome: Outcome) -> dict[str, Any]:
    assert outcome.code == 0, outcome
    read: dict[str, Any] = json.loads(outcome.out)
    return read


def test_a_table_has_a_row_for_each_policy_and_every_column(tmp_path: Path) -> None:
    outcome = replayed(tmp_path)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert "trace.jsonl" in lines[0] and "40 requests" in lines[0]
    (head,) = [line for line in lines if "TTFT" in line]
    assert head.split() == [
        "policy",
        "TTFT",
        "x",
        "best",
        "p50",
        "p90",
        "p99",
        "end",
        "hits",
        "spread",
        "pick",
        "us",
    ]
    rows = {
        line.split()[0]: line.split()[1:]
        for line in lines
        if line.split()[:1] and line.split()[0] in POLICIES
    }
    assert set(rows) == POLICIES
    assert all(len(row) == 9 for row in rows.values())


def test_json_has_the_same_for_programs(tmp_path: Path) -> None:
    read = data(replayed(tmp_path, "--json", "--policies", "lru,prefix-aware,lru"))
    assert (read["requests"], len(read["nodes"])) == (40, 2)
    assert set(read["policies"]) == {"lru", "prefix-aware"}
    assert read["policies"]["lru"]["ttft_mean_s"] > 0


def test_speed_and_limit_say_how_much_of_the_load_comes_and_how_fast(tmp_path: Path) -> None:
    usual, faster = (data(replayed(tmp_path, "--json", *options)) for options in ((), ("--speed", "4")))
    assert faster["duration_s"] == pytest.approx(usual["duration_s"] / 4)
    assert faster["policies"]["lru"]["ttft_mean_s"] > usual["policies"]["lru"]["ttft_mean_s"]
    assert data(replayed(tmp_path, "--json", "--limit", "1"))["requests"] == 1


def test_the_seed_is_all_there_is_of_chance(tmp_path: Path) -> None:
    def times(seed: int) -> list[float]:
        policies = data(replayed(tmp_path, "--json", "--seed", seed))["policies"]
        return [row["ttft_mean_s"] for row in policies.values()]

    assert times(1) == times(1) != times(2)


def test_a_chart_is_written_beside_the_table(tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    assert "TTFT" in replayed(tmp_path, "--chart", chart).out
    assert chart.read_text().startswith("<svg")


def test_what_is_not_as_it_was_recorded_is_said_on_stderr(tmp_path: Path) -> None:
    outcome = replayed(tmp_path, "--json")
    assert "40 requests name no model of this fleet: they ask for `a-model`" in outcome.err
    assert data(outcome)["notes"] == outcome.err.splitlines()
    given = replayed(tmp_path, "--json", "--model", "a-model")
    assert (given.err, data(given)["notes"]) == ("", [])


def test_an_access_log_is_replayed_and_said_to_tell_no_policies_apart(tmp_path: Path) -> None:
    line = {
        "path": "/v1/chat/completions",
        "route": "routed",
        "status": 200,
        "model": "a-model",
        "request_bytes": 4000,
        "response_bytes": 400,
    }
    log = tmp_path / "access.log"
    log.write_text(
        "".join(json.dumps({"time": f"2026-11-29T12:00:{i:02}.000Z"} | line) + "\n" for i in range(30))
    )
    outcome = inferact("replay", log, "-c", write_config(tmp_path), "--json")
    assert data(outcome)["requests"] == 30
    assert "Guessed from bytes" in outcome.err and "no shared prefixes" in outcome.err


def test_a_load_that_is_too_much_is_said_to_be(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, count=200, gap_ms=10, tokens=4000)
    outcome = inferact("replay", trace, "-c", write_config(tmp_path), "--policies", "lru")
    assert outcome.code == 0
    assert re.search(r"lru: too much for this fleet \(\d+% of the requests", outcome.err)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("", "empty"),
        ("time,tokens\n", ":1: no trace of a known format"),
        ('{"timestamp": 0, "input_length": 0, "hash_ids": []}\n', ":1: "),
    ],
)
def test_a_trace_that_cannot_be_read_is_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    trace = tmp_path / "bad"
    if content is not None:
        trace.write_text(content)
    complaint = inferact("replay", trace, "-c", write_config(tmp_path)).complaint
    assert str(trace) in complaint and said in complaint


def test_a_configuration_that_cannot_be_read_is_named_as_by_check(tmp_path: Path) -> None:
    outcome = inferact("replay", write_trace(tmp_path), "-c", "nowhere.yaml", folder=tmp_path)
    assert (outcome.code, outcome.err) == (1, "nowhere.yaml: no such file\n")


def test_a_model_that_does_not_fit_its_node_is_one_line(tmp_path: Path) -> None:
    node = {"id": "a", "hardware": "rtx-4090", "backend": "vllm", "endpoint": "http://127.0.0.1:1"}
    config = write_config(tmp_path, {**node, "models": ["llama-70b"]})
    outcome = inferact("replay", write_trace(tmp_path), "-c", config, "--model", "llama-70b")
    assert "node `a`: `llama-70b` does not fit" in outcome.complaint


def test_prompts_that_no_node_can_hold_are_one_line(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, count=1, tokens=5_000_000)
    outcome = inferact("replay", trace, "-c", write_config(tmp_path), "--model", "a-model")
    assert "no request was answered" in outcome.complaint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policies", "fifo"], "adaptive"),
        (["--policies", ""], "adaptive"),
        (["--policies", "lru,"], "adaptive"),
        (["--speed", "0"], "--speed"),
        (["--speed", "nan"], "--speed"),
        (["--limit", "0"], "--limit"),
        (["--model", "none-such"], "a-model"),
        (["--chart", "chart.png"], ".svg"),
        (["--chart", "no/such/folder/chart.svg"], "no/such/folder"),
    ],
)
def test_wrong_usage_says_what_is_allowed(tmp_path: Path, options: list[str], said: str) -> None:
    outcome = replayed(tmp_path, *options)
    assert outcome.code == 2
    assert said in outcome.err


def test_the_examples_of_the_help_work_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / ".inferact").mkdir()
    write_config(tmp_path)
    (tmp_path / ".inferact" / "access.log").write_bytes(write_trace(tmp_path).read_bytes())
    help_page = " ".join(inferact("replay", "--help").out.partition("Example:")[2].split())
    examples = [shlex.split(text) for text in help_page.split("inferact replay ")[1:]]
    assert len(examples) == 2
    for example in examples:
        assert inferact("replay", *example, folder=tmp_path).code == 0
    assert (tmp_path / "replay.svg").exists()
