"""The steps of docs/dashboard.md, in a real browser, on the demo behind the real Envoy."""

import asyncio
import sys
from pathlib import Path

import pytest
from demo_support import demo

pytest.importorskip("playwright.async_api", reason="needs Playwright: pip install 'inferact[browser]'")

from playwright.async_api import Browser, expect

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.slow,
    pytest.mark.xdist_group("inferact up"),
    pytest.mark.skipif(sys.platform != "linux", reason="the demo's support looks into /proc"),
]


async def test_from_nothing_to_why_a_request_went_where_it_went(tmp_path: Path, browser: Browser) -> None:
    with demo(tmp_path) as running:
        key = running.printed(r"INFERACT_ADMIN_KEY=(\S+)")
        page = await browser.new_page()
        await page.goto(running.printed(r"dashboard +(\S+)"))

        first = await asyncio.to_thread(running.chat)
        node, request_id = first.headers["x-inferact-node"], first.headers["x-request-id"]
        await page.get_by_role("button", name="Enter admin key").click()
        await page.get_by_label("Key", exact=True).fill(key)
        await page.get_by_role("button", name="Use this key").click()

        await page.get_by_role("button", name=request_id).click()
        receipt = page.get_by_role("dialog", name=f"Why {node}")
        await expect(receipt).to_contain_text(f"{node} was chosen: ")
        await expect(receipt).to_contain_text("Answer tokens4")
        await page.get_by_role("button", name="Close").click()

        await page.get_by_role("button", name=f"Drain {node}").click()
        await expect(page.get_by_text(f"{node} is drained; 0 requests still running there.")).to_be_visible()

        second = await asyncio.to_thread(running.chat)
        other = second.headers["x-inferact-node"]
        assert other != node
        await page.get_by_label("Find a request").fill(second.headers["x-request-id"])
        await page.get_by_role("button", name="Find").click()
        receipt = page.get_by_role("dialog", name=f"Why {other}")
        await expect(receipt).to_contain_text(f"{node}: drained")
        await page.get_by_role("button", name="Close").click()

        await page.get_by_role("button", name=f"Restore {node}").click()
        await expect(page.get_by_text(f"{node} takes requests again.")).to_be_visible()
