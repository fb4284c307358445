"""Fixtures of the tests on real engines: they start once, and serve all tests in the order of the files."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_processes import BLOCKS, Engines, llamacpp, vllm
from envoy_stack import Stack, node_entry, stack_over, until

collect_ignore_glob = [] if "INFERACT_TEST_ENGINES" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    """All of them start at the same time."""
    folder = Path(tmp_path_factory.mktemp("engines"))
    made = Engines(
        vllm("a", folder), vllm("b", folder), vllm("whole", folder, 2 * BLOCKS), llamacpp("gguf", folder)
    )
    try:
        for engine in made.all:
            engine.start()
        await asyncio.gather(*(engine.ready() for engine in made.all))
        yield made
    finally:
        for engine in made.all:
            engine.kill()


@pytest.fixture(scope="session")
async def stack(engines: Engines) -> AsyncIterator[Stack]:
    """Envoy and the service over the two vLLM and llama.cpp; the KV events of both are followed."""
    nodes = [
        node_entry(engine.name, engine.url, **engine.node) for engine in (engines.a, engines.b, engines.gguf)
    ]
    async with stack_over(nodes) as whole:
        following = [whole.service.router.nodes[name].events for name in ("a", "b")]
        await until(lambda: all(events.exact for events in following), 20)
        yield whole
