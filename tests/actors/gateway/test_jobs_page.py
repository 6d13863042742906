"""The table of jobs in a real browser: runs are labelled, chosen, archived and deleted."""

from urllib.parse import quote

import pytest
from playwright.async_api import expect
from tinkermq.broker.jobs import JobStore

from tests.actors.gateway.test_rest import HOSTILE, finished_job
from tests.support.browser import Browser, watched_page
from tests.support.gateway import Gateway
from tests.support.stack import Stack
from tests.support.waiting import eventually

CONFIG = {"env": {"game": "bandit"}, "model": {"path": "tiny"}}
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_run_is_labelled_on_its_page_and_found_by_a_click_on_its_tag(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    record = await finished_job(stack, gateway)
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{record.job}")
        await page.click("details.labelled summary")
        await page.fill("input[name=tags]", f"baseline of={record.job}")
        await page.fill("textarea[name=notes]", HOSTILE)
        await page.click("details.labelled button")
        await expect(page.locator("details.labelled .chip")).to_have_count(2)
        assert await page.evaluate("window.hacked === undefined")
        await page.click(f"a.chip:text('of={record.job}')")
        await expect(page.locator("table.jobs tbody tr")).to_have_count(1)
        await expect(page.locator("table.jobs .why").last).to_have_text(HOSTILE)
        assert await page.input_value("input[name=search]") == f"tag:of={record.job}"


async def test_chosen_runs_are_deleted_after_it_is_told_what_that_frees(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    folder = stack.folder / "runs" / "freed"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(3_000_000))
    one = await finished_job(stack, gateway, run_dir=str(folder), stored_bytes=2_000_000)
    two = await finished_job(stack, gateway, config={**CONFIG, "tags": ["gone"]})
    live = await finished_job(stack, gateway, state="QUEUED", configured=False)
    async with watched_page(browser, gateway.url) as page:
        await page.goto("/jobs?limit=1000")
        for record in (one, two, live):
            await page.check(f"input[name=run][value={record.job}]")
        await page.click("button:text('Delete')")
        await expect(page.locator("h1")).to_have_text("Delete 3 runs?")
        await expect(page.locator("tfoot")).to_contain_text("2.0 MB")
        await expect(page.locator("tfoot")).to_contain_text("3.0 MB")
        await expect(page.locator("main")).to_contain_text("is live: it will be refused")
        await page.click("form button.danger")
        await expect(page.locator("h1")).to_have_text("Delete 1 run?")
        await expect(page.locator(".note")).to_have_text("2 done.")
        await expect(page.locator("td .problem")).to_contain_text("only a run that has ended")
    jobs = JobStore(stack.broker)

    async def gone() -> bool:
        return all([await jobs.find_by_id("local", r.job) is None for r in (one, two)])

    await eventually(gone, "the runs to be deleted")
    assert not folder.exists()


async def test_nothing_is_removed_by_looking_and_bad_requests_are_refused(
    stack: Stack, gateway: Gateway
) -> None:
    record = await finished_job(stack, gateway)
    asked = await gateway.get(f"/remove?how=delete&run={record.job}")
    assert (asked.status, "Delete 1 run?" in asked.text) == (200, True)
    assert await JobStore(stack.broker).find_by_id("local", record.job) is not None
    for query, said in (
        (f"how=burn&run={record.job}", "not &#39;burn&#39;"),
        ("how=delete", "no runs were chosen"),
        ("how=delete&" + "&".join(f"run={n}" for n in range(201)), "201 runs were chosen"),
    ):
        refused = await gateway.get(f"/remove?{query}")
        assert (refused.status, said in refused.text) == (400, True), refused.text
    assert (await gateway.get(f"/remove?how=delete&run={quote('no/such')}")).status in (400, 404)


async def test_all_runs_of_a_group_are_compared_by_one_address(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    first = await finished_job(stack, gateway, config={**CONFIG, "group": "of-two", "seed": 1})
    await finished_job(stack, gateway, config={**CONFIG, "group": "of-two", "seed": 2})
    await finished_job(stack, gateway, kind="infer", config={**CONFIG, "group": "of-two"})
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{first.job}")
        await page.click("a.chip.group")
        await page.click("a:text('Compare all that were found')")
        await expect(page.locator(".title .sub")).to_contain_text("the newest 2 of 2 runs that")
        await expect(page.locator("table code:text-is('seed')")).to_have_count(1)
        await page.locator("a:text('leave out')").first.click()
        await expect(page.locator(".title .sub")).to_contain_text("1 runs")
