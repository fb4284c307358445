"""`GET /metrics` under vLLM's names."""

from collections.abc import Iterator

from extproc.simulator.blocks import BLOCK_TOKENS
from extproc.simulator.state import Engine

GARBAGE = b'{"these": "are no metrics"}\nvllm:num_requests_running{engine="0" lots\n\x00\xff 1e\n'
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_HELP = {
    "process_start_time_seconds": "Start time of the process since unix epoch in seconds.",
    "vllm:num_requests_running": "Number of requests in model execution batches.",
    "vllm:num_requests_waiting": "Number of requests waiting to be processed.",
    "vllm:kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "vllm:prefix_cache_queries_total": "Prefix cache queries, in terms of number of queried tokens.",
    "vllm:prefix_cache_hits_total": "Prefix cache hits, in terms of number of cached tokens.",
    "vllm:num_preemptions_total": "Cumulative number of preemption from the engine.",
    "vllm:prompt_tokens_total": "Number of prefill tokens processed.",
    "vllm:generation_tokens_total": "Number of generation tokens processed.",
    "vllm:request_success_total": "Count of successfully processed requests.",
    "vllm:cache_config_info": "Information of the LLMEngine CacheConfig",
}


def render(engine: Engine) -> str:
    """The engine's metrics in the Prometheus text format."""
    batch, counters = engine.batch, engine.batch.counters
    model = f'model_name="{_escape(engine.options.models[0])}"'
    labels = f'{{engine="0",{model}}}'
    values = {
        "process_start_time_seconds": engine.started_at,
        f"vllm:num_requests_running{labels}": len(batch.running),
        f"vllm:num_requests_waiting{labels}": len(batch.waiting),
        f"vllm:kv_cache_usage_perc{labels}": batch.cache.used_ratio,
        f"vllm:prefix_cache_queries_total{labels}": counters.prompt_tokens,
        f"vllm:prefix_cache_hits_total{labels}": counters.cached_tokens,
        f"vllm:num_preemptions_total{labels}": counters.preemptions,
        f"vllm:prompt_tokens_total{labels}": counters.prompt_tokens,
        f"vllm:generation_tokens_total{labels}": counters.generated_tokens,
    }
    for reason in _FINISH_REASONS:
        series = f'vllm:request_success_total{{engine="0",finished_reason="{reason}",{model}}}'
        values[series] = engine.finish_reasons[reason]
    config = f'block_size="{BLOCK_TOKENS}",enable_prefix_caching="True",engine="0"'
    values[f'vllm:cache_config_info{{{config},num_gpu_blocks="{engine.options.blocks}"}}'] = 1
    return "".join(_lines(values))


def _lines(values: dict[str, float]) -> Iterator[str]:
    described = None
    for series, value in values.items():
        name = series.partition("{")[0]
        if name != described:
            kind = "counter" if name.endswith("_total") else "gauge"
            yield f"# HELP {name} {_HELP[name]}\n# TYPE {name} {kind}\n"
            described = name
        yield f"{series} {float(value)!r}\n"


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
