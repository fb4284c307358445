"""What a valid configuration holds that is allowed, and hardly meant."""

from collections.abc import Iterator

from extproc.config.addresses import HostPort, is_unspecified, port_is_written
from extproc.config.fields import BatchStrategy, Role
from extproc.config.models import Config, listeners
from extproc.config.problems import Location
from extproc.config.roles import roles
from extproc.config.section import repeated

_SHORT_TIMEOUT_MS = 1000
_HERE = ("127.0.0.1", "::1", "localhost")


def doubts(config: Config) -> Iterator[tuple[Location, str]]:
    """Where each is, and what will come of it."""
    timeout_ms = config.scheduler.request_timeout_ms
    if timeout_ms < _SHORT_TIMEOUT_MS:
        said = f"gives requests {timeout_ms} ms in all; few answers are complete by then"
        yield ("scheduler", "request_timeout_ms"), said
    yield from _split(config)
    twins = repeated((node.scheme, node.host, node.port, node.base_path) for node in config.nodes)
    for index, node in enumerate(config.nodes):
        place: Location = ("nodes", index, "endpoint")
        if index in twins:
            first = config.nodes[twins[index]].id
            yield place, f"is that of node `{first}`: one engine would be taken for two"
        if not port_is_written(node.endpoint):
            yield place, f"names no port: {node.port} is assumed"
        if key := _our_listener(config, HostPort(node.host, node.port)):
            yield place, f"is Inferact's own address (`scheduler.{key}`), not an engine's"


def _split(config: Config) -> Iterator[tuple[Location, str]]:
    """Roles that nobody asks for, and models whose requests cannot be split."""
    if not config.batching.prefill_decode_split:
        for index, node in enumerate(config.nodes):
            if node.role in (Role.PREFILL, Role.DECODE):
                said = "has no effect without `batching.prefill_decode_split: true`"
                yield ("nodes", index, "role"), said
        return
    if config.batching.strategy is BatchStrategy.STATIC:
        yield ("batching", "prefill_decode_split"), "has no effect with `strategy: static`"
        return
    whole = [
        f"`{model}`"
        for model, by_node in roles(config.nodes).items()
        if sum(node.id in by_node and node.protocol is not None for node in config.nodes) < 2
    ]
    if whole:
        said = f"needs two nodes with a prefill/decode protocol; without them {', '.join(whole)} is not split"
        yield ("batching", "prefill_decode_split"), said


def _our_listener(config: Config, engine: HostPort) -> str | None:
    """The key of the listener of ours that a request to the engine would reach."""
    for key, mine in listeners(dict(config.scheduler)).items():
        reached = mine.host == engine.host or (
            engine.host in _HERE and (is_unspecified(mine.host) or mine.host in _HERE)
        )
        if mine.port == engine.port and reached:
            return key
    return None
