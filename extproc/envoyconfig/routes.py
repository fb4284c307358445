"""Routes: who answers which path, and which node gets a routed request.

In order: the admin app; a request the service has decided (`x-inferact-cluster` is set); a request it has
not seen yet; and, if the service never answers, fail-open routes by the model that Envoy read in the body.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import chain

from extproc import headers
from extproc.config import Config, NodeConfig
from extproc.envoyconfig.shapes import (
    ADMIN_CLUSTER,
    NOWHERE_CLUSTER,
    ROUTES,
    Json,
    error_body,
    error_headers,
    milliseconds,
    set_header,
    typed,
    typed_config,
)
from extproc.openai.errors import ErrorCode
from extproc.openai.request import Api

EXT_PROC = "envoy.filters.http.ext_proc"
BODY_READER = "envoy.filters.http.json_to_metadata"
BODY_GUARD = "inferact.body_guard"

_ROUTED_PATHS = "|".join(Api)
_ADMIN_PATHS = ("/status", "/metrics", "/healthz", "/readyz", "/health")
_ADMIN_PREFIXES = ("/admin", "/dashboard", "/v1/models")


def route_configuration(config: Config, drained: frozenset[str] = frozenset()) -> Json:
    """RDS: the whole route table. Drained nodes are out of the fail-open routes too."""
    nodes = [node for node in config.nodes if node.id not in drained]
    routes = [
        *_admin_routes(),
        _routed(config),
        _pending(),
        _away(_on_api(dynamic_metadata=[_metadata("uncuttable", {"present_match": True})])),
        *chain.from_iterable(_fail_open(config, nodes, model) for model in config.models),
        _answer(_on_api(), ErrorCode.MODEL_NOT_FOUND, "The model does not exist."),
        _wrong_method(),
        _answer({"prefix": "/"}, ErrorCode.NOT_FOUND, "There is nothing at this path."),
    ]
    host: Json = {
        "name": ROUTES,
        "domains": ["*"],
        "include_request_attempt_count": True,
        "request_body_buffer_limit": config.scheduler.max_body_bytes,
        "response_headers_to_remove": [headers.FAILURE],
        "routes": routes,
    }
    return {"name": ROUTES, "virtual_hosts": [host]}


def _admin_routes() -> Iterable[Json]:
    matches = [{"path": path} for path in _ADMIN_PATHS] + [
        {"path_separated_prefix": p} for p in _ADMIN_PREFIXES
    ]
    for match in matches:
        yield {
            "name": headers.ADMIN,
            "match": match,
            "route": {"cluster": ADMIN_CLUSTER, "timeout": "60s"},
            "typed_per_filter_config": _no_ext_proc(),
        }


def _routed(config: Config) -> Json:
    """The matcher route: the node of this attempt, by the headers that the service set."""
    ids = [node.id for node in config.nodes]
    return {
        "name": headers.ROUTED,
        "match": _on_api(headers=[{"name": headers.CLUSTER, "present_match": True}]),
        "route": _to_nodes(
            config,
            first=_by_header(headers.CLUSTER, ids),
            retries=(_by_header(headers.RETRY_1, ids), _by_header(headers.RETRY_2, ids)),
        ),
        # The service has read the body: Envoy need not read it again.
        "typed_per_filter_config": {BODY_READER: _no_body_rules(), BODY_GUARD: _no_guard()},
        **_node_headers(),
    }


def _pending() -> Json:
    """What a request matches until the service, or the fail-open body reader, has spoken.

    Not a direct response: the body limit of the virtual host holds on real routes only. No timeout runs
    here: the service keeps the deadline of a request in its queue.
    """
    unread = {**_metadata("model", {"present_match": True}), "invert": True}
    return {
        "name": headers.PENDING,
        "match": _on_api(dynamic_metadata=[unread]),
        "route": {"cluster": NOWHERE_CLUSTER, "timeout": "0s", "idle_timeout": "0s"},
    }


def _fail_open(config: Config, nodes: Sequence[NodeConfig], model: str) -> Iterable[Json]:
    """Routes for one model while the service is away, spread over its nodes by their weights.

    One route a node, each retrying on the two that follow. Envoy draws one random number a request, so
    the fractions add up from route to route.
    """
    named = {"string_match": {"exact": model}}
    serving = [node for node in nodes if model in node.serves and node.engine_model(model) == model]
    weighted = [node for node in serving if node.weight > 0] or serving
    total = sum(node.weight or 1.0 for node in weighted)
    reached = 0.0
    for i, node in enumerate(weighted):
        reached += (node.weight or 1.0) / total
        match = _on_api(dynamic_metadata=[_metadata("model", named)])
        if i + 1 < len(weighted):
            share = {"numerator": round(reached * 1_000_000), "denominator": "MILLION"}
            match["runtime_fraction"] = {"default_value": share}
        following = [weighted[(i + step) % len(weighted)].id for step in (1, 2)]
        yield {
            "name": headers.FAIL_OPEN,
            "stat_prefix": headers.FAIL_OPEN,
            "match": match,
            "route": _to_nodes(config, _cluster(node.id), tuple(map(_cluster, following))),
            **_node_headers(),
        }
    if not weighted:
        yield _away(_on_api(dynamic_metadata=[_metadata("model", named)]))


def _to_nodes(config: Config, first: Json, retries: tuple[Json, ...]) -> Json:
    """A route action over node clusters: `first`, then one cluster matcher a retry."""
    # At the time of a retry the header still holds the previous attempt's number.
    by_attempt = {str(number): matcher for number, matcher in enumerate(retries, start=1)}
    specifier = typed(
        "envoy.router.cluster_specifier_plugin.matcher",
        "envoy.extensions.router.cluster_specifiers.matcher.v3.MatcherClusterSpecifier",
        cluster_matcher={
            "matcher_tree": {
                "input": _header_input(headers.ATTEMPT_COUNT),
                "exact_match_map": {"map": by_attempt},
            },
            "on_no_match": first,
        },
    )
    return {
        "timeout": "0s",
        "idle_timeout": milliseconds(config.scheduler.request_timeout_ms),
        "auto_host_rewrite": True,
        "inline_cluster_specifier_plugin": {"extension": specifier},
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
            "retriable_status_codes": list(headers.RETRIED_STATUS),
            "num_retries": len(retries),
            "refresh_cluster_on_retry": True,
            "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
        },
    }


def _by_header(header: str, ids: Sequence[str]) -> Json:
    tree = {
        "input": _header_input(header),
        "exact_match_map": {"map": {name: _cluster(name) for name in ids}},
    }
    return {"matcher": {"matcher_tree": tree}}


def _cluster(name: str) -> Json:
    message = "envoy.extensions.router.cluster_specifiers.matcher.v3.ClusterAction"
    return {"action": typed(name, message, cluster=name)}


def _header_input(header: str) -> Json:
    return typed(header, "envoy.type.matcher.v3.HttpRequestHeaderMatchInput", header_name=header)


def _node_headers() -> Json:
    return {
        "request_headers_to_remove": [headers.ADMIN_KEY],
        "response_headers_to_add": [
            set_header(headers.NODE, "%UPSTREAM_CLUSTER%"),
            set_header(headers.ATTEMPTS, "%UPSTREAM_REQUEST_ATTEMPT_COUNT%"),
        ],
    }


def _on_api(**conditions: list[Json]) -> Json:
    """A POST to a routed path, under further conditions."""
    method = {"name": ":method", "string_match": {"exact": "POST"}}
    conditions["headers"] = [method, *conditions.get("headers", [])]
    return {"safe_regex": {"regex": _ROUTED_PATHS}, **conditions}


def _metadata(key: str, value: Json) -> Json:
    """A condition on what the fail-open body reader found."""
    return {"filter": headers.FAIL_OPEN_NAMESPACE, "path": [{"key": key}], "value": value}


def _wrong_method() -> Json:
    match = {"safe_regex": {"regex": _ROUTED_PATHS}}
    route = _answer(match, ErrorCode.METHOD_NOT_ALLOWED, "Use POST here.")
    route["response_headers_to_add"].append(set_header("allow", "POST"))
    return route


def _away(match: Json) -> Json:
    """What Envoy cannot do for the service while it is away."""
    return _answer(match, ErrorCode.NO_AVAILABLE_NODE, "The scheduler is away; try again shortly.")


def _answer(match: Json, code: ErrorCode, message: str) -> Json:
    """An answer by Envoy itself, in the OpenAI error shape."""
    body = json.dumps(error_body(code, message))
    return {
        "name": code.value,
        "match": match,
        "direct_response": {"status": code.status.value, "body": {"inline_string": body}},
        "typed_per_filter_config": _no_ext_proc(),
        "response_headers_to_add": [set_header("content-type", "application/json"), *error_headers(code)],
    }


def _no_ext_proc() -> Json:
    return {
        EXT_PROC: typed_config("envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute", disabled=True)
    }


def _no_guard() -> Json:
    return typed_config("envoy.extensions.filters.http.lua.v3.LuaPerRoute", disabled=True)


def _no_body_rules() -> Json:
    """A rule for a content type that nobody sends: Envoy refuses a configuration without any rule."""
    never = {"metadata_namespace": headers.FAIL_OPEN_NAMESPACE, "key": "never", "value": ""}
    return typed_config(
        "envoy.extensions.filters.http.json_to_metadata.v3.JsonToMetadata",
        request_rules={
            "rules": [{"selectors": [{"key": "never"}], "on_present": never}],
            "allow_content_types": ["inferact/never"],
        },
    )
