"""Names that Envoy and the service agree on: headers, routes, metadata, statuses."""

from typing import Final

CLUSTER: Final = "x-inferact-cluster"
"""The node that takes the request: set by the service, read by the route."""
RETRY_1: Final = "x-inferact-retry-1"
"""The node that takes the first retry."""
RETRY_2: Final = "x-inferact-retry-2"
"""The node that takes the second retry."""

EXCHANGE: Final = "x-inferact-id"
"""The exchange: set by the service, read back from the access log. The only thing all its entries carry."""

TRANSFER: Final = "x-inferact-transfer"
"""How many bytes of the body, after its first brace, only the first node may see: set by the service."""

NODE: Final = "x-inferact-node"
"""Response: the node that served."""
ATTEMPTS: Final = "x-inferact-attempts"
"""Response: how many nodes were tried."""
REASON: Final = "x-inferact-reason"
"""Response: the `error.code` of an answer that no engine made."""
FAILURE: Final = "x-inferact-failure"
"""Response of a node, for the access log only: what a failing answer says of the engine (`Failure`)."""
ADMIN_KEY: Final = "x-inferact-admin-key"
"""Request: the key of the admin endpoints."""

MAX_RETRIES: Final = "x-envoy-max-retries"
ATTEMPT_COUNT: Final = "x-envoy-attempt-count"
REQUEST_TIMEOUT_MS: Final = "x-envoy-upstream-rq-timeout-ms"
TRY_TIMEOUT_MS: Final = "x-envoy-upstream-rq-per-try-timeout-ms"

FORGEABLE: Final = (CLUSTER, RETRY_1, RETRY_2, EXCHANGE, TRANSFER, NODE, ATTEMPTS, REASON, FAILURE)
"""Ours: a client that sends one of these is trying to choose a node, so the edge removes them.

Every `x-envoy-*` request header goes the same way, by prefix."""

METADATA_NAMESPACE: Final = "inferact"
"""Dynamic metadata that the service attaches to a request, and reads back from the access log."""
DECISION_NAMESPACE: Final = "inferact.decision"
"""The same, for the log and for spans alone: the four that follow."""
COST_S: Final = "cost_s"
"""What the request was expected to cost on the node that was chosen."""
PROMPT_TOKENS: Final = "prompt_tokens"
"""About how many its prompt has."""
MATCHED_TOKENS: Final = "matched_tokens"
"""About how many of them the node was expected to have cached."""
WAITED_S: Final = "waited_s"
"""Its time in the queue."""
FAIL_OPEN_NAMESPACE: Final = "inferact.failopen"
"""Dynamic metadata that Envoy reads from a body when the service did not answer."""
ANSWER_NAMESPACE: Final = "inferact.answer"
"""Dynamic metadata that Envoy reads from a node's answer: the three that follow."""
FIRST_TOKEN: Final = "first_token_us"
"""When the first token of a stream passed, in microseconds since 1970."""
USAGE: Final = "usage"
"""The `usage` object of a whole answer, as it stands there."""
ERROR: Final = "error"
"""Set where an error came within a stream."""

IS_NEWS: Final = "news"
"""In the same: `yes` while the first token of a stream is news for the service."""

ROUTED: Final = "routed"
"""Route: the service chose the node."""
FAIL_OPEN: Final = "fail-open"
"""Route: the service did not answer, Envoy chose."""
ADMIN: Final = "admin"
"""Route: to the admin app."""
PENDING: Final = "pending"
"""Route: the service has not answered yet."""

RETRIED_STATUS: Final = (424, 429, 500, 502, 503, 504)
"""An engine's answers that another node may do better."""
ANSWERED: Final = "inferact_"
"""How the `response_code_details` of the service's own answers begin."""
