"""The fixture of the tests on a pair of engines: they start once."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_pair import LIMIT_S, Pair, nixl_vllm
from envoy_stack import node_entry, stack_over

collect_ignore_glob = [] if "INFERACT_TEST_PD" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Each has had an ordinary request first: a worker whose first work is a decode crashes."""
    folder = Path(tmp_path_factory.mktemp("pair"))
    engines = nixl_vllm("p", folder), nixl_vllm("d", folder)
    try:
        for engine in engines:
            engine.start()
        await asyncio.gather(*(engine.ready() for engine in engines))
        entries = [
            node_entry(engine.name, engine.url, role=role, **engine.node)
            for engine, role in zip(engines, ("prefill", "decode"), strict=True)
        ]
        timeout_ms = int(LIMIT_S * 1000)
        batching = {"strategy": "continuous", "prefill_decode_split": True}
        async with stack_over(
            entries, batching=batching, scheduler={"request_timeout_ms": timeout_ms}
        ) as stack:
            made = Pair(*engines, stack)
            for engine in engines:
                await made.ask(engine.url, "warm up")
            yield made
    finally:
        for engine in engines:
            engine.kill()
