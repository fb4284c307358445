"""Fixtures of the tests on the real Envoy."""

from collections.abc import AsyncIterator

import pytest
from envoy_stack import Stack, running_stack


@pytest.fixture(scope="module")
async def stack() -> AsyncIterator[Stack]:
    """Three equal nodes, shared by a module's tests: leave them as they were."""
    async with running_stack() as running:
        yield running
