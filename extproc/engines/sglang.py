"""SGLang. Its `/health` runs a generation, a second or more: the list of models tells life sooner."""

from extproc.engines.dialect import Dialect
from extproc.engines.signatures import FAILED, MEMORY_TEXTS, QUEUE_FULL, TOO_MANY, Signature
from extproc.routing.outcome import Failure

_MEMORY_TEXTS = (*MEMORY_TEXTS, "prefill out of memory", "decode out of memory")
"""The pool of KV tokens, too, can be used up."""

DIALECT = Dialect(
    engine="SGLang",
    health_path="/v1/models",
    metrics_option="--enable-metrics",
    version_path="/get_server_info",
    usage_option="--enable-cache-report",
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    kv_used_ratio=("sglang:token_usage",),
    kv_capacity_tokens=("sglang:max_total_num_tokens",),
    rank_label="dp_rank",  # tensor and pipeline ranks of one replica repeat its requests
    share_label="priority",  # empty on the total
    prefix_queries=("sglang:prompt_tokens_total",),
    prefix_hits=("sglang:cached_tokens_total",),
    work=("sglang:realtime_tokens_total",),  # `generation_tokens_total` waits for a request's end
    signatures=(Signature(Failure.OUT_OF_MEMORY, (500, 503), _MEMORY_TEXTS), QUEUE_FULL, TOO_MANY, FAILED),
)
