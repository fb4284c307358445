"""The configuration: one class a section, attributes named exactly as the keys of the file."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, ValidationInfo, field_validator, model_validator

from extproc.config.addresses import HostPort, is_loopback, is_unspecified, overlap
from extproc.config.fields import (
    BatchStrategy,
    Bind,
    BindHost,
    Bytes,
    CachePolicy,
    Count,
    FolderPath,
    Listen,
    LogLevel,
    Milliseconds,
    Percent,
    Port,
    Role,
    Transport,
    check_socket_path,
)
from extproc.config.node import NodeConfig, Tls
from extproc.config.problems import Location
from extproc.config.roles import one_role, roles
from extproc.config.section import Section, faults, repeated

EXTPROC_SOCKET = "extproc.sock"
ENVOY_ADMIN_HOST = "127.0.0.1"


class ListenerTls(Tls):
    """Mutual TLS on a TCP listener: both sides show a certificate that `ca_file` signed."""

    ca_file: FolderPath
    """The authority that signed the certificate of the other side."""
    cert_file: FolderPath
    """The certificate of this side."""
    key_file: FolderPath
    """Its key."""


class Scheduler(Section):
    """The service itself: where it listens and its limits."""

    port: Port = 9000
    """Where Envoy listens: the one public address."""
    host: BindHost = "0.0.0.0"
    """The address of that port: one of this machine, 0.0.0.0 for all, or localhost."""
    log_level: LogLevel = LogLevel.INFO
    """How much the service logs."""
    request_timeout_ms: Milliseconds = 30_000
    """An answer must be complete, or a stream begin, within it, waiting included; also a stream's longest
    silence."""
    admin_host: BindHost = "127.0.0.1"
    """Where the admin app listens; Envoy leads to it, too."""
    admin_port: Port = 9001
    """The admin app's port."""
    envoy_admin_port: Port = 9901
    """Envoy's own admin, always on 127.0.0.1."""
    run_dir: FolderPath = Path(".inferact")
    """Sockets, Envoy's files and drains, for the service and Envoy alone."""
    extproc_listen: Listen | None = None
    """Where the service listens for Envoy; default: `extproc.sock` in `run_dir`."""
    xds_listen: Bind | None = None
    """Where the service will deliver configuration to Envoys on other machines."""
    extproc_tls: ListenerTls | None = None
    """Mutual TLS at `extproc_listen`; required if other machines can reach it."""
    transport: Transport = Transport.GRPC
    """How the service hears Envoy: through the gRPC library, or with far less CPU time by its own HTTP/2."""
    max_body_bytes: Bytes = 64 << 20
    """The largest body of a request; Envoy keeps to it from 1 MiB up, the service below."""
    max_queue: Count = 10_000
    """The most requests that wait for a node; past it clients get 429."""
    max_queue_bytes: Bytes = 1 << 30
    """The most bytes that their bodies have together; past it clients get 429."""

    @field_validator("run_dir")
    @classmethod
    def _sockets_fit(cls, run_dir: Path) -> Path:
        check_socket_path(run_dir / EXTPROC_SOCKET, "choose a shorter run_dir")
        return run_dir

    @field_validator("extproc_listen")
    @classmethod
    def _envoy_can_connect(
        cls, listen: Path | HostPort | None, info: ValidationInfo
    ) -> Path | HostPort | None:
        """Envoy connects to this very address, and from the same machine to the admin app."""
        if not isinstance(listen, HostPort):
            return listen
        if is_unspecified(listen.host):
            raise ValueError(f"must be one address, to which Envoy can connect: {listen.host} is none")
        admin = info.data.get("admin_host")
        if admin and not is_loopback(listen.host) and (is_loopback(admin) or is_unspecified(admin)):
            reason = f"an Envoy that comes to {listen.host} cannot reach the admin app at {admin}"
            raise ValueError(f"needs another `admin_host`, such as {listen.host}: {reason}")
        return listen

    @field_validator("extproc_tls")
    @classmethod
    def _remote_needs_tls(cls, tls: ListenerTls | None, info: ValidationInfo) -> ListenerTls | None:
        for key in ("extproc_listen", "xds_listen"):
            address = info.data.get(key)
            if tls is None and isinstance(address, HostPort) and not is_loopback(address.host):
                needed = "give ca_file, cert_file and key_file, or listen on 127.0.0.1 or a socket path"
                raise ValueError(f"is required, because other machines can reach `{key}`: {needed}")
        return tls

    @model_validator(mode="after")
    def _ports_are_their_own(self) -> Self:
        """Of two keys that clash, the one to blame is written in the file, and the later one of two such."""
        for (key, mine), (later, other) in combinations(listeners(dict(self)).items(), 2):
            if overlap(mine, other):
                written = later in self.model_fields_set or key not in self.model_fields_set
                blamed, taker = (later, key) if written else (key, later)
                taken = f"port {mine.port} is taken by `{taker}`"
                default = "" if taker in self.model_fields_set else ", by default"
                raise faults({(blamed,): f"{taken}{default}; each needs a port of its own"})
        return self

    @property
    def extproc_address(self) -> Path | HostPort:
        """Where Envoy reaches the service: a Unix socket, or a TCP address."""
        return self.extproc_listen or self.run_dir / EXTPROC_SOCKET


def listeners(data: Mapping[str, Any]) -> dict[str, HostPort]:
    """Who listens on which TCP address, by the values of a `Scheduler`."""
    hosts = {
        "port": data["host"],
        "admin_port": data["admin_host"],
        "envoy_admin_port": ENVOY_ADMIN_HOST,
    }
    http = {key: HostPort(host, data[key]) for key, host in hosts.items()}
    grpc = {key: data[key] for key in ("extproc_listen", "xds_listen")}
    return http | {key: address for key, address in grpc.items() if isinstance(address, HostPort)}


class KvCache(Section):
    """How KV cache reuse steers routing."""

    policy: CachePolicy = CachePolicy.PREFIX_AWARE
    """Whether cached prefixes decide: always, never, or while enough prompt tokens are cached."""
    pin_system_prompts: StrictBool = True
    """Whether system prompts stay known of a node when other blocks of it are forgotten."""
    eviction_threshold_pct: Percent = 90
    """Nodes whose KV cache is fuller than this come after others."""


class Batching(Section):
    """How requests are grouped per node; `max_batch_size` None: the engine decides."""

    strategy: BatchStrategy = BatchStrategy.CONTINUOUS
    """`continuous`: requests join at any time; `static`: whole batches go to idle nodes."""
    max_batch_size: Count | None = None
    """The most requests in flight on a node; default: as many as its engine shows that it can. Required
    with `static`."""
    prefill_decode_split: StrictBool = False
    """Whether prefill and decode of a request go to separate nodes."""
    max_wait_ms: Milliseconds = 1000
    """How long a static batch may fill."""

    @field_validator("max_batch_size")
    @classmethod
    def _static_needs_a_size(cls, size: int | None, info: ValidationInfo) -> int | None:
        if size is None and info.data.get("strategy") is BatchStrategy.STATIC:
            raise ValueError("is required with `strategy: static`: the number of requests that make a batch")
        return size


class Config(Section):
    """The whole configuration, valid in itself."""

    scheduler: Scheduler = Scheduler()
    """The service itself."""
    nodes: Annotated[tuple[NodeConfig, ...], Field(min_length=1, description="a list of at least one node")]
    """The engines."""
    kv_cache: KvCache = KvCache()
    """How the reuse of KV caches steers routing."""
    batching: Batching = Batching()
    """How requests are grouped."""

    @field_validator("scheduler", "kv_cache", "batching", mode="before")
    @classmethod
    def _empty_means_defaults(cls, section: object) -> object:
        return {} if section is None else section

    @field_validator("nodes")
    @classmethod
    def _ids_are_unique(cls, nodes: tuple[NodeConfig, ...]) -> tuple[NodeConfig, ...]:
        repeats = repeated(node.id for node in nodes)
        if repeats:
            raise faults({(index, "id"): repeated_id(first) for index, first in repeats.items()})
        return nodes

    @field_validator("batching")
    @classmethod
    def _batches_can_run(cls, batching: Batching, info: ValidationInfo) -> Batching:
        wrong: dict[Location, str] = {}
        scheduler = info.data.get("scheduler")
        if scheduler and batching.strategy is BatchStrategy.STATIC:
            limit = scheduler.request_timeout_ms
            if batching.max_wait_ms >= limit:
                advice = f"must be under `scheduler.request_timeout_ms` ({limit})"
                wrong["max_wait_ms",] = f"{advice}, or requests in a batch that never fills all time out"
        if batching.prefill_decode_split and (gaps := _role_gaps(info.data.get("nodes", ()))):
            wrong["prefill_decode_split",] = f"needs both roles for every model: {'; '.join(gaps)}"
        if wrong:
            raise faults(wrong)
        return batching

    @property
    def models(self) -> tuple[str, ...]:
        """Every name that clients may ask for, sorted."""
        return tuple(sorted(frozenset().union(*(node.serves for node in self.nodes))))

    def effective(self) -> dict[str, Any]:
        """Everything in force, defaults included, as plain data that a file could hold; never a key."""
        data = self.model_dump(mode="json", exclude_none=True)
        data["scheduler"]["extproc_listen"] = str(self.scheduler.extproc_address)
        if self.batching.prefill_decode_split:
            in_force = roles(self.nodes)
            for node in data["nodes"]:
                node["role"] = (one_role(in_force, node["id"]) or Role.BOTH).value
        return data


def repeated_id(first: int) -> str:
    """What to say of a node whose id an earlier node has."""
    return f"is the id of nodes[{first}] already; ids must be unique"


def _role_gaps(nodes: tuple[NodeConfig, ...]) -> list[str]:
    """The models that no prefill or no decode node serves, once any node has a role (absent: both)."""
    if all(node.role is None for node in nodes):
        return []
    gaps = []
    for model in sorted(frozenset().union(*(node.serves for node in nodes))):
        roles = {node.role or Role.BOTH for node in nodes if model in node.serves}
        missing = [role for role in (Role.PREFILL, Role.DECODE) if roles.isdisjoint({role, Role.BOTH})]
        gaps += [f"`{model}` has no node with role {role} or both" for role in missing]
    return gaps
