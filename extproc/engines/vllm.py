"""vLLM."""

from extproc.engines.dialect import CapacityLabels, Dialect
from extproc.engines.signatures import FAILED, OUT_OF_MEMORY, TOO_MANY, Signature
from extproc.routing.outcome import Failure

DIALECT = Dialect(
    engine="vLLM",
    version_path="/version",
    usage_option="--enable-prompt-tokens-details",
    caching_option="--enable-prefix-caching",
    kv_events_path="/kv_event_sources",
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_used_ratio=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    kv_capacity_labels=CapacityLabels(
        "vllm:cache_config_info",
        tokens="kv_cache_size_tokens",
        blocks="num_gpu_blocks",
        block_tokens="block_size",
    ),
    prefix_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    prefix_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    started_unix_s=("process_start_time_seconds",),
    work=("vllm:generation_tokens_total",),
    # It answers a request with 503 for no other reason than its `max_num_queued_*` limits.
    signatures=(OUT_OF_MEMORY, Signature(Failure.OVERLOADED, (503,)), TOO_MANY, FAILED),
)
