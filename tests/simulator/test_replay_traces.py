"""Reading traces: what they mean, and what is said of those that cannot be read."""

import json
from pathlib import Path

import pytest
from replay_support import request

from extproc.simulator.replay.traces import Part, TraceError, part_of, rate, read_trace, scaled


def mooncake(path: Path, *rows: dict[str, object]) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(
    timestamp: int = 0, tokens: int = 600, output: int = 5, hash_ids: object = (0, 1)
) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": hash_ids}


def azure(path: Path, *lines: str) -> Path:
    file = path / "trace.csv"
    file.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *lines)) + "\n")
    return file


def test_a_mooncake_row_is_a_request_with_its_prefix_units(tmp_path: Path) -> None:
    (only,) = read_trace(mooncake(tmp_path, row(7000, 600, 5, [3, 4])))
    assert (only.arrival_s, only.prompt_tokens, only.output_tokens, only.units) == (0.0, 600, 5, (3, 4))


def test_arrivals_are_spread_within_the_ticks_of_the_clock(tmp_path: Path) -> None:
    rows = [row(3000 * (i // 20)) for i in range(60)]
    requests = read_trace(mooncake(tmp_path, *rows))
    for number, one in enumerate(requests):
        tick_s = 3.0 * (number // 20)
        assert tick_s <= one.arrival_s < tick_s + 3.0
    assert len({one.arrival_s for one in requests}) == 60
    assert [one.id for one in requests] == list(range(60))


def test_the_same_seed_spreads_alike_and_another_does_not(tmp_path: Path) -> None:
    file = mooncake(tmp_path, *(row(3000 * i) for i in range(9)))
    assert read_trace(file, 1) == read_trace(file, 1) != read_trace(file, 2)


def test_an_azure_row_shares_no_prefix_with_any_other(tmp_path: Path) -> None:
    file = azure(tmp_path, "2023-11-16 18:15:46.6805900,1100,44", "2023-11-16 18:15:47.6805900,512,1")
    first, second = read_trace(file)
    assert (first.prompt_tokens, first.output_tokens, len(first.units)) == (1100, 44, 3)
    assert len(second.units) == 1
    assert not set(first.units) & set(second.units)
    assert 1.0 <= second.arrival_s <= 2.0


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(row()) + "\n\n")
    assert len(read_trace(file)) == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("not json", "malformed"),
        ('{"timestamp": 0}', "input_length"),
        (json.dumps(row(timestamp=-1)), "timestamp"),
        (json.dumps(row(tokens=0)), "input_length"),
        (json.dumps(row(output=0)), "output_length"),
        (json.dumps(row(hash_ids="0 1")), "hash_ids"),
        (json.dumps(row(hash_ids=[1])), "1 hash_ids; 600 tokens in blocks of 512 make 2"),
    ],
)
def test_a_bad_mooncake_row_is_named_by_its_line(tmp_path: Path, bad: str, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(row()) + "\n" + bad + "\n")
    with pytest.raises(TraceError, match=said) as error:
        read_trace(file)
    assert f"{file}:2: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "bad",
    [
        "2023-11-16 18:15:46,374",
        "yesterday,374,44",
        "2023-11-16 18:15:46,many,44",
        "2023-11-16 18:15:46,0,44",
    ],
)
def test_a_bad_azure_row_is_named_by_its_line(tmp_path: Path, bad: str) -> None:
    file = azure(tmp_path, "2023-11-16 18:15:46.6805900,374,44", bad)
    with pytest.raises(TraceError) as error:
        read_trace(file)
    assert f"{file}:3: " in str(error.value)


def test_a_csv_with_other_columns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match=r":1: columns \['a', 'b'\]"):
        read_trace(file)


def test_missing_empty_and_unknown_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(mooncake(tmp_path))
    with pytest.raises(TraceError, match=r"known are \.jsonl, \.csv"):
        read_trace(tmp_path / "trace.parquet")


def test_a_trace_is_halved_by_requests_each_half_from_zero() -> None:
    requests = [request(i, arrival_s=float(i)) for i in range(4)]
    first, second = part_of(requests, Part.FIRST), part_of(requests, Part.SECOND)
    assert [one.id for one in first] == [0, 1]
    assert [(one.id, one.arrival_s) for one in second] == [(2, 0.0), (3, 1.0)]
    assert part_of(requests, Part.ALL) == requests


def test_scaling_sends_the_same_requests_faster() -> None:
    requests = [request(i, arrival_s=float(i)) for i in range(4)]
    faster = scaled(requests, 2.0)
    assert [one.arrival_s for one in faster] == [0.0, 0.5, 1.0, 1.5]
    assert rate(faster) == 2 * rate(requests)


def test_requests_that_all_arrive_at_once_have_no_rate() -> None:
    with pytest.raises(TraceError, match="at the same time"):
        rate([request(1), request(2)])
