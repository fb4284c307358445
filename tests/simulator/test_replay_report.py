"""What is made of replays: numbers, a chart, and the benchmark's command."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from replay_support import Told, fleet, nodes, request

from bench.baselines import BASELINES
from bench.replay import main
from extproc.simulator.replay.chart import draw
from extproc.simulator.replay.engine import Job
from extproc.simulator.replay.loop import Outcome, replay
from extproc.simulator.replay.report import NoAnswerError, Panel, Summary, mean_of, percentile, summarize


def answered(number: int, ttft_s: float, cached_tokens: int = 0) -> Job:
    job = Job(request(number, 1000, 10, arrival_s=float(number)), 0)
    job.first_token_s = number + ttft_s
    job.finished_s = number + ttft_s + 1.0
    job.cached_tokens = cached_tokens
    return job


def outcome(*jobs: Job) -> Outcome:
    return Outcome(list(jobs), nodes(2), [3.0, 1.0], [1e-6] * len(jobs))


def test_the_numbers_of_a_replay() -> None:
    summary = summarize(outcome(*(answered(i, ttft_s=i / 10, cached_tokens=500) for i in range(1, 11))))
    assert (summary.requests, summary.refused) == (10, 0)
    assert (summary.ttft_p50_s, summary.ttft_p90_s, summary.ttft_p99_s) == pytest.approx((0.5, 0.9, 1.0))
    assert (summary.ttft_mean_s, summary.latency_mean_s) == pytest.approx((0.55, 1.55))
    assert summary.hit_ratio == 0.5
    assert (summary.load_spread, summary.node_loads) == (1.5, [1.5, 0.5])
    assert summary.pick_mean_us == pytest.approx(1.0)


def test_refused_requests_are_counted_apart() -> None:
    refused = Job(request(9, 1000), 0, refused=True)
    summary = summarize(outcome(answered(1, 0.5), refused))
    assert (summary.requests, summary.refused, summary.ttft_mean_s) == (2, 1, 0.5)
    with pytest.raises(NoAnswerError):
        summarize(outcome(refused))


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([1.0, 2.0, 3.0], pct) for pct in (1, 50, 99, 100)] == [1.0, 2.0, 3.0, 3.0]


def test_seeds_are_averaged() -> None:
    one, other = summarize(outcome(answered(1, 0.5))), summarize(outcome(answered(1, 1.5)))
    mean = mean_of([one, other])
    assert (mean.ttft_mean_s, mean.requests, mean.node_loads) == (1.0, 2, [1.5, 0.5])


def summary_of(policy: str) -> Summary:
    made = fleet(3)
    requests = [request(i, 3000, 20, 0.2 * i) for i in range(60)]
    return summarize(replay(requests, made, BASELINES[policy](made.nodes, 0)))


def test_a_chart_is_well_formed_escaped_and_within_its_bounds() -> None:
    rows = [(name, summary_of(name)) for name in ("least-loaded", "round-robin")]
    svg = ElementTree.fromstring(draw([Panel("a < b & c", rows), Panel("second", rows)]))
    names = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert names.count("least-loaded") == 2
    assert "a < b & c" in names
    width = float(svg.attrib["viewBox"].split()[2])
    for element in svg.iter():
        for name in ("x", "x1", "x2", "cx"):
            position = float(element.attrib.get(name, 0))
            assert 0 <= position <= width
            assert math.isfinite(position)


def test_a_chart_of_equal_and_tiny_times_can_be_drawn() -> None:
    summary = summarize(outcome(answered(1, 0.0)))
    assert "<svg" in draw([Panel("still", [("all alike", summary)])])


def test_the_benchmark_prints_a_table_and_writes_json_and_a_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"timestamp": 300 * i, "input_length": 1000, "output_length": 9, "hash_ids": [i % 3, i]}
        for i in range(240)
    ]
    trace = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "mooncake_synthetic_trace.jsonl").write_text(trace)
    chosen = [
        "--trace",
        "synthetic",
        "--fleet",
        "a100x8",
        "--load",
        "50",
        "--policy",
        "random",
        "least-loaded",
    ]
    files = ["--json", str(tmp_path / "r.json"), "--svg", str(tmp_path / "r.svg")]
    assert main(["--traces", str(tmp_path), *chosen, *files, "--seed", "7", "8", "--workers", "1"]) == 0
    assert "least-loaded" in capsys.readouterr().out
    results = json.loads((tmp_path / "r.json").read_text())
    assert [(result["policy"], result["seed"]) for result in results] == [
        ("random", 7),
        ("least-loaded", 7),
        ("random", 8),
        ("least-loaded", 8),
    ]
    assert results[0]["summary"]["requests"] == 120
    assert (tmp_path / "r.svg").read_text().startswith("<svg")


def test_the_benchmark_says_in_one_line_which_trace_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--traces", str(tmp_path), "--quick", "--workers", "1"]) == 2
    said = capsys.readouterr().err.strip()
    assert "No such file" in said
    assert "--traces" in said.splitlines()[-1]


def test_the_benchmark_checks_where_to_write_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--json", str(tmp_path / "none" / "r.json")])
    assert "there is no directory" in capsys.readouterr().err


def test_told_pickers_hear_of_everything() -> None:
    told = Told()
    replay([request(i, arrival_s=float(i)) for i in range(3)], fleet(1), told)
    assert set(told.first_tokens) == set(told.ends) == {0, 1, 2}
