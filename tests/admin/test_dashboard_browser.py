"""The dashboard in a real browser: what it shows, every action, and what it says when something is wrong."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from admin_app import KEY, App

from extproc.openai.request import Api, parse
from extproc.routing.node import EngineReport, Health

pytest.importorskip("playwright.async_api", reason="needs Playwright: pip install 'inferact[browser]'")

from playwright.async_api import Browser, Page, expect

A100, RTX = "node-a100-01", "node-rtx-01"
MARKUP = '<img src="x" onerror="document.title=1"> & <b>bold</b>'
WIDTHS = (360, 768, 1280, 2560)


@pytest.fixture
async def page(app: App, browser: Browser) -> AsyncIterator[Page]:
    """A page that has read the status once; it may ask nobody but the service, nor complain of its code."""
    opened, complaints = await browser.new_page(), []
    site = str(app.client.make_url("/"))
    opened.on("request", lambda request: request.url.startswith(site) or complaints.append(request.url))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on(
        "console", lambda said: "Content Security Policy" not in said.text or complaints.append(said.text)
    )
    await show(app, opened)
    yield opened
    assert complaints == []


async def show(app: App, page: Page) -> None:
    await page.goto(str(app.client.make_url("/dashboard")))
    await expect(page.get_by_text("Live", exact=True)).to_be_visible()


def card(page: Page, node_id: str) -> Any:
    """What is shown of a node."""
    return page.get_by_role("listitem").filter(has=page.get_by_role("heading", name=node_id))


def button(page: Page, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


async def give_key(page: Page, key: str = KEY) -> None:
    """Into the dialog that is open."""
    await page.get_by_label("Key", exact=True).fill(key)
    await page.keyboard.press("Enter")


async def unlock(page: Page) -> None:
    await button(page, "Enter admin key").click()
    await give_key(page)
    await expect(button(page, "Forget admin key")).to_be_visible()


def decide(app: App, request_id: str) -> str:
    """The node of a decision that was carried out."""
    decision = app.context.router.decide(app.request("shared"), app.now_s)
    assert decision is not None
    app.context.router.receipts.keep(decision.receipt, f"exchange-{request_id}", request_id, 0.25)
    return decision.node.id


class TestNodes:
    async def test_are_shown_as_status_tells_of_them(self, app: App, page: Page) -> None:
        node = app.nodes[A100]
        node.health, node.requests_total = Health.HEALTHY, 1240
        node.latencies_s.append(0.82)
        node.report = EngineReport(app.now_s, running=3, waiting=2, kv_used_ratio=0.421)
        shown = card(page, A100)
        await expect(shown).to_contain_text("healthy")
        await expect(shown).to_contain_text("a100-80g · vllm")
        for fact in ("Queued2", "p99 latency0.82 s", "Requests1,240", "In flight0"):
            await expect(shown).to_contain_text(fact)
        await expect(shown.get_by_role("meter")).to_have_attribute("aria-valuenow", "42.1")

    async def test_without_a_report_show_no_number_that_nobody_knows(self, app: App, page: Page) -> None:
        await expect(card(page, RTX).get_by_role("meter")).to_have_attribute("aria-valuetext", "unknown")
        await expect(card(page, RTX)).to_contain_text("Hit ratio\N{EN DASH}")

    async def test_and_errors_show_what_comes_from_outside_as_text(self, app: App, page: Page) -> None:
        app.nodes[A100].health, app.nodes[A100].last_error = Health.OFFLINE, MARKUP
        app.context.config_errors.append(f"inferact.yaml:3: {MARKUP}")
        await expect(card(page, A100)).to_contain_text(MARKUP)
        await expect(page.get_by_role("region", name="Configuration errors")).to_contain_text(MARKUP)
        assert await page.locator("img").count() == 0

    async def test_configuration_errors_are_out_of_sight_where_there_are_none(self, page: Page) -> None:
        await expect(page.get_by_role("region", name="Configuration errors")).to_be_hidden()


class TestDrain:
    async def test_asks_for_the_key_once_and_keeps_it_for_the_tab(self, app: App, page: Page) -> None:
        await button(page, f"Drain {RTX}").click()
        await give_key(page)
        await expect(page.get_by_text(f"{RTX} is drained; 0 requests still running there.")).to_be_visible()
        assert app.nodes[RTX].drained and app.routes == [{RTX}]
        await expect(card(page, RTX)).to_contain_text("drained")
        await page.reload()
        await button(page, f"Restore {RTX}").click()
        await expect(page.get_by_text(f"{RTX} takes requests again.")).to_be_visible()
        assert not app.nodes[RTX].drained
        assert await page.evaluate("localStorage.length + document.cookie.length") == 0

    async def test_with_a_wrong_key_is_refused_and_can_be_tried_again(self, app: App, page: Page) -> None:
        await button(page, f"Drain {RTX}").click()
        await give_key(page, "wrong")
        await expect(page.get_by_role("alert")).to_contain_text("is not the admin key")
        assert not app.nodes[RTX].drained
        await give_key(page)
        await expect(button(page, f"Restore {RTX}")).to_be_visible()
        assert app.nodes[RTX].drained

    async def test_with_a_key_that_no_header_can_carry_is_refused(self, app: App, page: Page) -> None:
        await button(page, f"Drain {RTX}").click()
        await give_key(page, "ключ")
        await expect(page.get_by_role("alert")).not_to_be_empty()
        assert not app.nodes[RTX].drained

    async def test_is_not_done_without_a_key(self, app: App, page: Page) -> None:
        await button(page, f"Drain {RTX}").click()
        await page.keyboard.press("Escape")
        await expect(button(page, f"Drain {RTX}")).to_be_focused()
        assert not app.nodes[RTX].drained
        assert await page.evaluate("sessionStorage.length") == 0

    async def test_after_the_key_was_changed_says_so_and_asks_again(self, app: App, page: Page) -> None:
        await unlock(page)
        app.context.admin_key = "another"
        await button(page, f"Drain {RTX}").click()
        await expect(page.get_by_text("is not the admin key. Enter it again.")).to_be_visible()
        await expect(button(page, "Enter admin key")).to_be_visible()
        assert not app.nodes[RTX].drained
        assert await page.evaluate("sessionStorage.length") == 0

    async def test_where_admin_calls_are_off_tells_how_to_turn_them_on(self, app: App, page: Page) -> None:
        app.context.admin_key = None
        await button(page, f"Drain {RTX}").click()
        await give_key(page)
        await expect(page.get_by_role("alert")).to_contain_text("INFERACT_ADMIN_KEY")

    async def test_keeps_the_focus_through_refreshes(self, app: App, page: Page) -> None:
        await unlock(page)
        await button(page, f"Drain {RTX}").focus()
        await page.keyboard.press("Enter")
        await expect(button(page, f"Restore {RTX}")).to_be_focused()
        async with page.expect_response("**/status"):
            pass
        await expect(button(page, f"Restore {RTX}")).to_be_focused()


class TestDecisions:
    async def test_wait_for_the_key(self, app: App, page: Page) -> None:
        decide(app, "request-1")
        decisions = page.get_by_role("region", name="Recent decisions")
        await expect(decisions).to_contain_text("Enter the admin key to see them.")
        await unlock(page)
        await expect(decisions).to_contain_text("request-1")
        await button(page, "Forget admin key").click()
        await expect(decisions).not_to_contain_text("request-1")

    async def test_open_their_receipt_by_keyboard(self, app: App, page: Page) -> None:
        node_id = decide(app, "request-1")
        await unlock(page)
        line = page.get_by_role("button", name="request-1")
        await line.focus()
        await page.keyboard.press("Enter")
        receipt = page.get_by_role("dialog", name=f"Why {node_id}")
        await expect(receipt).to_contain_text(f"{node_id} was chosen: ")
        await expect(receipt.get_by_role("heading", name=f"Why {node_id}")).to_be_focused()
        await expect(receipt.get_by_role("columnheader", name="prefill")).to_be_visible()
        await expect(receipt.get_by_role("row")).to_have_count(3)
        await expect(receipt).to_contain_text("Waited in the queue0.25 s")
        await page.keyboard.press("Escape")
        await expect(receipt).to_be_hidden()
        await expect(line).to_be_focused()

    async def test_are_found_by_the_id_of_the_request(self, app: App, page: Page) -> None:
        app.nodes[RTX].drained = True
        decide(app, "a/b c")
        await page.get_by_label("Find a request").fill("a/b c")
        await page.keyboard.press("Enter")
        await give_key(page)
        receipt = page.get_by_role("dialog", name=f"Why {A100}")
        await expect(receipt).to_contain_text(f"{RTX}: drained")
        await button(page, "Close").click()
        await page.get_by_label("Find a request").fill("unknown")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("There is no decision on a request `unknown`")).to_be_visible()

    async def test_show_what_clients_chose_as_text(self, app: App, page: Page) -> None:
        decide(app, MARKUP)
        await unlock(page)
        await page.get_by_role("button", name=MARKUP).click()
        await expect(page.get_by_role("dialog")).to_contain_text(MARKUP)
        assert await page.locator("img").count() == 0


async def test_the_queue_is_shown_by_priority(app: App, page: Page) -> None:
    queue = page.get_by_role("region", name="Queue by priority")
    await expect(queue).to_contain_text("Nothing waits.")
    for priority in (5, 5, 0, 10, 10):  # the first two find a node
        body = b'{"model": "shared", "messages": [], "x-inferact": {"priority": %d}}' % priority
        app.context.admission.submit(parse(Api.CHAT_COMPLETIONS, body), len(body), app.now_s, lambda: None)
    await expect(queue.get_by_role("listitem")).to_have_text(["Priority 102", "Priority 01"])


async def test_a_prompt_is_let_out_of_quarantine(app: App, page: Page) -> None:
    quarantine = app.context.router.quarantine
    for node_id in app.nodes:
        quarantine.broken(0xBEEF, node_id, app.now_s)
        quarantine.died(node_id, app.now_s)
    await unlock(page)
    await button(page, "Let out 000000000000beef").click()
    await expect(page.get_by_text("Nodes may get the prompt again.")).to_be_visible()
    await expect(page.get_by_text("No prompt is held back.")).to_be_visible()
    assert not quarantine.holds(0xBEEF, app.now_s)


async def test_charts_tell_their_values_in_words_too(app: App, page: Page) -> None:
    app.nodes[A100].report = EngineReport(app.now_s, running=3, waiting=2, kv_used_ratio=0.421)
    words = re.compile("KV cache used: fullest node now 42 %, highest 42 %; mean now 42 %")
    await expect(page.get_by_role("img", name=words)).to_be_visible()
    assert await page.locator("figure").count() == 6


class TestWhenSomethingIsWrong:
    async def test_a_service_that_is_away_is_told_and_so_is_its_return(self, app: App, page: Page) -> None:
        await unlock(page)
        await page.context.set_offline(True)
        await expect(page.get_by_role("alert")).to_contain_text(
            "The service cannot be reached. What you see is from"
        )
        await expect(page.get_by_role("status").filter(has_text="No connection")).to_be_visible()
        await button(page, f"Drain {RTX}").click()
        await expect(page.get_by_text("The service cannot be reached.", exact=True)).to_be_visible()
        await page.context.set_offline(False)
        await expect(page.get_by_text("Live", exact=True)).to_be_visible()
        await expect(page.get_by_role("alert")).to_be_hidden()

    async def test_a_failing_service_is_quoted(self, page: Page) -> None:
        body = '{"error": {"message": "The scheduler is away; try again shortly."}}'
        await page.route("**/status", lambda route: route.fulfill(status=503, body=body))
        await expect(page.get_by_role("alert")).to_contain_text("The scheduler is away; try again shortly.")

    async def test_data_that_grew_old_while_the_page_slept_is_called_old(
        self, app: App, browser: Browser
    ) -> None:
        page = await browser.new_page()
        await page.clock.install()
        await show(app, page)
        await page.route("**/status", lambda route: None)  # an answer that never comes
        await page.clock.fast_forward(30_000)
        await expect(page.get_by_role("status").filter(has_text="Old data")).to_be_visible()


class TestLooks:
    @pytest.mark.parametrize("width", WIDTHS)
    async def test_nothing_is_wider_than_the_screen(self, app: App, page: Page, width: int) -> None:
        app.context.config_errors.append("word" * 100)
        decide(app, "x" * 128)
        await page.set_viewport_size({"width": width, "height": 800})
        await unlock(page)
        await expect(page.get_by_role("button", name="x" * 128)).to_be_visible()
        await expect(page.get_by_role("region", name="Configuration errors")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await page.get_by_role("button", name="x" * 128).click()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width

    async def test_follow_the_system_into_the_dark(self, page: Page) -> None:
        grounds = []
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            grounds.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert grounds == ["rgb(245, 246, 244)", "rgb(18, 24, 26)"]

    async def test_everything_that_can_be_used_has_a_name_and_is_reached_by_keyboard(
        self, page: Page
    ) -> None:
        names = []
        await page.locator("body").focus()
        for _ in range(5):
            await page.keyboard.press("Tab")
            names.append(
                await page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.innerText")
            )
        assert names[:4] == ["Skip to the nodes", "Enter admin key", f"Drain {A100}", f"Drain {RTX}"]
        for landmark in ("banner", "main"):
            await expect(page.get_by_role(landmark)).to_have_count(1)
