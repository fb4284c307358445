"""The configuration file: its schema, and loading it with errors that name file, line and key."""

from extproc.config.addresses import HostPort
from extproc.config.fields import Backend, BatchStrategy, CachePolicy, LogLevel, Protocol, Role, Transport
from extproc.config.load import load_config
from extproc.config.models import Batching, Config, KvCache, ListenerTls, Scheduler
from extproc.config.node import CustomProfile, Engine, EngineMetrics, KvEvents, NodeConfig, Tls
from extproc.config.problems import ConfigError, Problem

__all__ = [
    "Backend",
    "BatchStrategy",
    "Batching",
    "CachePolicy",
    "Config",
    "ConfigError",
    "CustomProfile",
    "Engine",
    "EngineMetrics",
    "HostPort",
    "KvCache",
    "KvEvents",
    "ListenerTls",
    "LogLevel",
    "NodeConfig",
    "Problem",
    "Protocol",
    "Role",
    "Scheduler",
    "Tls",
    "Transport",
    "load_config",
]
