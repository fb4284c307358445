"""The `nodes` of the configuration."""

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictBool, ValidationInfo, field_validator

from extproc.config.addresses import Endpoint, parse_endpoint
from extproc.config.fields import (
    Backend,
    Count,
    EngineUrl,
    FolderPath,
    HostName,
    MetricName,
    ModelName,
    NodeId,
    Positive,
    Protocol,
    Ratio,
    Role,
    UrlPath,
    Variable,
    ZmqAddress,
)
from extproc.config.section import Section, faults, repeated
from extproc.hardware import PROFILES, Hardware, HardwareProfile


class CustomProfile(Section):
    """One accelerator that is not in the list: GB/s, TFLOP/s (dense BF16), GB."""

    memory_bandwidth_gbps: Positive
    """GB/s."""
    vram_gb: Positive
    """GB."""
    nvlink: StrictBool = False
    """Whether the accelerators of the node are connected by NVLink."""
    compute_tflops: Positive | None = None
    """Dense BF16 TFLOP/s; default: a fifth of the bandwidth."""


class Tls(Section):
    """How the other side is trusted (None: as the system does), and the certificate shown to it."""

    ca_file: FolderPath | None = None
    """The authority to trust; default: those that the system trusts."""
    cert_file: FolderPath | None = None
    """The certificate to show; default: none."""
    key_file: FolderPath | None = None
    """Its key."""
    sni: HostName | None = None
    """The name to ask for; default: the host of the address."""

    @field_validator("key_file")
    @classmethod
    def _certificate_has_key(cls, key_file: Path | None, info: ValidationInfo) -> Path | None:
        if "cert_file" in info.data and (info.data["cert_file"] is None) != (key_file is None):
            raise ValueError("goes with `cert_file`: give both, or neither")
        return key_file


class KvEvents(Section):
    """Where the engine publishes what its KV cache stores and removes (ZeroMQ)."""

    endpoint: ZmqAddress
    """Where the engine publishes."""
    replay_endpoint: ZmqAddress | None = None
    """Where it repeats what was missed."""
    topic: str = ""
    """The topic that it publishes under."""


class EngineMetrics(Section):
    """The engine's own names of its metrics."""

    running: MetricName | None = None
    """Requests that run."""
    waiting: MetricName | None = None
    """Requests that wait."""
    kv_used_ratio: MetricName | None = None
    """The part of its KV cache that is used, 0.0 to 1.0."""


class Engine(Section):
    """What a custom engine offers beside its API; None: it does not say."""

    health_path: UrlPath | None = None
    """200 while the engine can serve; default: /v1/models."""
    metrics_path: UrlPath | None = None
    """Metrics in Prometheus' format; default: /metrics."""
    metrics: EngineMetrics = EngineMetrics()
    """Its own names of them."""
    protocol: Protocol | None = None
    """How it hands KV blocks from prefill to decode."""


class NodeConfig(Section):
    """One inference engine and what is known of it beforehand."""

    id: NodeId
    """Unique: 1 to 64 of `A-Z a-z 0-9 . _ -`."""
    hardware: Hardware
    """The accelerator, whose bandwidth, compute and memory costs are estimated by."""
    hardware_profile: CustomProfile | None = None
    """The same of hardware that is not in the list; required with `hardware: custom`. Of one accelerator."""
    backend: Backend
    """The engine, whose metrics and errors are then understood."""
    endpoint: EngineUrl
    """The engine's root, without /v1; a base path is kept."""
    models: Annotated[
        tuple[ModelName, ...], Field(min_length=1, description="a list of at least one model name")
    ]
    """What clients may ask it for; names as the engine knows them."""
    weight: Ratio = 1.0
    """Its part of the share that its speed would give it; 0: only where no other node is left."""
    gpu_count: Count = 1
    """Accelerators that work as one engine."""
    engine: Engine | None = None
    """What a custom engine offers; only with `backend: custom`."""
    role: Role | None = None
    """Which half of a split request it takes."""
    api_key_env: Variable | None = None
    """The variable that holds the engine's key; default: the client's `authorization` passes."""
    tls: Tls | None = None
    """Only with an https endpoint."""
    kv_events: KvEvents | None = None
    """Where a vLLM publishes what its KV cache stores and removes: [kv-events.md](kv-events.md)."""
    model_aliases: Annotated[
        Mapping[ModelName, ModelName], Field(description="a mapping of public names to the engine's names")
    ] = {}
    """Other names that clients may ask for, each with the engine's own name."""

    @field_validator("hardware_profile")
    @classmethod
    def _profile_is_for_custom(
        cls, profile: CustomProfile | None, info: ValidationInfo
    ) -> CustomProfile | None:
        hardware = info.data.get("hardware")
        if profile is None and hardware is Hardware.CUSTOM:
            raise ValueError("is required with `hardware: custom`: memory_bandwidth_gbps, vram_gb, nvlink")
        if profile is not None and hardware not in (None, Hardware.CUSTOM):
            raise ValueError(
                f"does not go with `hardware: {hardware}`: use `hardware: custom`, or leave it out"
            )
        return profile

    @field_validator("models")
    @classmethod
    def _models_are_unique(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        repeats = repeated(models)
        if repeats:
            raise faults({(index,): "is in this list already; name it once" for index in repeats})
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
                raise ValueError(
                    f"`{role}` needs a prefill/decode protocol, {backend} has none: {way}, or `both`"
                )
        return role

    @field_validator("tls")
    @classmethod
    def _tls_is_for_https(cls, tls: Tls | None, info: ValidationInfo) -> Tls | None:
        endpoint = info.data.get("endpoint")
        if tls is not None and endpoint and parse_endpoint(endpoint).scheme != "https":
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

    @property
    def protocol(self) -> Protocol | None:
        """How the engine hands KV blocks from prefill to decode; `None`: it does not."""
        return _protocol(self.backend, self.engine)

    def engine_model(self, public: str) -> str:
        """What the engine calls the model that clients call `public`."""
        return self.model_aliases.get(public, public)

    def api_key(self, environ: Mapping[str, str] = os.environ) -> str:
        """The engine's key, read now and kept nowhere. Raises KeyError if there is none."""
        key = environ.get(self.api_key_env or "", "").strip()
        if not key:
            raise KeyError(f"node {self.id} has no API key in its environment variable")
        return key

    @cached_property
    def _endpoint(self) -> Endpoint:
        return parse_endpoint(self.endpoint)

    @property
    def scheme(self) -> str:
        """http or https."""
        return self._endpoint.scheme

    @property
    def host(self) -> str:
        """The engine's host name or IP address (IPv6 without brackets)."""
        return self._endpoint.host

    @property
    def port(self) -> int:
        """The engine's port, also where the endpoint leaves it out."""
        return self._endpoint.port

    @property
    def base_path(self) -> str:
        """What goes before /v1 in a request's path: empty, or such as /engine-a."""
        return self._endpoint.base_path


def _protocol(backend: Backend, engine: Engine | None) -> Protocol | None:
    known = {Backend.VLLM: Protocol.VLLM, Backend.SGLANG: Protocol.SGLANG}
    return engine.protocol if engine else known.get(backend)
