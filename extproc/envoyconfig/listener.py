"""The public listener: the HTTP connection manager, its filters, local replies and access logs."""

import json

from extproc import headers
from extproc.config import Config
from extproc.envoyconfig.answers import answer_reader
from extproc.envoyconfig.routes import BODY_GUARD, BODY_READER, EXT_PROC
from extproc.envoyconfig.shapes import (
    EXTPROC_CLUSTER,
    ROUTES,
    Json,
    error_body,
    error_headers,
    milliseconds,
    tcp,
    typed,
)
from extproc.openai.cut import HINTS_MEMBER, MEMBERS
from extproc.openai.errors import ErrorCode
from extproc.rundir import RunDir

MESSAGE_TIMEOUT = "2s"
"""How long Envoy waits for the service before it fails open."""
HOLD_LIMIT = "3600s"
"""The longest that the service may ask Envoy to wait while a request is in its queue."""
READ_TIMEOUT = "300s"
"""Time for a client to send its whole request."""
FAIL_OPEN_BYTES = 2 << 20
"""The largest body that Envoy routes by itself while the service is away."""
LOG_FLUSH = "0.1s"
"""How late an access-log entry may reach the service."""
TOLD_EVERY = "1s"
"""How often the log tells of a request that runs, if there is news."""

_FILTERS = "envoy.extensions.filters.http"
_COMPRESSION = "envoy.extensions.compression"
_DECOMPRESSORS = {
    "gzip": (f"{_COMPRESSION}.gzip.decompressor.v3.Gzip", {"window_bits": 15, "chunk_size": 65536}),
    "brotli": (f"{_COMPRESSION}.brotli.decompressor.v3.Brotli", {"chunk_size": 65536}),
    "zstd": (f"{_COMPRESSION}.zstd.decompressor.v3.Zstd", {"chunk_size": 65536}),
}


def listener(config: Config, run: RunDir) -> Json:
    """The one public address. TLS goes in its filter chain (see envoy/README.md)."""
    manager = typed(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        **_manager(config, run),
    )
    return {
        "name": "inferact",
        "address": tcp(config.scheduler.host, config.scheduler.port),
        "filter_chains": [{"filters": [manager]}],
    }


def _manager(config: Config, run: RunDir) -> Json:
    return {
        "stat_prefix": "inferact",
        "rds": {"route_config_name": ROUTES, "config_source": watched(str(run.routes), str(run.xds))},
        "early_header_mutation_extensions": [_strip_forgeable()],
        "http_filters": _http_filters(),
        "access_log": [_json_log(), {**_service_log(), "filter": _ended_or_begun()}],
        "access_log_options": {"access_log_flush_interval": TOLD_EVERY},
        "local_reply_config": {"mappers": _local_replies()},
        "use_remote_address": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "server_header_transformation": "APPEND_IF_ABSENT",
        "normalize_path": True,
        "merge_slashes": True,
        # Long generations are cut by none of these: the routed route has an idle timeout of its own.
        "stream_idle_timeout": "0s",
        # A client that stops reading must not hold a finished answer, and with it the node's slot, for ever.
        "stream_flush_timeout": milliseconds(config.scheduler.request_timeout_ms),
        "request_headers_timeout": "10s",
        "request_timeout": READ_TIMEOUT,
    }


def watched(path: str, directory: str) -> Json:
    """A configuration file that Envoy reads again when it is replaced by a rename."""
    return {
        "path_config_source": {"path": path, "watched_directory": {"path": directory}},
        "resource_api_version": "V3",
    }


def _strip_forgeable() -> Json:
    """Remove, before any route is chosen, what would let a client choose nodes or change retries."""
    mutations: list[Json] = [{"remove": name} for name in headers.FORGEABLE]
    mutations.append({"remove_on_match": {"key_matcher": {"prefix": "x-envoy-", "ignore_case": True}}})
    return typed(
        "envoy.http.early_header_mutation.header_mutation",
        "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        mutations=mutations,
    )


def _http_filters() -> list[Json]:
    router = typed(
        "envoy.filters.http.router",
        f"{_FILTERS}.router.v3.Router",
        upstream_log=[_attempt_log()],
        suppress_envoy_headers=True,
    )
    readers = [_body_guard(), _body_reader(), answer_reader()]
    return [_keep_for_rewrites(), *_decompressors(), _ext_proc(), *readers, router]


def _keep_for_rewrites() -> Json:
    """Keep the client's path and `authorization` for the attempts (see `clusters._rewrite_filters`)."""
    kept = {"inferact.path": "%REQ(:path)%", "inferact.authorization": "%REQ(authorization)%"}
    values = [
        {
            "object_key": key,
            "factory_key": "envoy.string",
            "format_string": {"text_format_source": {"inline_string": value}, "omit_empty_values": True},
            "skip_if_empty": True,
        }
        for key, value in kept.items()
    ]
    return typed(
        "envoy.filters.http.set_filter_state",
        f"{_FILTERS}.set_filter_state.v3.Config",
        on_request_headers=values,
    )


def _decompressors() -> list[Json]:
    """Request bodies are read by the service, so they arrive there in plain; answers are left alone."""
    off = {
        "common_config": {"enabled": {"default_value": False, "runtime_key": "inferact.decompress_answers"}}
    }
    return [
        typed(
            f"envoy.filters.http.decompressor.{name}",
            f"{_FILTERS}.decompressor.v3.Decompressor",
            decompressor_library=typed(name, message, **options),
            request_direction_config={"advertise_accept_encoding": False},
            response_direction_config=off,
        )
        for name, (message, options) in _DECOMPRESSORS.items()
    ]


def _ext_proc() -> Json:
    """The service sees the request's headers and its whole body, and nothing of the answer."""
    seen = (":method", ":path", "content-type", "content-encoding", "x-request-id")
    return typed(
        EXT_PROC,
        f"{_FILTERS}.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": EXTPROC_CLUSTER}},
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            "request_trailer_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        },
        message_timeout=MESSAGE_TIMEOUT,
        max_message_timeout=HOLD_LIMIT,
        failure_mode_allow=True,
        mutation_rules={"allow_envoy": True},
        forward_rules={"allowed_headers": {"patterns": [{"exact": name} for name in seen]}},
        metadata_options={
            "receiving_namespaces": {"untyped": [headers.METADATA_NAMESPACE, headers.DECISION_NAMESPACE]}
        },
    )


def _body_reader() -> Json:
    """Fail open: read the model from the body."""
    absent = {"metadata_namespace": headers.FAIL_OPEN_NAMESPACE, "key": "model", "value": ""}
    rule = {
        "selectors": [{"key": "model"}],
        "on_present": {"metadata_namespace": headers.FAIL_OPEN_NAMESPACE, "key": "model", "type": "STRING"},
        "on_missing": absent,
        "on_error": absent,
    }
    return typed(
        BODY_READER,
        f"{_FILTERS}.json_to_metadata.v3.JsonToMetadata",
        request_rules={
            "rules": [rule],
            "allow_content_types_regex": {"regex": ".*"},
            "allow_empty_content_type": True,
        },
    )


def _body_guard() -> Json:
    """Fail open: mark a body with members that only the service can cut out (a client could kill an engine).

    Large bodies are refused: the body reader takes up to a hundred times their size in memory.
    By text, and rather too often than not: a letter of a name may be written as an escape. The body reader
    cannot do this: it takes a member that is an object for a missing one.
    """
    code = ErrorCode.NO_AVAILABLE_NODE
    body = json.dumps(
        error_body(code, "The scheduler is away, and this body is too large to go on without it.")
    )
    names = ", ".join(f"'\"{member}\"'" for member in MEMBERS if member != HINTS_MEMBER)
    script = f"""local names = {{{names}}}
function envoy_on_request(handle)
  local buffer = handle:body()
  if buffer == nil then return end
  if buffer:length() > {FAIL_OPEN_BYTES} then
    handle:respond({{[":status"] = "503", ["content-type"] = "application/json", ["retry-after"] = "1",
      ["{headers.REASON}"] = "{code.value}"}}, [[{body}]])
    return
  end
  local body = buffer:getBytes(0, buffer:length())
  local found = body:find("\\\\u00[567]%x") ~= nil
  for _, name in ipairs(names) do found = found or body:find(name, 1, true) ~= nil end
  if not found then return end
  handle:streamInfo():dynamicMetadata():set("{headers.FAIL_OPEN_NAMESPACE}", "uncuttable", "yes")
end
"""
    return typed(BODY_GUARD, f"{_FILTERS}.lua.v3.Lua", default_source_code={"inline_string": script})


def _json_log() -> Json:
    """One line a request on standard output, enough to replay it (see `simulator/replay/formats.py`).

    Paths without their query, which may hold secrets.
    """
    fields = {
        "time": "%START_TIME%",
        "request_id": "%REQ(x-request-id)%",
        "method": "%REQ(:method)%",
        "path": "%PATH(NQ)%",
        "status": "%RESPONSE_CODE%",
        "node": "%UPSTREAM_CLUSTER%",
        "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "model": f"%DYNAMIC_METADATA({headers.METADATA_NAMESPACE}:model)%",
        **{
            name: f"%DYNAMIC_METADATA({headers.DECISION_NAMESPACE}:{name})%"
            for name in (headers.COST_S, headers.PROMPT_TOKENS, headers.MATCHED_TOKENS, headers.WAITED_S)
        },
        "duration_ms": "%DURATION%",
        "request_bytes": "%BYTES_RECEIVED%",
        "response_bytes": "%BYTES_SENT%",
        "first_token_us": f"%DYNAMIC_METADATA({headers.ANSWER_NAMESPACE}:{headers.FIRST_TOKEN})%",
        "usage": f"%DYNAMIC_METADATA({headers.ANSWER_NAMESPACE}:{headers.USAGE})%",
        "flags": "%RESPONSE_FLAGS%",
        "details": "%RESPONSE_CODE_DETAILS%",
        "route": "%ROUTE_NAME%",
    }
    log = typed(
        "envoy.access_loggers.stdout",
        "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
        log_format={"json_format": fields},
    )
    return {**log, "filter": _of_type("DownstreamEnd")}


def _ended_or_begun() -> Json:
    """An entry a request that is over, and before that one or a few of a stream that has begun."""
    begun = {
        "metadata_filter": {
            "matcher": {
                "filter": headers.ANSWER_NAMESPACE,
                "path": [{"key": headers.IS_NEWS}],
                "value": {"string_match": {"exact": "yes"}},
            },
            "match_if_key_not_found": False,
        }
    }
    running = {"and_filter": {"filters": [_of_type("DownstreamPeriodic"), begun]}}
    return {"or_filter": {"filters": [_of_type("DownstreamEnd"), running]}}


def _of_type(name: str) -> Json:
    return {"log_type_filter": {"types": [name]}}


def _attempt_log() -> Json:
    """For the service: an entry an attempt that failed. The others tell no more than the request's entry."""
    failed = {"or_filter": {"filters": [{"response_flag_filter": {}}, _status("GE", 400)]}}
    return {**_service_log(), "filter": failed}


def _service_log() -> Json:
    return typed(
        "envoy.access_loggers.http_grpc",
        "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        common_config={
            "log_name": "inferact",
            "grpc_service": {"envoy_grpc": {"cluster_name": EXTPROC_CLUSTER}},
            "transport_api_version": "V3",
            "buffer_flush_interval": LOG_FLUSH,
        },
        additional_request_headers_to_log=[headers.EXCHANGE],
        additional_response_headers_to_log=[headers.REASON, headers.FAILURE],
    )


def _local_replies() -> list[Json]:
    """Errors that Envoy makes, in the OpenAI shape; the first that matches counts.

    The service's own answers, and those of routes, are local replies too: they pass as they are.
    """
    busy = "Every node that could take the request failed or is gone."
    late = "The request took longer than `request_timeout_ms` allows."
    return [
        _local_reply(_status("EQ", 413), ErrorCode.BODY_TOO_LARGE, "The body is too large."),
        _local_reply(_flagged("UT", "SI", "DT", "UMSDR"), ErrorCode.REQUEST_TIMEOUT, late),
        _local_reply(
            _flagged("NR", "NC", "UH", "UF", "UO", "UC", "UR", "LR", "URX", "UPE"),
            ErrorCode.NO_AVAILABLE_NODE,
            busy,
        ),
        _unreadable(),
    ]


def _local_reply(when: Json, code: ErrorCode, message: str) -> Json:
    return {
        "filter": when,
        "status_code": code.status.value,
        "body_format_override": {"json_format": error_body(code, message)},
        "headers_to_add": error_headers(code),
    }


def _unreadable() -> Json:
    reply = _local_reply(_made_by_envoy(), ErrorCode.INVALID_REQUEST, "The request cannot be read as HTTP.")
    del reply["status_code"]  # 400, 408, 431: as Envoy found
    return reply


def _made_by_envoy() -> Json:
    """A client's mistake at HTTP itself: headers too large or too slow, a message that cannot be parsed."""
    ours = f"response.code_details.startsWith('{headers.ANSWERED}')"
    expression = f"!({ours} || response.code_details in ['direct_response', 'lua_response'])"
    cel = typed(
        "envoy.access_loggers.extension_filters.cel",
        "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter",
        expression=expression,
    )
    return {"and_filter": {"filters": [_status("GE", 400), {"extension_filter": cel}]}}


def _flagged(*flags: str) -> Json:
    return {"response_flag_filter": {"flags": list(flags)}}


def _status(comparison: str, status: int) -> Json:
    value = {"default_value": status, "runtime_key": f"inferact.status.{status}"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}
