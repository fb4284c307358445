"""The kinds of value a configuration holds: enumerations, and text, numbers and paths with their limits.

A description says what is allowed; error messages are made of it. Validators raise ValueError with the
whole advice instead, and never repeat a value that may be a secret.
"""

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictFloat,
    StrictInt,
    ValidationInfo,
)

from extproc.config.addresses import HostPort, bind_address, parse_endpoint, parse_host_port

_DAY_MS = 86_400_000
_MAX_SOCKET_PATH_BYTES = 107
_NODE_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,127}")


class LogLevel(StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"


class Transport(StrEnum):
    """How Envoy and the service talk."""

    GRPC = "grpc"
    LEAN = "lean"


class Backend(StrEnum):
    """The inference engines whose dialect is known."""

    VLLM = "vllm"
    TGI = "tgi"
    CUSTOM = "custom"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"


class Protocol(StrEnum):
    """How a prefill node hands its KV blocks to a decode node."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Role(StrEnum):
    """Which half of a split request a node takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class CachePolicy(StrEnum):
    """How KV cache reuse steers routing."""

    LRU = "lru"
    PREFIX_AWARE = "prefix-aware"
    ADAPTIVE = "adaptive"


class BatchStrategy(StrEnum):
    """How requests are grouped per node."""

    CONTINUOUS = "continuous"
    STATIC = "static"


def check_socket_path(path: Path, remedy: str) -> None:
    """Raise ValueError, with the remedy, if the operating system cannot make a Unix socket of that name."""
    length = len(os.fsencode(path))
    if length > _MAX_SOCKET_PATH_BYTES:
        limit = f"at most {_MAX_SOCKET_PATH_BYTES} are possible"
        raise ValueError(f"makes a socket path of {length} bytes, {limit}; {remedy}")


def _from_folder(path: Path, info: ValidationInfo) -> Path:
    try:
        path = path.expanduser()
    except RuntimeError:
        raise ValueError("begins with a `~` that names no user with a home") from None
    return info.context["folder"] / path if info.context else path


def _bind(value: object) -> HostPort:
    if isinstance(value, HostPort):
        return value
    if not isinstance(value, str):
        raise ValueError("must be host:port, such as 10.0.0.1:9002")
    host, port = parse_host_port(value)
    return HostPort(bind_address(host), port)


def _listen(value: object, info: ValidationInfo) -> Path | HostPort:
    if isinstance(value, str) and ("/" in value or value.endswith(".sock")):
        value = _from_folder(Path(value), info)
    if isinstance(value, Path):
        check_socket_path(value, "choose a shorter one, or leave it out and choose a short run_dir")
        return value
    try:
        return _bind(value)
    except ValueError as error:
        raise ValueError(f"{error}; or a socket path with a `/` in it") from None


def _node_id(text: str) -> str:
    if not _NODE_ID.fullmatch(text):
        raise ValueError("must be 1 to 64 of the characters A-Z a-z 0-9 `.` `_` `-`, and not `.` or `..`")
    return text


def _model_name(text: str) -> str:
    if not text or text != text.strip():
        raise ValueError("must be the name of a model, without spaces around it")
    return text


def _engine_url(text: str) -> str:
    parse_endpoint(text)
    return text.removesuffix("/")


def _variable(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        advice = "the value is not shown, because it may be a key"
        raise ValueError(
            f"must be the NAME of an environment variable (A-Z 0-9 _) that holds the key; {advice}"
        )
    return text


def _zmq_address(text: str) -> str:
    if not text.startswith("tcp://"):
        raise ValueError("must be tcp://host:port")
    if text.startswith("tcp://*"):
        raise ValueError("must name the engine's host: `*` only makes sense in the engine's own settings")
    parse_host_port(text.removeprefix("tcp://"))
    return text


Port = Annotated[StrictInt, Field(ge=1, le=65535, description="a port number from 1 to 65535")]
Count = Annotated[StrictInt, Field(ge=1, le=1_000_000, description="a whole number from 1 to 1000000")]
Bytes = Annotated[StrictInt, Field(ge=1, le=1 << 40, description="a whole number of bytes, at least 1")]
Milliseconds = Annotated[
    StrictInt, Field(ge=1, le=_DAY_MS, description=f"a whole number of milliseconds from 1 to {_DAY_MS}")
]
Percent = Annotated[StrictInt, Field(ge=0, le=100, description="a whole number from 0 to 100")]
Ratio = Annotated[StrictFloat, Field(ge=0, le=1, description="a number from 0.0 to 1.0")]
Positive = Annotated[StrictFloat, Field(gt=0, le=1e9, description="a number above 0")]

BindHost = Annotated[str, AfterValidator(bind_address), Field(description="an IP address to listen on")]
Bind = Annotated[
    HostPort, PlainValidator(_bind), PlainSerializer(str), Field(description="an address IP:PORT")
]
Listen = Annotated[
    Path | HostPort,
    PlainValidator(_listen),
    PlainSerializer(str),
    Field(description="a socket path, or an address IP:PORT"),
]
FolderPath = Annotated[Path, AfterValidator(_from_folder), Field(description="a path")]

NodeId = Annotated[str, AfterValidator(_node_id), Field(description="text that names the node")]
ModelName = Annotated[str, AfterValidator(_model_name), Field(description="the name of a model")]
EngineUrl = Annotated[
    str, AfterValidator(_engine_url), Field(description="the http(s) URL of the inference engine")
]
Variable = Annotated[
    str,
    AfterValidator(_variable),
    Field(description="the name of an environment variable that holds the key"),
]
ZmqAddress = Annotated[str, AfterValidator(_zmq_address), Field(description="an address tcp://host:port")]
UrlPath = Annotated[str, Field(pattern=r"^/[!-~]*$", description="a path that starts with `/`")]
MetricName = Annotated[
    str, Field(pattern=r"^[A-Za-z_:][A-Za-z0-9_:]*$", description="the name of a Prometheus metric")
]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", description="a host name")]
