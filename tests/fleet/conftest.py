"""An engine for each test."""

from collections.abc import AsyncIterator

import pytest
from fleet_support import Engine, running_engine


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with running_engine() as engine:
        yield engine
