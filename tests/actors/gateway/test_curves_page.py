"""Curves in a real browser: found, pinned, moved, smoothed, saved, and several runs compared."""

import csv
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.async_api import Page, expect
from tinkermq.broker.feed import publish_metric
from tinkermq.schemas.metric import Metric
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.gateway.test_rest import HOSTILE, finished_job
from tests.support.browser import Browser, watched_page
from tests.support.gateway import Gateway
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")
REWARD = "training_step_reward"


async def run_with_metrics(stack: Stack, gateway: Gateway, *, state: str = "COMPLETED") -> str:
    """Return a job with metrics of several kinds, one of them named to do harm."""
    record = await finished_job(stack, gateway, state=state)
    for step in range(6, 9):
        values = {
            **{f"custom/number_{n}": float(n * step) for n in range(4)},
            f"custom/{HOSTILE}": float(step),
            "custom/a, b*[c]": -float(step),
            REWARD: step / 10,
            "perf/total_num_tokens": 100.0,
        }
        told = Metric(step=step, values=values, time=1.7e9 + step)
        await publish_metric(stack.broker, record.scope, told)
    return record.job


def charts(page: Page, group: str) -> str:
    """Return the selector of the charts of a group that can be seen."""
    return f"[data-group='{group}'] figure:not([hidden])"


async def keys(page: Page, group: str) -> list[str | None]:
    """Return the keys of the charts of a group, in their order."""
    return [
        await one.get_attribute("data-chart")
        for one in await page.locator(charts(page, group)).all()
    ]


async def test_any_metric_is_found_pinned_and_moved_and_a_link_keeps_the_view(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    job = await run_with_metrics(stack, gateway)
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{job}")
        await expect(page.locator("[data-group=of-custom] summary")).to_have_text("custom · 6")
        await page.click("[data-group=of-custom] summary")
        await expect(page.locator(charts(page, "of-custom"))).to_have_count(6)
        assert await page.evaluate("window.hacked === undefined")
        await page.fill("input[name=q]", "custom number_3")
        await expect(page.locator(charts(page, "found"))).to_have_count(1)
        await expect(page.locator(f"{charts(page, 'found')} .last b")).to_have_text("24")
        await page.click(f"{charts(page, 'found')} button[title^=Pin]")
        await page.fill("input[name=q]", "")
        await page.locator("[data-group=overview] [data-chart=reward]").hover()
        await page.click("[data-group=overview] [data-chart=reward] button[title^=Pin]")
        assert await keys(page, "pinned") == ["custom/number_3", "reward"]
        await page.locator("[data-group=pinned] [data-chart=reward]").hover()
        await page.click("[data-group=pinned] [data-chart=reward] button[title$=left]")
        assert await keys(page, "pinned") == ["reward", "custom/number_3"]
        await page.select_option("select[name=x]", "tokens")
        await page.check("input[name=log]")
        await expect(page.locator("#curves-note")).to_contain_text("logarithmic")
        link = page.url
    async with watched_page(browser, gateway.url) as page:
        await page.goto(link)
        await expect(page.locator(charts(page, "of-custom"))).to_have_count(6)
        assert await keys(page, "pinned") == ["reward", "custom/number_3"]
        assert await page.input_value("select[name=x]") == "tokens"
        assert await page.is_checked("input[name=log]")


async def test_a_chart_is_saved_as_a_table_and_as_a_picture(
    stack: Stack, gateway: Gateway, browser: Browser, tmp_path: Path
) -> None:
    job = await run_with_metrics(stack, gateway)
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{job}?smooth=0.9")
        reward = page.locator("[data-group=overview] [data-chart=reward]")
        await expect(reward.locator("canvas")).to_be_visible()
        await reward.hover()
        for kind in ("CSV", "PNG"):
            async with page.expect_download() as saved:
                await reward.locator(f"button:text('{kind}')").click()
            await (await saved.value).save_as(tmp_path / kind)
    rows = list(csv.reader((tmp_path / "CSV").read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["step", "mean"]
    assert [float(row[1]) for row in rows[1:]] == [0.2, 0.4, 0.6, 0.8, 1.0, 0.6, 0.7, 0.8]
    assert (tmp_path / "PNG").read_bytes().startswith(b"\x89PNG")


async def test_runs_that_are_chosen_are_laid_over_each_other(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    jobs = [await run_with_metrics(stack, gateway) for _ in range(2)]
    async with watched_page(browser, gateway.url) as page:
        await page.goto("/jobs?state=completed&sort=-age")
        for job in jobs:
            await page.check(f"input[name=run][value='{job}']")
        await page.wait_for_timeout(3500)  # the table is fetched anew; what is chosen stays
        await page.click("button:text('Compare')")
        await page.wait_for_url("**/compare?*")
        first = page.locator(f"[data-group=overview] [data-chart={REWARD}]")
        await expect(first.locator(".last .line")).to_have_count(2)
        await page.click("[data-group=of-custom] summary")
        await expect(page.locator(charts(page, "of-custom"))).to_have_count(6)
        await page.click("text=leave out >> nth=0")
        await expect(page.locator("h1 + .sub")).to_contain_text("1 runs")
    missing = await gateway.get("/compare?run=" + quote("no such run"))
    assert missing.status == 404
    assert "no such run" in missing.text


async def test_a_live_run_shows_metrics_as_they_are_first_told(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    job = await run_with_metrics(stack, gateway)
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{job}?open=late")
        await expect(page.locator("[data-group=of-custom] summary")).to_be_visible()
        scope = JobScope("local", job)
        for step in (9, 10):
            told = Metric(step=step, values={"late/one": float(step)}, time=time.time())
            await publish_metric(stack.broker, scope, told)
        late = page.locator(charts(page, "of-late"))
        await expect(late).to_have_count(1)
        await expect(late.locator(".last b")).to_have_text("10")
