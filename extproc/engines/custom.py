"""An engine of the user's own: it says of itself what `nodes[].engine` names."""

from extproc.config.node import Engine
from extproc.engines.dialect import Dialect, Names


def dialect(engine: Engine) -> Dialect:
    """The dialect that a node's `engine` section describes.

    Without `health_path` the list of models is asked for, which the OpenAI API has; metrics are only
    read when one has a name.
    """
    metrics = engine.metrics
    named = metrics.running or metrics.waiting or metrics.kv_used_ratio
    return Dialect(
        engine="the custom engine",
        health_path=engine.health_path or "/v1/models",
        metrics_path=(engine.metrics_path or "/metrics") if named else None,
        running=_names(metrics.running),
        waiting=_names(metrics.waiting),
        kv_used_ratio=_names(metrics.kv_used_ratio),
    )


def _names(name: str | None) -> Names:
    return (name,) if name else ()
