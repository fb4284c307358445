"""Clusters: one a node, and the service's own."""

import ipaddress
from pathlib import Path

from extproc import headers
from extproc.config import Config, NodeConfig, Tls
from extproc.engines.backends import dialect_for
from extproc.envoyconfig.failures import failure_reader
from extproc.envoyconfig.shapes import (
    ADMIN_CLUSTER,
    EXTPROC_CLUSTER,
    NOWHERE_CLUSTER,
    Json,
    pipe,
    tcp,
    typed,
    typed_config,
)
from extproc.rundir import RunDir

CONNECT_TIMEOUT = "2s"
KEEP_ALIVE = "4s"
"""Idle upstream connections are closed before uvicorn does it (5 s): no request meets a dying one."""
UNLIMITED = 1_000_000
"""Circuit breakers out of the way: caps belong to the scheduler, where a full node is not an error."""

_CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_FILTERS = "envoy.extensions.filters.http"


def clusters(config: Config, run: RunDir) -> list[Json]:
    """CDS: every node."""
    rewrites, splits = needs_rewrites(config), config.batching.prefill_decode_split
    return [node_cluster(node, run, rewrites, splits) for node in config.nodes]


def own_clusters(config: Config, run: RunDir) -> list[Json]:
    """The clusters of the bootstrap: the service's two listeners, and nowhere."""
    scheduler = config.scheduler
    listen = scheduler.extproc_address
    if isinstance(listen, Path):
        extproc, admin = pipe(str(listen)), pipe(str(run.admin_socket))
    else:
        extproc, admin = tcp(listen.host, listen.port), tcp(scheduler.admin_host, scheduler.admin_port)
    service = _cluster(EXTPROC_CLUSTER, extproc, {"http2_protocol_options": {}})
    if scheduler.extproc_tls is not None and not isinstance(listen, Path):
        service["transport_socket"] = _tls(scheduler.extproc_tls, listen.host)
    return [
        service,
        _cluster(ADMIN_CLUSTER, admin, {"http_protocol_options": {}}),
        {"name": NOWHERE_CLUSTER, "type": "STATIC", "load_assignment": {"cluster_name": NOWHERE_CLUSTER}},
    ]


def needs_rewrites(config: Config) -> bool:
    """Whether a node has a base path or a key of its own, so that attempts differ in their headers."""
    return any(node.base_path or node.api_key_env for node in config.nodes)


def node_cluster(node: NodeConfig, run: RunDir, rewrites: bool, splits: bool) -> Json:
    """The cluster of one node, named by its id."""
    cluster = _cluster(node.id, tcp(node.host, node.port), {"http_protocol_options": {}}, _authority(node))
    options = cluster["typed_extension_protocol_options"][_HTTP]
    options["common_http_protocol_options"] = {"idle_timeout": KEEP_ALIVE}
    reader = failure_reader(dialect_for(node).signatures)
    changes = _rewrite_filters(node, run) if rewrites else []
    if splits:
        changes.append(_transfer_guard())
    codec = typed("envoy.filters.http.upstream_codec", f"{_FILTERS}.upstream_codec.v3.UpstreamCodec")
    options["http_filters"] = [reader, *changes, codec]
    if not _is_address(node.host):
        cluster |= {"type": "STRICT_DNS", "dns_lookup_family": "V4_PREFERRED"}
    if node.scheme == "https":
        cluster["transport_socket"] = _tls(node.tls or Tls(), node.host)
    cluster["upstream_connection_options"] = {
        "tcp_keepalive": {"keepalive_probes": 3, "keepalive_time": 15, "keepalive_interval": 5}
    }
    return cluster


def secret(node: NodeConfig, key: str) -> Json:
    """SDS: the `authorization` of a node with a key of its own."""
    resource = typed_config(
        "envoy.extensions.transport_sockets.tls.v3.Secret",
        name=_secret_name(node),
        generic_secret={"secret": {"inline_string": f"Bearer {key}"}},
    )
    return {"resources": [resource]}


def _cluster(name: str, address: Json, protocol: Json, hostname: str = "") -> Json:
    endpoint: Json = {"address": address}
    if hostname:
        endpoint["hostname"] = hostname
    limits = dict.fromkeys(
        ("max_connections", "max_pending_requests", "max_requests", "max_retries"), UNLIMITED
    )
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": CONNECT_TIMEOUT,
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
        },
        "typed_extension_protocol_options": {_HTTP: typed_config(_HTTP, explicit_http_config=protocol)},
    }


def _rewrite_filters(node: NodeConfig, run: RunDir) -> list[Json]:
    """Per attempt: the client's own path and `authorization`, then this node's.

    What an upstream filter writes is still there in the next attempt, on another node. So each node starts
    from what the edge kept in filter state (which, unlike a header, no node ever sees).
    """
    script = f"""function envoy_on_request(handle)
  local headers, kept = handle:headers(), handle:streamInfo():filterState()
  headers:replace(":path", "{node.base_path}" .. kept:get("inferact.path"))
  local authorization = kept:get("inferact.authorization")
  if authorization then headers:replace("authorization", authorization)
  else headers:remove("authorization") end
end
"""
    filters = [
        typed(
            "envoy.filters.http.lua", f"{_FILTERS}.lua.v3.Lua", default_source_code={"inline_string": script}
        )
    ]
    if node.api_key_env:
        filters.append(_credential(node, run))
    return filters


def _transfer_guard() -> Json:
    """The KV of a split request can be fetched once: retries get spaces instead of what leads there.

    An engine that fetched what another has fetched before it would read the KV of other prompts, or die.
    """
    script = f"""function envoy_on_request(handle)
  local headers = handle:headers()
  local bytes = tonumber(headers:get("{headers.TRANSFER}") or "")
  if not bytes or headers:get("{headers.ATTEMPT_COUNT}") == "1" then return end
  local buffer = handle:body()
  local body = buffer:getBytes(0, buffer:length())
  local brace = body:find("{{", 1, true)
  buffer:setBytes(body:sub(1, brace) .. string.rep(" ", bytes) .. body:sub(brace + bytes + 1))
end
"""
    return typed(
        "inferact.transfer_guard",
        f"{_FILTERS}.lua.v3.Lua",
        default_source_code={"inline_string": script},
    )


def _credential(node: NodeConfig, run: RunDir) -> Json:
    """The node's key, from a file: a key in the cluster itself would show in Envoy's /config_dump."""
    source = {"path_config_source": {"path": str(run.secret(node.id))}, "resource_api_version": "V3"}
    generic = typed(
        "envoy.http.injected_credentials.generic",
        "envoy.extensions.http.injected_credentials.generic.v3.Generic",
        credential={"name": _secret_name(node), "sds_config": source},
    )
    return typed(
        "envoy.filters.http.credential_injector",
        f"{_FILTERS}.credential_injector.v3.CredentialInjector",
        overwrite=True,
        credential=generic,
    )


def _secret_name(node: NodeConfig) -> str:
    return f"key:{node.id}"


def _tls(tls: Tls, host: str) -> Json:
    """TLS to a peer whose certificate must name it."""
    name = tls.sni or host
    kind = "IP_ADDRESS" if _is_address(name) else "DNS"
    context: Json = {
        "validation_context": {
            "trusted_ca": {"filename": str(tls.ca_file or _system_ca())},
            "match_typed_subject_alt_names": [{"san_type": kind, "matcher": {"exact": name}}],
        }
    }
    if tls.cert_file and tls.key_file:
        context["tls_certificates"] = [
            {
                "certificate_chain": {"filename": str(tls.cert_file)},
                "private_key": {"filename": str(tls.key_file)},
            }
        ]
    sni = {} if kind == "IP_ADDRESS" else {"sni": name}
    return typed(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context=context,
        **sni,
    )


def _authority(node: NodeConfig) -> str:
    """What the engine sees as `host`: without the port where that is the scheme's own."""
    default = 443 if node.scheme == "https" else 80
    host = f"[{node.host}]" if ":" in node.host else node.host
    return host if node.port == default else f"{host}:{node.port}"


def _system_ca() -> str:
    return next((path for path in _CA_BUNDLES if Path(path).exists()), _CA_BUNDLES[0])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
