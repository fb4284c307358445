"""Which dialect a node speaks."""

from extproc.config.fields import Backend
from extproc.config.node import Engine, NodeConfig
from extproc.engines import custom, llamacpp, sglang, tgi, vllm
from extproc.engines.dialect import Dialect

_DIALECTS = {
    Backend.VLLM: vllm.DIALECT,
    Backend.TGI: tgi.DIALECT,
    Backend.SGLANG: sglang.DIALECT,
    Backend.LLAMACPP: llamacpp.DIALECT,
}


def dialect_for(node: NodeConfig) -> Dialect:
    """The dialect of a node's engine."""
    return _DIALECTS.get(node.backend) or custom.dialect(node.engine or Engine())
