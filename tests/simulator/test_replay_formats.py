"""Reading traces: what they mean, and what is said of those that cannot be read."""

import json
from pathlib import Path

import pytest

from extproc.simulator.replay.formats import read_trace
from extproc.simulator.replay.traces import TraceError


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
    (only,) = read_trace(mooncake(tmp_path, row(7000, 600, 5, [3, 4]))).requests
    assert (only.arrival_s, only.prompt_tokens, only.output_tokens, only.units) == (0.0, 600, 5, (3, 4))


def test_arrivals_are_spread_over_the_ticks_of_mooncakes_clock(tmp_path: Path) -> None:
    file = mooncake(tmp_path, *(row(3000 * (i // 20)) for i in range(60)))
    arrivals = [one.arrival_s for one in read_trace(file, 1).requests]
    assert len(set(arrivals)) == 60 and 8.0 < arrivals[-1] < 9.0
    assert arrivals == [one.arrival_s for one in read_trace(file, 1).requests]
    assert arrivals != [one.arrival_s for one in read_trace(file, 2).requests]


def test_an_azure_row_shares_no_prefix_with_any_other(tmp_path: Path) -> None:
    file = azure(tmp_path, "2023-11-16 18:15:46.6805900,1100,44", "2023-11-16 18:15:47.6805900,512,1")
    first, second = read_trace(file).requests
    assert (first.prompt_tokens, first.output_tokens, len(first.units)) == (1100, 44, 3)
    assert len(second.units) == 1
    assert not set(first.units) & set(second.units)
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.0)


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(row()) + "\n\n")
    assert len(read_trace(file).requests) == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("not json", "malformed"),
        ('{"timestamp": 0}', "input_length"),
        (json.dumps(row(timestamp=-1)), "timestamp"),
        (json.dumps(row(tokens=0)), "input_length"),
        (json.dumps(row(output=0)), "output_length"),
        (json.dumps(row(hash_ids="0 1")), "hash_ids"),
        (json.dumps(row(hash_ids=[1])), "1 hash_ids for 600 tokens. Expected: 2"),
        (json.dumps(row(hash_ids=[1, 1 << 63])), "hash_ids"),
        (json.dumps(row(timestamp=10**400)), ":2: "),
        ("[" * 100_000, ":2: "),
        (json.dumps(row(tokens=1 << 40)), "input_length"),
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
        "2023-11-16 18:15:46,374,99999999999",
        "2023-11-16 18:15:46+00:00,374,44",
    ],
)
def test_a_bad_azure_row_is_named_by_its_line(tmp_path: Path, bad: str) -> None:
    file = azure(tmp_path, "2023-11-16 18:15:46.6805900,374,44", bad)
    with pytest.raises(TraceError) as error:
        read_trace(file)
    assert f"{file}:3: " in str(error.value)


def logged(folder: Path, *lines: dict[str, object]) -> Path:
    """An access log; each line is that of an answered chat, where it does not say otherwise."""
    usual = {
        "time": "2026-11-29T12:00:00.250Z",
        "method": "POST",
        "path": "/v1/chat/completions",
        "route": "routed",
        "status": 200,
        "model": "m",
        "request_bytes": 4000,
        "response_bytes": 800,
        "usage": None,
        "first_token_us": None,
    }
    file = folder / "access.log"
    file.write_text("".join(json.dumps(usual | line) + "\n" for line in lines))
    return file


USAGE = json.dumps({"prompt_tokens": 1100, "completion_tokens": 44, "prompt_tokens_details": None})


def test_a_line_of_the_access_log_is_a_request_of_its_own(tmp_path: Path) -> None:
    later = {"time": "2026-11-29T12:00:10.250Z", "usage": USAGE}
    first, second = read_trace(logged(tmp_path, later, {"usage": USAGE, "model": "other"})).requests
    assert (first.model, second.model) == ("other", "m")
    assert (first.arrival_s, second.arrival_s) == (0.0, 10.0)
    assert (first.prompt_tokens, first.output_tokens, len(first.units)) == (1100, 44, 3)
    assert not set(first.units) & set(second.units)


def test_the_usage_of_responses_has_other_names(tmp_path: Path) -> None:
    usage = json.dumps({"input_tokens": 7, "output_tokens": 8, "total_tokens": 15})
    (only,) = read_trace(logged(tmp_path, {"path": "/v1/responses?x", "usage": usage})).requests
    assert (only.prompt_tokens, only.output_tokens) == (7, 8)


@pytest.mark.parametrize(
    "usage", [None, "-", "{", '{"prompt_tokens": null}', '{"prompt_tokens": "9"}', "[]", "[" * 100_000]
)
def test_without_usage_lengths_are_guessed_from_bytes(tmp_path: Path, usage: str | None) -> None:
    whole, stream = {"usage": usage}, {"usage": usage, "first_token_us": "1795983788982548"}
    trace = read_trace(logged(tmp_path, whole, stream))
    assert [(one.prompt_tokens, one.output_tokens) for one in trace.requests] == [(1000, 200), (1000, 3)]
    assert any("lengths of 2 requests" in note for note in trace.notes)


@pytest.mark.parametrize("unknown", [None, "-"])
def test_what_envoy_does_not_know_is_no_mistake(tmp_path: Path, unknown: str | None) -> None:
    names = ("model", "request_bytes", "response_bytes", "usage", "first_token_us")
    (only,) = read_trace(logged(tmp_path, dict.fromkeys(names, unknown))).requests
    assert (only.model, only.prompt_tokens, only.output_tokens) == ("", 1, 1)


def test_only_generated_answers_are_replayed_and_the_rest_is_counted(tmp_path: Path) -> None:
    others: list[dict[str, object]] = [
        {"status": 503},
        {"route": "admin", "path": "/status"},
        {"path": "/v1/embeddings"},
        {"path": None, "route": None, "status": 400},
    ]
    trace = read_trace(logged(tmp_path, {}, *others, {"route": "fail-open"}))
    assert len(trace.requests) == 2
    assert any("4 lines" in note for note in trace.notes)
    with pytest.raises(TraceError, match=r"no requests in it\. Left out: 4 lines"):
        read_trace(logged(tmp_path, *others))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"time": "yesterday"}, "time"),
        ({"time": "2026-11-29T12:00:00"}, "time"),
        ({"status": "200"}, "status"),
        ({"request_bytes": -1}, "request_bytes"),
        ({"usage": {"prompt_tokens": 1}}, "usage"),
        ({"usage": '{"prompt_tokens": 99999999, "completion_tokens": 1}'}, "99999999"),
    ],
)
def test_a_bad_line_of_the_access_log_is_named(tmp_path: Path, bad: dict[str, object], said: str) -> None:
    file = logged(tmp_path, {}, bad)
    with pytest.raises(TraceError, match=said) as error:
        read_trace(file)
    assert str(error.value).startswith(f"{file}:2: ")


def test_a_line_that_was_cut_is_named(tmp_path: Path) -> None:
    file = logged(tmp_path, {}, {})
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(TraceError, match=f"{file}:2: "):
        read_trace(file)


def test_the_format_is_told_by_content_whatever_the_name(tmp_path: Path) -> None:
    for file in (mooncake(tmp_path, row()), azure(tmp_path, "2023-11-16 18:15:46,5,5"), logged(tmp_path, {})):
        assert len(read_trace(file.rename(tmp_path / "renamed")).requests) == 1


@pytest.mark.parametrize(
    "content",
    [b"a,b\n1,2\n", b"{}\n", b'{"time": 1, "x": 2}\n', b"[1]\n", b"\x1f\x8b\x08\x00\xff\n", b"\xef\xbb\xbf{"],
)
def test_an_unknown_format_is_told_what_is_known(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"\n" + content)
    with pytest.raises(TraceError) as error:
        read_trace(file)
    message = str(error.value)
    assert message.startswith(f"{file}:2: ")
    assert all(name in message for name in ("hash_ids", "ContextTokens", "access log"))


def test_a_clock_that_was_wrong_makes_no_replay_of_years(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="it spans 365 days"):
        read_trace(logged(tmp_path, {}, {"time": "2025-11-29T12:00:00.250Z"}))


def test_missing_and_empty_files_and_files_without_requests_are_told_apart(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    for path, said in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (empty, "empty"),
        (azure(tmp_path), "no requests"),
    ):
        with pytest.raises(TraceError, match=said):
            read_trace(path)
