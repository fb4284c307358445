"""llama.cpp's server. It does not say how much of its KV cache is in use.

`llamacpp:kv_cache_usage_ratio`, of releases until mid-2025, counts what idle slots keep for reuse, too.
"""

from extproc.engines.dialect import Dialect

DIALECT = Dialect(
    engine="llama.cpp",
    metrics_option="--metrics",
    version_path="/props",
    version_member="build_info",
    takes_any_model=True,
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    prefix_hits=("llamacpp:prompt_tokens_cached_total",),
    prefix_misses=("llamacpp:prompt_tokens_total",),
    work=("llamacpp:n_decode_total",),
)
