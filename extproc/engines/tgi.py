"""Text Generation Inference. It reserves a request's tokens on admission and counts no prefix hits.

`tgi_request_skipped_tokens` counts speculated tokens, not cached ones.
"""

from extproc.engines.dialect import Dialect

DIALECT = Dialect(
    engine="TGI",
    version_path="/info",
    takes_any_model=True,
    running=("tgi_batch_current_size",),
    waiting=("tgi_queue_size",),
    kv_used_tokens=("tgi_batch_current_max_tokens",),
    kv_capacity_tokens=("tgi_batch_max_total_tokens",),
    work=("tgi_batch_inference_count",),
)
