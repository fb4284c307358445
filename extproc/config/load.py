"""Loading a configuration file: every mistake at once, each with its line, key and what is allowed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from extproc.config.document import Document, read_document
from extproc.config.doubts import doubts
from extproc.config.explain import explained
from extproc.config.models import Config, repeated_id
from extproc.config.node import NodeConfig, Tls
from extproc.config.pending import pending
from extproc.config.problems import ConfigError, Location, Problem, spelled
from extproc.config.section import repeated


def load_config(
    path: Path,
    environ: Mapping[str, str] | None = None,
    note: Callable[[Problem], None] = lambda _: None,
    serving: bool = True,
) -> Config:
    """Read and check a configuration file. Raises ConfigError with every problem in it.

    With `environ`, as `serving` needs it, the API keys must be set there and the files be usable too; without
    `serving`, that is only noted. `note` is told of each key in a valid file that has no effect yet, and of
    whatever is hardly meant.
    """
    document = read_document(path)
    config = _validate(document, path.absolute().parent)
    unready = () if config is None or environ is None else tuple(_unready(config, environ))
    for location, message in unready if serving else ():
        document.report(location, message)
    if document.problems or config is None:
        raise ConfigError(_in_order(document.problems))
    for location, message in (*doubts(config), *(() if serving else unready)):
        document.report(location, message)
    for each in _in_order((*pending(document), *document.problems)):
        note(each)
    return config


def _in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted(problems, key=lambda problem: problem.line or 0))


def _validate(document: Document, folder: Path) -> Config | None:
    try:
        return Config.model_validate(document.data, context={"folder": folder})
    except ValidationError as error:
        reported = {problem.key for problem in document.problems}
        for location, message in (*explained(error), *_repeated_ids(document.data)):
            if spelled(location) not in reported:
                reported.add(spelled(location))
                document.report(location, message)
    return None


def _repeated_ids(data: object) -> Iterator[tuple[Location, str]]:
    """Equal ids in nodes that are not all valid, where the model itself cannot compare them."""
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if isinstance(nodes, list):
        ids = [node.get("id") if isinstance(node, dict) else None for node in nodes]
        texts = [name if isinstance(name, str) else index for index, name in enumerate(ids)]
        for index, first in repeated(texts).items():
            yield ("nodes", index, "id"), repeated_id(first)


def _unready(config: Config, environ: Mapping[str, str]) -> Iterator[tuple[Location, str]]:
    """What only serving needs: keys in the environment, and files."""
    if in_the_way := _no_folder(config.scheduler.run_dir):
        yield ("scheduler", "run_dir"), f"cannot be made: {in_the_way} is not a folder"
    if config.scheduler.extproc_tls:
        yield from _unreadable(config.scheduler.extproc_tls, ("scheduler", "extproc_tls"))
    for index, node in enumerate(config.nodes):
        if node.api_key_env and (fault := _key_fault(node, environ)):
            message = f"the variable {node.api_key_env}, for the API key of node `{node.id}`, {fault}"
            yield ("nodes", index, "api_key_env"), message
        if node.tls:
            yield from _unreadable(node.tls, ("nodes", index, "tls"))


def _no_folder(path: Path) -> Path | None:
    """What is there instead of the folder, or of one above it."""
    try:
        nearest = next(each for each in (path, *path.parents) if each.exists())
        return None if nearest.is_dir() else nearest
    except OSError:
        return None  # not for this user to see; whoever serves is told


def _key_fault(node: NodeConfig, environ: Mapping[str, str]) -> str | None:
    """Why the node's key cannot be used; never the key."""
    try:
        key = node.api_key(environ)
    except KeyError:
        return "is empty" if node.api_key_env in environ else "is not set"
    return None if key.isascii() and key.isprintable() else "holds characters that no HTTP header can carry"


def _unreadable(tls: Tls, location: Location) -> Iterator[tuple[Location, str]]:
    files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
    for key, path in files.items():
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            yield (*location, key), f"cannot be read: {error.strerror}"
