"""A checkpoint of a real run is talked with and evaluated by clicks, with real engines."""

from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.support.browser import open_browser, watched_page
from tests.support.configs import small_job
from tests.support.gateway import run_gateway
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]
PATIENCE_MS = 120_000


async def test_a_checkpoint_is_talked_with_and_evaluated_by_clicks(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    settings = {"training": {"num_steps": 4, "save_freq": 2, "test_freq": 2}}
    run = await stack.submit(small_job(model, env={"num_val": 4}, **settings))
    await run.until("COMPLETED")
    async with (
        run_gateway(stack.server.url, tmp_path) as gateway,
        open_browser() as browser,
        watched_page(browser, gateway.url) as page,
    ):
        await page.goto(f"/jobs/{run.record.job}/checkpoints")
        await expect(page.locator("tbody tr")).to_have_count(2)
        await expect(page.locator(".best")).to_have_count(1)
        await page.locator("tbody tr").first.locator("button:text('Evaluate')").click()
        await expect(page.locator(".s-completed")).to_have_count(1, timeout=PATIENCE_MS)
        await expect(page.locator("h1")).to_have_text(f"eval-{run.record.name}-4")

        await page.goto(f"/jobs/{run.record.job}/checkpoints")
        told = page.locator("tbody tr").first.locator(".helper")
        await expect(told).to_contain_text(f"eval-{run.record.name}-4 completed")
        await page.locator("tbody tr").first.locator("button:text('Chat')").click()
        await expect(page.locator("h1")).to_have_text("Playground")
        send = page.locator("button:text('Send')")
        await expect(send).to_be_enabled(timeout=PATIENCE_MS)
        await page.fill("input[name=max_tokens]", "8")
        await page.fill("textarea[name=text]", "hello")
        await send.click()
        header = page.locator("article.m-assistant header")
        await expect(header).to_contain_text(f"{run.record.name}@4", timeout=PATIENCE_MS)
        await expect(page.locator("[data-again]")).to_be_visible()
        assert 0 < await page.locator("article.m-assistant .tok").count() <= 8

        await page.goto(f"/jobs/{run.record.job}/checkpoints")
        await page.locator("tbody tr").first.locator("button:text('Chat')").click()
        await expect(page.locator("h1")).to_have_text("Playground")
        await page.goto("/jobs")  # clicked twice, it is served once
        await expect(page.locator(f".helper:has-text('serve-{run.record.name}-4')")).to_have_count(
            1
        )
