"""Addresses as people write them: `host:port`, and the URL of an engine.

The errors raised here never repeat the text they are about: it may hold a password.
"""

import re
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

_VISIBLE_ASCII = re.compile(r"[!-~]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?")
_HOST_PORT = re.compile(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>[0-9]{1,5})")
_BASE_PATH = re.compile(r"(/[A-Za-z0-9._~%@:+=,-]+)*")
_API_PATH = re.compile(r"/v1(/(chat/)?completions)?$")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LAST_PORT = 65535


class HostPort(NamedTuple):
    """A host (name or IP address, IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Endpoint(NamedTuple):
    """The pieces of an engine's URL; `base_path` is empty or starts with `/` and does not end with one."""

    scheme: str
    host: str
    port: int
    base_path: str


def parse_host_port(text: str) -> HostPort:
    """Read `host:port` or `[ipv6]:port`. Raises ValueError."""
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ValueError("must be host:port (an IPv6 address in brackets: [::1]:9002)")
    port = int(match["port"])
    if not 1 <= port <= _LAST_PORT:
        raise ValueError(f"must have a port from 1 to {_LAST_PORT}")
    return HostPort(_checked_host(match["ipv6"] or match["host"]), port)


def parse_endpoint(text: str) -> Endpoint:
    """Read an engine's root URL, with or without a base path. Raises ValueError."""
    try:
        if not _VISIBLE_ASCII.fullmatch(text):
            raise ValueError
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        raise ValueError("must be a URL such as http://10.0.0.5:8000") from None
    if url.scheme not in _DEFAULT_PORTS:
        raise ValueError("must start with http:// or https://: write http:// in front of it")
    if "@" in url.netloc:
        raise ValueError("must not hold a user or password: name the variable with the key in api_key_env")
    if "?" in text or "#" in text:
        raise ValueError("must not hold a query or a fragment (`?` or `#`)")
    if not host:
        raise ValueError(f"must name a host after {url.scheme}://")
    if port == 0:
        raise ValueError(f"must have a port from 1 to {_LAST_PORT}")
    return Endpoint(url.scheme, _checked_host(host), port or _DEFAULT_PORTS[url.scheme], _base_path(url.path))


def port_is_written(endpoint: str) -> bool:
    """Whether a valid endpoint names its port, and does not leave it to the scheme."""
    return urlsplit(endpoint).port is not None


def bind_address(host: str) -> str:
    """An IP address to listen on; `localhost` becomes 127.0.0.1. Raises ValueError."""
    try:
        return "127.0.0.1" if host == "localhost" else str(ip_address(host))
    except ValueError:
        raise ValueError("must be an IP address of this machine, 0.0.0.0 for all, or localhost") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the IP address."""
    return ip_address(host).is_loopback


def is_unspecified(host: str) -> bool:
    """Whether the IP address (0.0.0.0 or ::) stands for all of this machine: to listen on, not to reach."""
    return ip_address(host).is_unspecified


def overlap(one: HostPort, other: HostPort) -> bool:
    """Whether two listeners, given by IP address, would want the same socket."""
    if one.port != other.port:
        return False
    return one.host == other.host or any(is_unspecified(each.host) for each in (one, other))


def _checked_host(host: str) -> str:
    if ":" in host and "%" in host:
        raise ValueError("must not hold a zone (`%...`): it means something on one machine only")
    if ":" in host or not host.strip("0123456789."):
        try:
            ip_address(host)
        except ValueError:
            raise ValueError("must name a valid IP address or host") from None
    elif not _HOST_NAME.fullmatch(host):
        raise ValueError("must name a host (letters, digits, `.`, `-`, `_`) or an IP address")
    return host


def _base_path(path: str) -> str:
    path = path.removesuffix("/")
    if _API_PATH.search(path):
        raise ValueError("must be the engine's root, without /v1: requests already carry it")
    if not _BASE_PATH.fullmatch(path):
        raise ValueError("must have a plain base path such as /engine-a, or none")
    return path
