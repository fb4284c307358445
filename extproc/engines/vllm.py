"""vLLM."""

from extproc.engines.dialect import CapacityLabels, Dialect

DIALECT = Dialect(
    engine="vLLM",
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
)
