"""The configuration: one class a section, attributes named exactly as the keys of the file.

Checks that look at several keys run on the key they blame, and see the keys above it in `info.data`
(where a key is missing because it is itself wrong, they keep quiet).
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from extproc.config.addresses import Endpoint, HostPort, is_loopback, overlap, parse_endpoint
from extproc.config.fields import (
    Backend,
    BatchStrategy,
    Bind,
    BindHost,
    Bytes,
    CachePolicy,
    Count,
    EngineUrl,
    FolderPath,
    HostName,
    Listen,
    LogLevel,
    MetricName,
    Milliseconds,
    ModelName,
    NodeId,
    Percent,
    Port,
    Positive,
    Protocol,
    Ratio,
    Role,
    Transport,
    UrlPath,
    Variable,
    ZmqAddress,
    check_socket_path,
)
from extproc.config.problems import Location
from extproc.hardware import PROFILES, Hardware, HardwareProfile

EXTPROC_SOCKET = "extproc.sock"
ENVOY_ADMIN_HOST = "127.0.0.1"


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class ListenerTls(_Section):
    """Files for mutual TLS on a TCP listener; clients must show a certificate that `ca_file` signed."""

    ca_file: FolderPath
    cert_file: FolderPath
    key_file: FolderPath


class Scheduler(_Section):
    """The service itself: where it listens and its limits."""

    host: BindHost = "0.0.0.0"
    port: Port = 9000
    log_level: LogLevel = LogLevel.INFO
    request_timeout_ms: Milliseconds = 30_000
    admin_host: BindHost = "127.0.0.1"
    admin_port: Port = 9001
    envoy_admin_port: Port = 9901
    run_dir: FolderPath = Path(".inferact")
    extproc_listen: Listen = Field(default_factory=lambda data: data["run_dir"] / EXTPROC_SOCKET)
    xds_listen: Bind | None = None
    extproc_tls: ListenerTls | None = None
    transport: Transport = Transport.GRPC
    max_body_bytes: Bytes = 64 << 20
    max_queue: Count = 10_000
    max_queue_bytes: Bytes = 1 << 30

    @field_validator("run_dir")
    @classmethod
    def _sockets_fit(cls, run_dir: Path) -> Path:
        check_socket_path(run_dir / EXTPROC_SOCKET, "choose a shorter run_dir")
        return run_dir

    @field_validator("admin_port", "envoy_admin_port", "extproc_listen", "xds_listen")
    @classmethod
    def _port_is_free(cls, value: Any, info: ValidationInfo) -> Any:
        key = str(info.field_name)
        mine = _listeners({**info.data, key: value}).get(key)
        for other, taken in _listeners(info.data).items():
            if mine and overlap(mine, taken):
                raise ValueError(f"port {mine.port} is taken by `{other}`; each needs a port of its own")
        return value

    @field_validator("extproc_tls")
    @classmethod
    def _remote_needs_tls(cls, tls: ListenerTls | None, info: ValidationInfo) -> ListenerTls | None:
        for key in ("extproc_listen", "xds_listen"):
            address = info.data.get(key)
            if tls is None and isinstance(address, HostPort) and not is_loopback(address.host):
                needed = "give ca_file, cert_file and key_file, or listen on 127.0.0.1 or a socket path"
                raise ValueError(f"is required, because other machines can reach `{key}`: {needed}")
        return tls


def _listeners(data: Mapping[str, Any]) -> dict[str, HostPort]:
    """Who listens on which TCP address, of the keys known so far."""
    hosts = {
        "port": data.get("host"),
        "admin_port": data.get("admin_host"),
        "envoy_admin_port": ENVOY_ADMIN_HOST,
    }
    listeners = {key: HostPort(host, data[key]) for key, host in hosts.items() if host and key in data}
    grpc = {key: data.get(key) for key in ("extproc_listen", "xds_listen")}
    return listeners | {key: address for key, address in grpc.items() if isinstance(address, HostPort)}


class CustomProfile(_Section):
    """One accelerator that is not in the list: GB/s, TFLOP/s (dense BF16), GB."""

    memory_bandwidth_gbps: Positive
    vram_gb: Positive
    nvlink: StrictBool = False
    compute_tflops: Positive | None = None


class NodeTls(_Section):
    """How an https engine is trusted, and the certificate shown to it."""

    ca_file: FolderPath | None = None
    cert_file: FolderPath | None = None
    key_file: FolderPath | None = None
    sni: HostName | None = None

    @field_validator("key_file")
    @classmethod
    def _certificate_has_key(cls, key_file: Path | None, info: ValidationInfo) -> Path | None:
        if "cert_file" in info.data and (info.data["cert_file"] is None) != (key_file is None):
            raise ValueError("goes with `cert_file`: give both, or neither")
        return key_file


class KvEvents(_Section):
    """Where the engine publishes what its KV cache stores and removes (ZeroMQ)."""

    endpoint: ZmqAddress
    replay_endpoint: ZmqAddress | None = None
    topic: str = ""


class EngineMetrics(_Section):
    """The engine's own names of its metrics."""

    running: MetricName | None = None
    waiting: MetricName | None = None
    kv_used_ratio: MetricName | None = None


class Engine(_Section):
    """What a custom engine offers beside its API; None: it does not say."""

    health_path: UrlPath | None = None
    metrics_path: UrlPath | None = None
    metrics: EngineMetrics = EngineMetrics()
    protocol: Protocol | None = None


class NodeConfig(_Section):
    """One inference engine and what is known of it beforehand."""

    id: NodeId
    hardware: Hardware
    hardware_profile: CustomProfile | None = None
    backend: Backend
    endpoint: EngineUrl
    models: Annotated[
        tuple[ModelName, ...], Field(min_length=1, description="a list of at least one model name")
    ]
    weight: Ratio = 1.0
    gpu_count: Count = 1
    engine: Engine | None = None
    role: Role | None = None
    api_key_env: Variable | None = None
    tls: NodeTls | None = None
    kv_events: KvEvents | None = None
    model_aliases: Annotated[
        Mapping[ModelName, ModelName], Field(description="a mapping of public names to the engine's names")
    ] = {}

    @field_validator("hardware_profile")
    @classmethod
    def _profile_is_for_custom(cls, profile: CustomProfile | None, info: ValidationInfo) -> CustomProfile | None:
        hardware = info.data.get("hardware")
        if profile is None and hardware is Hardware.CUSTOM:
            raise ValueError("is required with `hardware: custom`: memory_bandwidth_gbps, vram_gb, nvlink")
        if profile is not None and hardware not in (None, Hardware.CUSTOM):
            raise ValueError(f"does not go with `hardware: {hardware}`: use `hardware: custom`, or leave it out")
        return profile

    @field_validator("models")
    @classmethod
    def _models_are_unique(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        repeats = repeated(models)
        if repeats:
            raise _faults({(index,): "is in this list already; name it once" for index in repeats})
        return models

    @field_validator("engine")
    @classmethod
    def _engine_is_for_custom(cls, engine: Engine | None, info: ValidationInfo) -> Engine | None:
        backend = info.data.get("backend")
        if engine is not None and backend not in (None, Backend.CUSTOM):
            raise ValueError(f"goes with `backend: custom` only; all of this is known of {backend}")
        return engine

    @field_validator("role")
    @classmethod
    def _half_roles_need_a_protocol(cls, role: Role | None, info: ValidationInfo) -> Role | None:
        if role in (Role.PREFILL, Role.DECODE) and {"backend", "engine"} <= info.data.keys():
            backend = info.data["backend"]
            if _protocol(backend, info.data["engine"]) is None:
                way = "set `engine.protocol`" if backend is Backend.CUSTOM else "use a vllm or sglang node"
                raise ValueError(f"`{role}` needs a prefill/decode protocol, {backend} has none: {way}, or `both`")
        return role

    @field_validator("tls")
    @classmethod
    def _tls_is_for_https(cls, tls: NodeTls | None, info: ValidationInfo) -> NodeTls | None:
        if tls is not None and str(info.data.get("endpoint", "https:")).startswith("http:"):
            raise ValueError("goes with an https:// endpoint only")
        return tls

    @property
    def profile(self) -> HardwareProfile:
        """What the whole node can do: all its GPUs together."""
        custom = self.hardware_profile
        one = HardwareProfile.custom(**custom.model_dump()) if custom else PROFILES[self.hardware]
        return one.scaled(self.gpu_count)

    @cached_property
    def serves(self) -> frozenset[str]:
        """The names clients may ask this node for: its models and its aliases."""
        return frozenset(self.models) | frozenset(self.model_aliases)

    def engine_model(self, public: str) -> str:
        """What the engine calls the model that clients call `public`."""
        return self.model_aliases.get(public, public)

    @property
    def protocol(self) -> Protocol | None:
        """How this node takes part in split requests; None: it cannot."""
        return _protocol(self.backend, self.engine)

    def api_key(self, environ: Mapping[str, str]) -> str | None:
        """The engine's key, read now and kept nowhere; None if the node has none or the variable is empty."""
        return environ.get(self.api_key_env, "").strip() or None if self.api_key_env else None

    @property
    def address(self) -> Endpoint:
        """The endpoint in pieces: scheme, host, port, base_path."""
        return parse_endpoint(self.endpoint)
