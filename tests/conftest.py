"""A real browser, for the tests of the dashboard."""

import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

_LIMIT_MS = 30_000
_NO_SANDBOX = ["--no-sandbox"]  # which Chromium refuses to do without for root, as containers run


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    """A headless Chromium; tests skip where there is none."""
    playwright = pytest.importorskip(
        "playwright.async_api", reason="needs Playwright: pip install 'inferact[browser]'"
    )
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    playwright.expect.set_options(timeout=_LIMIT_MS)  # for machines that are busy
    async with playwright.async_playwright() as running:
        browser = await running.chromium.launch(executable_path=chromium, args=_NO_SANDBOX)
        yield browser
        await browser.close()
