"""From what a request asks to what the engine generates: the model, the limits, the output's length."""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from extproc.simulator import tokens
from extproc.simulator.batch import Generation
from extproc.simulator.blocks import block_hashes
from extproc.simulator.schema import api_error, bad_value
from extproc.simulator.state import Engine

_SHORTEST_OUTPUT = 16
_LONGEST_OUTPUT = 128
_MOST_CHOICES = 128


def served_model(engine: Engine, name: str | None) -> str:
    """The model asked for, or the first served. Raises ApiError (404)."""
    models = engine.options.models
    if name is None:
        return models[0]
    if name not in models:
        aliases = ", ".join(models)
        message = f"The model `{name}` does not exist. Valid aliases: {aliases}."
        raise api_error(404, message, "NotFoundError", "model")
    return name


def check_sampling(temperature: float | None, n: int | None) -> None:
    """Raises ApiError (400) for sampling that makes no sense."""
    if temperature is not None and temperature < 0:
        raise bad_value(f"temperature must be non-negative, got {temperature}.", "temperature")
    if n is not None and not 1 <= n <= _MOST_CHOICES:
        raise bad_value(f"n must be between 1 and {_MOST_CHOICES}, got {n}.", "n")


def plan_outputs(
    engine: Engine,
    prompts: Sequence[bytes],
    max_tokens: int | None,
    n: int = 1,
    cache_salt: str | None = None,
) -> list[Generation]:
    """`n` generations of each prompt. Raises ApiError (400) where the context does not suffice.

    With `max_tokens` the output is that long; a simulated model ends early only where it is absent.
    """
    seed = xxh3_64_intdigest(cache_salt.encode()) if cache_salt else 0
    generations = []
    for prompt in prompts:
        length = _output_tokens(engine, prompt, max_tokens)
        text = engine.text.first(length).encode()
        ids = prompt + text
        hashes = block_hashes(ids, seed)
        generations += [
            Generation(tokens.count(prompt), length, hashes, ids=ids, salt=cache_salt) for _ in range(n)
        ]
    return generations


def plan_prefills(engine: Engine, prompts: Sequence[bytes]) -> list[Generation]:
    """Computation of each prompt and no output. Raises ApiError (400) for a prompt over the context."""
    for prompt in prompts:
        _check_prompt(engine, tokens.count(prompt), 0)
    return [Generation(tokens.count(prompt), 0, block_hashes(prompt), ids=prompt) for prompt in prompts]


def _output_tokens(engine: Engine, prompt: bytes, max_tokens: int | None) -> int:
    context = engine.options.context_tokens
    length = tokens.count(prompt)
    if max_tokens is None:
        _check_prompt(engine, length, 1)
        spread = _LONGEST_OUTPUT - _SHORTEST_OUTPUT + 1
        return min(_SHORTEST_OUTPUT + xxh3_64_intdigest(prompt) % spread, context - length)
    if max_tokens < 1:
        raise bad_value(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    if max_tokens > context:
        raise bad_value(
            f"max_tokens={max_tokens} cannot be greater than max_model_len={context}. "
            "Please request fewer output tokens.",
            "max_tokens",
        )
    _check_prompt(engine, length, 1)
    if length + max_tokens > context:
        raise bad_value(
            f"This model's maximum context length is {context} tokens. However, you requested {max_tokens} "
            f"output tokens and your prompt contains {length} input tokens.",
            "input_tokens",
        )
    return max_tokens


def _check_prompt(engine: Engine, prompt_tokens: int, output_tokens: int) -> None:
    context = engine.options.context_tokens
    if prompt_tokens + output_tokens > context:
        raise bad_value(
            f"This model's maximum context length is {context} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
        )
