"""Which half of split requests each node takes, as the file says, or as its hardware suggests."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from extproc.config.fields import Protocol, Role
from extproc.config.node import NodeConfig

PREFILL_SHARE: Final = 3
"""Without roles in the file, one of so many nodes prefills: prompts take less time than answers."""

Roles = Mapping[str, Mapping[str, Role]]
"""By model and node id."""


def roles(nodes: Sequence[NodeConfig]) -> Roles:
    """What the nodes of each model are, once requests are split.

    Where no node has a role, the fastest third of a model's vLLM nodes prefills: at least one, and never all.
    """
    if any(node.role is not None for node in nodes):
        return {
            model: {node.id: node.role or Role.BOTH for node in nodes if model in node.serves}
            for model in _models(nodes)
        }
    return {model: _derived([node for node in nodes if model in node.serves]) for model in _models(nodes)}


def one_role(roles: Roles, node_id: str) -> Role | None:
    """The role that a node has for each of its models; `None` where they differ."""
    held = {by_node[node_id] for by_node in roles.values() if node_id in by_node}
    return held.pop() if len(held) == 1 else None


def _derived(nodes: Sequence[NodeConfig]) -> Mapping[str, Role]:
    """An engine of SGLang's is told at its start which half it takes, so none is derived for it."""
    able = [node for node in nodes if node.protocol is Protocol.VLLM]
    able.sort(key=lambda node: -node.profile.compute_tflops)
    prefilling = min(max(len(able) // PREFILL_SHARE, 1), len(able) - 1)
    derived = dict.fromkeys((node.id for node in nodes), Role.BOTH)
    if prefilling > 0:
        derived |= dict.fromkeys((node.id for node in able[:prefilling]), Role.PREFILL)
        derived |= dict.fromkeys((node.id for node in able[prefilling:]), Role.DECODE)
    return derived


def _models(nodes: Iterable[NodeConfig]) -> Iterable[str]:
    return sorted(frozenset().union(*(node.serves for node in nodes)))
