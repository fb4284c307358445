"""What each engine's metrics say, and what no bytes may do to the reader."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config.node import NodeConfig
from extproc.engines.backends import dialect_for
from extproc.engines.dialect import Dialect, read_report
from extproc.engines.exposition import Sample, read_samples
from extproc.engines.hit_ratio import WINDOW_S, HitRatio, restarted
from extproc.routing.node import EngineReport

DATA = Path(__file__).parent / "data"
AT_S = 100.0


def dialect(backend: str, **engine: object) -> Dialect:
    settings = {"engine": engine} if engine else {}
    return dialect_for(
        NodeConfig.model_validate(
            {
                "id": "n",
                "hardware": "h100-80g",
                "backend": backend,
                "endpoint": "http://engine:8000",
                "models": ["m"],
                **settings,
            }
        )
    )


def recorded(backend: str, file: str) -> EngineReport:
    return read_report(dialect(backend), (DATA / file).read_bytes(), AT_S)


def said(backend: str, *lines: str) -> EngineReport:
    return read_report(dialect(backend), "\n".join(lines).encode(), AT_S)


def test_vllm_tells_load_capacity_prefix_counters_and_start() -> None:
    assert recorded("vllm", "vllm-0.32-metrics.txt") == EngineReport(
        AT_S,
        running=0,
        waiting=0,
        kv_used_ratio=0.0,
        kv_capacity_tokens=80 * 32,
        prefix_queries=8620,
        prefix_hits=3712,
        started_unix_s=1795962297.67,
        work=4706,
    )


def test_llamacpp_counts_misses_so_queries_are_misses_and_hits() -> None:
    assert recorded("llamacpp", "llamacpp-metrics.txt") == EngineReport(
        AT_S, running=0, waiting=0, prefix_queries=743 + 5065, prefix_hits=5065, work=2156
    )


def test_sglang_replicas_add_up_while_tensor_ranks_and_priorities_are_not_counted_twice() -> None:
    assert recorded("sglang", "sglang-0.5.23-metrics.txt") == EngineReport(
        AT_S,
        running=4 + 6,
        waiting=2 + 1,
        kv_used_ratio=(0.2 + 0.6) / 2,
        kv_capacity_tokens=2 * 441_000,
        prefix_queries=5000,
        prefix_hits=1000 + 250,
        work=3750 + 250,
    )


def test_tgi_tells_reserved_tokens_of_its_capacity_and_no_prefix_hits() -> None:
    assert recorded("tgi", "tgi-3-metrics.txt") == EngineReport(
        AT_S, running=4, waiting=2, kv_used_ratio=0.25, kv_capacity_tokens=32_000, work=150 + 2850
    )


def test_a_custom_engine_says_what_its_configuration_names() -> None:
    spoken = dialect(
        "custom",
        health_path="/up",
        metrics_path="/stats",
        metrics={"running": "busy", "kv_used_ratio": "cache:full"},
    )
    assert (spoken.health_path, spoken.metrics_path) == ("/up", "/stats")
    report = read_report(spoken, b"busy 3\ncache:full 0.5\nqueued 9\n", AT_S)
    assert report == EngineReport(AT_S, running=3, kv_used_ratio=0.5)


@pytest.mark.parametrize("engine", [{}, {"metrics_path": "/stats"}], ids=["no engine section", "only a path"])
def test_a_custom_engine_that_names_no_metric_is_probed_only(engine: dict[str, object]) -> None:
    spoken = dialect("custom", **engine)
    assert (spoken.health_path, spoken.metrics_path) == ("/v1/models", None)


@pytest.mark.parametrize(
    ("backend", "path"),
    [("vllm", "/health"), ("tgi", "/health"), ("llamacpp", "/health"), ("sglang", "/v1/models")],
)
def test_engines_are_probed_where_an_answer_costs_nothing(backend: str, path: str) -> None:
    assert dialect(backend).health_path == path


def test_older_names_count_where_the_newer_are_missing() -> None:
    report = said(
        "vllm",
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.83',
        'vllm:gpu_prefix_cache_queries_total{model_name="m"} 10',
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 4',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",sliding_window="None"} 1.0',
    )
    assert (report.kv_used_ratio, report.kv_capacity_tokens) == (0.83, 1600)
    assert (report.prefix_queries, report.prefix_hits) == (10, 4)


def test_prompts_that_are_kept_for_reuse_are_not_in_use() -> None:
    """What idle slots of an older llama.cpp remember makes nobody wait."""
    assert said("llamacpp", "llamacpp:kv_cache_usage_ratio 1.0").kv_used_ratio is None


def test_the_newer_name_wins_where_both_are_there() -> None:
    report = said("vllm", "vllm:gpu_cache_usage_perc 0.1", "vllm:kv_cache_usage_perc 0.7")
    assert report.kv_used_ratio == 0.7


def test_several_vllm_engines_add_up_and_their_cache_use_is_averaged() -> None:
    lines = []
    for engine, (running, used) in enumerate([(3, 0.2), (5, 0.6)]):
        labels = f'{{engine="{engine}",model_name="m"}}'
        lines += [
            f"vllm:num_requests_running{labels} {running}.0",
            f"vllm:kv_cache_usage_perc{labels} {used}",
            f"vllm:prefix_cache_queries_total{labels} 100.0",
            f'vllm:cache_config_info{{engine="{engine}",kv_cache_size_tokens="2560"}} 1.0',
        ]
    report = said("vllm", *lines)
    assert (report.running, report.kv_used_ratio) == (8, (0.2 + 0.6) / 2)
    assert (report.prefix_queries, report.kv_capacity_tokens) == (200, 5120)


def test_what_is_missing_is_unknown_and_not_zero() -> None:
    assert said("vllm", "# nothing here") == EngineReport(AT_S)
    assert said("llamacpp", "llamacpp:prompt_tokens_total 7").prefix_queries is None
    assert said("tgi", "tgi_batch_current_max_tokens 7").kv_used_ratio is None
    assert said("tgi", "tgi_batch_current_max_tokens 7", "tgi_batch_max_total_tokens 0").kv_used_ratio is None
    assert said("vllm", 'vllm:cache_config_info{num_gpu_blocks="None"} 1').kv_capacity_tokens is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300", "1e", "0x10", "1_0", "", "{", "--1"])
def test_a_nonsensical_value_is_unknown(value: str) -> None:
    assert said("vllm", f"vllm:num_requests_running {value}").running is None


def test_a_nonsensical_rank_does_not_spoil_the_others() -> None:
    report = said(
        "vllm", 'vllm:num_requests_running{engine="0"} NaN', 'vllm:num_requests_running{engine="1"} 2'
    )
    assert report.running == 2


@pytest.mark.parametrize(("value", "ratio"), [("1.0000001", 1.0), ("1.5", None), ("42", None)])
def test_cache_use_over_one_is_rounding_or_no_ratio(value: str, ratio: float | None) -> None:
    assert said("vllm", f"vllm:kv_cache_usage_perc {value}").kv_used_ratio == ratio


@pytest.mark.parametrize(
    "line",
    [
        b"a 1",
        b"a{} 1",
        b"a\t 1.0\t1700000000000",
        b"a 1\r",
        b'a{l="}"} 1',
        b'a{ l = "\\"x\\\\" , } 1e0',
        b'a{l="\xff"}1',
        b'a{l="v"} 1 # {trace="t"} 0.5',
    ],
)
def test_a_sample_is_read_in_every_spelling(line: bytes) -> None:
    for text in (line, b"# HELP a b\n" + line + b"\n", b"junk\n" + line + b"\njunk 2"):
        assert [sample.value for sample in read_samples(text, ["a"])["a"]] == [1.0]


@pytest.mark.parametrize(
    "line",
    [
        b"ab 1",
        b"a_total 1",
        b"# a 1",
        b"xa 1",
        b"a1",
        b'a{l="v} 1',
        b"a{l} x",
        b"a{",
        b"a",
        b"a one",
        b"a 1x",
    ],
)
def test_what_only_resembles_a_sample_is_passed_over(line: bytes) -> None:
    assert read_samples(line + b"\n", ["a"]) == {}


def test_labels_are_read() -> None:
    text = b'a{x="1",y="b,c=\\"d\\""} 2\n'
    assert read_samples(text, ["a"]) == {"a": [Sample({"x": "1", "y": 'b,c=\\"d\\"'}, 2.0)]}


def test_a_metric_on_absurdly_many_lines_is_unknown() -> None:
    assert read_samples(b"a 1\n" * 100_000 + b"b 1\n", ["a", "b"]).keys() == {"b"}


_PIECES = [
    b"vllm:num_requests_running",
    b"vllm:cache_config_info",
    b'kv_cache_size_tokens="',
    b'engine="0"',
    b"NaN",
]
_MARKS = [
    b"{",
    b"}",
    b'"',
    b"\\",
    b",",
    b"=",
    b" ",
    b"\n",
    b"\r",
    b"\t",
    b"#",
    b"1",
    b"-",
    b"e",
    b".",
    b"\xff",
    b"\x00",
]
_WORDS = st.sampled_from([*_PIECES, *_MARKS])


@settings(deadline=None)
@given(st.binary() | st.lists(_WORDS, max_size=60).map(b"".join))
def test_no_bytes_upset_the_reader(text: bytes) -> None:
    report = read_report(dialect("vllm"), text, AT_S)
    for count in (report.running, report.waiting, report.kv_capacity_tokens, report.prefix_queries):
        assert count is None or count >= 0
    assert report.kv_used_ratio is None or 0 <= report.kv_used_ratio <= 1


@settings(deadline=None)
@given(
    values=st.lists(st.integers(0, 10**6), min_size=1, max_size=20),
    names=st.lists(st.text(min_size=1), min_size=20, max_size=20, unique=True),
)
def test_counts_add_up_whatever_the_labels_hold(values: list[int], names: list[str]) -> None:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    lines = [
        f'vllm:num_requests_running{{model_name="{name.translate(escapes)}"}} {value}\n'
        for value, name in zip(values, names, strict=False)
    ]
    text = "".join(lines).encode(errors="surrogatepass")
    assert read_report(dialect("vllm"), text, AT_S).running == sum(values)


def counted(at_s: float, queries: int | None, hits: int | None, started: float | None = None) -> EngineReport:
    return EngineReport(at_s, prefix_queries=queries, prefix_hits=hits, started_unix_s=started)


def ratio_after(*reports: EngineReport) -> float | None:
    ratio = HitRatio()
    for report in reports:
        ratio.add(report)
    return ratio.value(reports[-1].at_s)


def test_the_hit_ratio_counts_from_the_first_report_on() -> None:
    assert ratio_after(counted(0, 1000, 900)) is None
    assert ratio_after(counted(0, 1000, 900), counted(1, 1100, 925)) == 0.25


def test_the_hit_ratio_is_unknown_while_nothing_is_looked_up() -> None:
    assert ratio_after(counted(0, 50, 5), counted(1, 50, 5)) is None
    assert ratio_after(counted(0, None, None), counted(1, None, 5)) is None


def test_the_hit_ratio_forgets_what_is_older_than_its_window() -> None:
    early = [counted(float(s), 100 * s, 100 * s) for s in range(10)]
    late = [counted(float(s), 900 + s, 900) for s in range(300, 320)]
    assert ratio_after(*early, late[0]) is not None
    assert ratio_after(*early, *late) == 0.0


def test_the_hit_ratio_of_a_silent_engine_fades_to_unknown() -> None:
    ratio = HitRatio()
    ratio.add(counted(0, 0, 0))
    ratio.add(counted(1, 100, 50))
    assert ratio.value(WINDOW_S) == 0.5
    assert ratio.value(WINDOW_S + 2) is None


def test_the_hit_ratio_survives_a_restart_of_the_engine() -> None:
    before = (counted(0, 1000, 500), counted(1, 1100, 600))
    assert ratio_after(*before, counted(2, 100, 0)) == 0.5


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=30))
def test_the_hit_ratio_stays_within_bounds(counters: list[tuple[int, int]]) -> None:
    reports = [counted(float(s), queries, hits, 5.0) for s, (queries, hits) in enumerate(counters)]
    ratio = ratio_after(*reports)
    assert ratio is None or 0 <= ratio <= 1


@pytest.mark.parametrize(
    ("before", "now", "anew"),
    [
        (counted(0, 10, 5), counted(1, 11, 6), False),
        (counted(0, 10, 5), counted(1, 9, 5), True),
        (counted(0, 10, 5), counted(1, 10, 4), True),
        (counted(0, 10, 5, 1000.0), counted(1, 20, 6, 1030.0), True),
        (counted(0, 10, 5, 1000.0), counted(1, 20, 6, 1000.2), False),
        (counted(0, 10, 5, 1000.0), counted(1, 2, 1, 1000.0), True),
        (counted(0, None, None), counted(1, 2, 1, 1000.0), False),
    ],
)
def test_a_restart_shows_in_the_start_time_or_in_a_counter_that_fell(
    before: EngineReport, now: EngineReport, anew: bool
) -> None:
    assert restarted(before, now) is anew
