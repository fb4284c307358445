"""What a simulated engine is told to be."""

from dataclasses import dataclass

from extproc.hardware import PROFILES, Hardware, HardwareProfile, kv_capacity_tokens, model_shape
from extproc.simulator.blocks import BLOCK_TOKENS
from extproc.simulator.faults import Fault


@dataclass(frozen=True, slots=True)
class SimulatorOptions:
    """A simulated engine: its name, models, hardware, limits, pace and armed faults.

    Raises ValueError for values that no engine could have.
    """

    name: str = "sim"
    models: tuple[str, ...] = ("simulated-8b",)
    """The first gives the size; the others are its aliases."""
    hardware: HardwareProfile = PROFILES[Hardware.A100_80G]
    num_blocks: int | None = None
    """KV blocks of 16 tokens; by default what the hardware's memory leaves beside the weights."""
    max_num_seqs: int = 256
    max_model_len: int = 131_072
    speed: float = 1.0
    """Simulated seconds in a real second; `inf` answers at once."""
    token_interval_s: float | None = None
    """Simulated seconds of every step, whatever the hardware."""
    kv_events: str | None = None
    """Where to publish KV events, as a ZeroMQ address to bind such as tcp://127.0.0.1:5557."""
    kv_replay: str | None = None
    """The same for repeating those that were missed."""
    kv_topic: str = ""
    record: bool = False
    """Keep the last request bodies and headers."""
    seed: int = 0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models: give at least one model name")
        if not self.name.isascii() or not self.name.isprintable() or not self.name:
            raise ValueError("name: it goes into a header, so printable ASCII only")
        for field in ("max_num_seqs", "max_model_len", "speed"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}: must be greater than 0")
        if self.kv_replay is not None and self.kv_events is None:
            raise ValueError("kv_replay: repeats KV events, so set kv_events too")
        if self.blocks <= 0:
            raise ValueError(
                f"{self.models[0]} leaves no memory for KV blocks on this hardware: "
                "take more GPUs or a smaller model, or set num_blocks"
            )

    @property
    def blocks(self) -> int:
        """KV blocks of the engine."""
        if self.num_blocks is not None:
            return self.num_blocks
        return kv_capacity_tokens(self.hardware, model_shape(self.models[0])) // BLOCK_TOKENS

    @property
    def context_tokens(self) -> int:
        """Longest prompt and output together: the model's limit, or all the KV cache holds."""
        return min(self.max_model_len, self.blocks * BLOCK_TOKENS)
