"""llama.cpp's server. Releases after mid-2025 no longer say how full the KV cache is."""

from extproc.engines.dialect import Dialect

DIALECT = Dialect(
    engine="llama.cpp",
    metrics_option="--metrics",
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    kv_used_ratio=("llamacpp:kv_cache_usage_ratio",),
    prefix_hits=("llamacpp:prompt_tokens_cached_total",),
    prefix_misses=("llamacpp:prompt_tokens_total",),
    work=("llamacpp:n_decode_total",),
)
