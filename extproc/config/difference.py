"""What differs between the configuration in force and a new one, and what of it needs a restart."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from extproc.config.models import Config
from extproc.config.node import NodeConfig

NEEDS_RESTART: Final = frozenset(
    (
        *("port", "host", "admin_host", "admin_port", "envoy_admin_port", "run_dir", "transport"),
        *("extproc_listen", "extproc_tls", "xds_listen"),
    )
)
"""Keys of `scheduler` that were used up when the service and Envoy started."""
_IN_PLACE: Final = frozenset({"weight", "role"})
_IN_PLACE_WITHOUT_EVENTS: Final = _IN_PLACE | {"models", "model_aliases"}


class NodeChange(msgspec.Struct, frozen=True):
    """A node of which some keys differ. `starts_anew`: it is taken for another engine, not known yet."""

    node: str
    keys: tuple[str, ...]
    starts_anew: bool


class Setting(msgspec.Struct, frozen=True):
    """A key outside `nodes` whose value, given or by default, differs."""

    key: str
    old: Any
    new: Any


class Difference(msgspec.Struct, frozen=True):
    """All of it; in `needs_restart` is what a reload leaves as it was."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[NodeChange, ...] = ()
    settings: tuple[Setting, ...] = ()
    needs_restart: tuple[Setting, ...] = ()

    def __bool__(self) -> bool:
        return any(msgspec.structs.astuple(self))

    def __str__(self) -> str:
        """In one line."""
        changed = [f"{change.node} ({', '.join(change.keys)})" for change in self.changed]
        parts = {
            "added": self.added,
            "removed": self.removed,
            "changed": changed,
            "set": [setting.key for setting in self.settings],
            "not before a restart": [setting.key for setting in self.needs_restart],
        }
        said = [f"{what}: {', '.join(names)}" for what, names in parts.items() if names]
        return "; ".join(said)


def difference(old: Config, new: Config) -> Difference:
    """What a reload would change."""
    before, after = _by_id(old), _by_id(new)
    both = [(before[name], after[name]) for name in after if name in before]
    settings = list(_settings(old, new))
    return Difference(
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        changed=tuple(_change(*pair) for pair in both if pair[0] != pair[1]),
        settings=tuple(setting for setting in settings if not _needs_restart(setting)),
        needs_restart=tuple(filter(_needs_restart, settings)),
    )


def applicable(old: Config, new: Config) -> Config:
    """The new configuration, but for what needs a restart."""
    kept = {key: getattr(old.scheduler, key) for key in NEEDS_RESTART}
    return new.model_copy(update={"scheduler": new.scheduler.model_copy(update=kept)})


def starts_anew(old: NodeConfig, new: NodeConfig) -> bool:
    """Whether a changed node must be taken for another engine, with another cache."""
    in_place = _IN_PLACE if old.kv_events else _IN_PLACE_WITHOUT_EVENTS  # keys of events depend on models
    return not in_place.issuperset(_differing(old, new))


def _change(old: NodeConfig, new: NodeConfig) -> NodeChange:
    return NodeChange(new.id, tuple(_differing(old, new)), starts_anew(old, new))


def _differing(old: NodeConfig, new: NodeConfig) -> Iterator[str]:
    return (key for key in NodeConfig.model_fields if getattr(old, key) != getattr(new, key))


def _settings(old: Config, new: Config) -> Iterator[Setting]:
    before, after = (config.model_dump(mode="json", exclude={"nodes"}) for config in (old, new))
    for section, values in after.items():
        for key, value in values.items():
            if before[section][key] != value:
                yield Setting(f"{section}.{key}", before[section][key], value)


def _needs_restart(setting: Setting) -> bool:
    section, _, key = setting.key.partition(".")
    return section == "scheduler" and key in NEEDS_RESTART


def _by_id(config: Config) -> Mapping[str, NodeConfig]:
    return {node.id: node for node in config.nodes}
