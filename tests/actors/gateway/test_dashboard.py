"""The dashboard in a real browser: submit, watch, look into, cancel; nothing hostile runs."""

import re
import time
from pathlib import Path

import pytest
import yaml
from playwright.async_api import Page, expect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.feed import publish_log
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.metric import LogLines
from tinkermq.schemas.node import Gpu, NodeStatus, NodeSync
from tinkermq.schemas.wire.subjects import BUCKET_NODES, JobScope
from tinkermq.schemas.wire.subjects import node as node_subject

from tests.actors.gateway.test_episodes import two_turns
from tests.actors.gateway.test_rest import HOSTILE, finished_job
from tests.support.browser import PATIENCE_MS, Browser, watched_page
from tests.support.configs import UNHURRIED, small_job
from tests.support.gateway import Gateway
from tests.support.groups import make_group
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def last_step(page: Page) -> int:
    """Return the last step that the curves show."""
    return int(await page.get_attribute("#charts", "data-last") or -1)


async def until_beyond(page: Page, step: int) -> int:
    """Wait until the curves show more than a step, without loading the page again."""
    await page.wait_for_function(
        "step => Number(document.getElementById('charts').dataset.last) > step",
        arg=step,
        timeout=2 * PATIENCE_MS,
    )
    return await last_step(page)


async def test_a_job_is_submitted_watched_looked_into_and_cancelled(
    stack: Stack, gateway: Gateway, browser: Browser, model: Path
) -> None:
    config = small_job(model, training={"num_steps": 5000}, env={**UNHURRIED, "num_val": 4})
    config["output_dir"] = str(stack.folder / "runs")
    async with watched_page(browser, gateway.url) as page:
        await page.goto("/jobs")
        await page.click("text=New job")
        await page.fill("textarea[name=config]", yaml.safe_dump(config))
        await page.fill("textarea[name=overrides]", "learner.lrr=1")
        async with page.expect_response(lambda reply: reply.status == 400):
            await page.click("text=Check only")
    async with watched_page(browser, gateway.url) as page:
        await page.goto("/submit")
        await page.fill("textarea[name=config]", yaml.safe_dump(config))
        await page.fill("textarea[name=overrides]", "learner.lr=1e-4\nname=from-the-browser")
        await page.click("text=Check only")
        await expect(page.locator(".good")).to_contain_text("Nothing was submitted")
        await page.click("button[value=submit]")
        await page.wait_for_url("**/jobs/*")
        assert await page.inner_text("h1") == "from-the-browser"

        step = await until_beyond(page, 0)
        await expect(page.locator("[data-chart=reward] canvas")).to_be_visible()
        await until_beyond(page, step + 2)
        await expect(page.locator("[data-part=head]")).to_contain_text("running")
        await expect(page.locator("[data-part=actors]")).to_contain_text("generator-0")

        await page.click("nav.tabs >> text=Rollouts")
        await page.locator("td a.chip").first.click()
        await expect(page.locator(".m-assistant").first).to_be_visible()
        assert await page.locator(".tokens .tok.made").count() >= 1
        await expect(page.locator(".turn-reward").first).to_be_visible()

        await page.click("nav.tabs >> text=Logs")
        await expect(page.locator(".log li").first).to_be_visible()
        job = page.url.split("/jobs/")[1].split("/")[0]
        late = LogLines(actor="learner", attempt=1, lines=["said later"], time=time.time())
        await publish_log(stack.broker, JobScope("local", job), late)
        await expect(page.locator(".log li", has_text="said later")).to_be_visible()
        await page.click("nav.tabs >> text=Curves")
        await page.click("main button:text('Checkpoint')")
        await page.click("nav.tabs >> text=Checkpoints")
        await expect(page.locator("a[href*='/checkpoints/']").first).to_be_visible()
        await page.click("nav.tabs >> text=Curves")
        await page.click("text=Pause")
        await expect(page.locator("[data-part=head]")).to_contain_text("paused")
        await page.click("text=Resume")
        await page.click("text=Cancel now")
        await expect(page.locator("[data-part=head]")).to_contain_text(
            "cancelled", timeout=PATIENCE_MS
        )
        await page.goto("/jobs?state=cancelled")
        await expect(page.locator("a.name", has_text="from-the-browser")).to_be_visible()


async def test_the_pool_shows_gpus_at_work_and_lets_waiting_jobs_overtake(
    stack: Stack, gateway: Gateway, browser: Browser, model: Path
) -> None:
    gpu = Gpu(index=3, model="H200", memory_bytes=2**37, used_bytes=2**36, utilization=0.97)
    status = NodeStatus(node="gpus", host="h", slots=0, gpus=[gpu], time=time.time())

    async def sync(_: NodeSync) -> NodeStatus:
        return status

    nodes = Bucket(stack.broker, BUCKET_NODES, NodeStatus)
    async with await Service.start(stack.broker, name="gpus", description="no slots") as service:
        await service.endpoint("sync", node_subject("gpus", "sync"), NodeSync, sync)
        await nodes.put("gpus", status)
        long = {"num_steps": 5000}
        held = await stack.submit(small_job(model, training=long, generator={"slots": 20}))
        waits = await stack.submit(small_job(model, generator={"slots": 20}))
        async with watched_page(browser, gateway.url) as page:
            await page.goto("/pool")
            await expect(page.locator(".gpu")).to_have_text(
                re.compile(r"3 · H200 +97 % · 68.7 GB of 137.4 GB"), timeout=PATIENCE_MS
            )
            name = (await waits.read()).name
            field = page.get_by_label(f"Priority of {name}")
            await field.fill("7", timeout=PATIENCE_MS)
            await field.press("Enter")
            await page.wait_for_url("**/jobs/*")
        assert (await waits.read()).priority == 7
        assert (await held.read()).priority == 0
        await waits.stop(now=True)
        await held.stop(now=True)
    await nodes.delete("gpus")


async def test_what_jobs_say_is_text_and_never_runs(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    record = await finished_job(stack, gateway, name=HOSTILE, reason=HOSTILE, state="FAILED")
    async with watched_page(browser, gateway.url) as page:
        for path in (
            "/jobs",
            f"/jobs?search={HOSTILE.split('>')[0]}",
            *(
                f"/jobs/{record.job}{tab}"
                for tab in ("", "/logs", "/events", "/config", "/rollouts", "/rollouts/1/0")
            ),
            f"/submit?like={record.job}",
        ):
            await page.goto(path)
            assert await page.evaluate("window.hacked === undefined")
            assert await page.locator("img[src=x]").count() == 0
            assert HOSTILE in await page.inner_text("body") or "submit" in path
        await page.goto(f"/jobs/{record.job}/rollouts/1/0")
        assert await page.locator(".m-user img").evaluate("image => image.naturalWidth") == 1
        await page.goto(f"/jobs/{record.job}")
        await expect(page.locator("[data-chart=reward] canvas")).to_be_visible()
        assert await last_step(page) == 5


async def test_the_tree_of_an_episode_shows_what_calls_and_branches_were_rewarded_with(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    record = await finished_job(stack, gateway)
    call = {"parent": None, "row": 0, "tokens": 3, "given_tokens": 5, "finish": "stop"}
    calls = [
        {**call, "call": 0, "text": "I ask both"},
        {**call, "call": 1, "reward": 0.25, "branch_reward": -1.5, "name": "reader"},
        {**call, "call": 2, "parent": 1, "branch": "edited", "reward": 0.0},
        {**call, "call": 3, "row": None, "untrained": "apart", "branch_reward": 2, "name": HOSTILE},
    ]
    group = make_group([two_turns(info={"calls": calls})], 1)
    await RolloutLog(stack.broker, JobScope("local", record.job)).append(group)
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{record.job}/rollouts/2/0")
        rows = page.locator(".calls tbody tr")
        await expect(rows).to_have_count(len(calls))
        shown = [await row.locator(".turn-reward").all_inner_texts() for row in await rows.all()]
        assert shown == [[], ["+0.25", "branch -1.5"], ["+0"], ["branch +2"]]
        await expect(rows.nth(1).locator("td").first).to_have_text(re.compile("1 +reader"))
        await expect(rows.nth(1).locator(".minus")).to_have_text("branch -1.5")
        await expect(rows.nth(3)).to_contain_text("no: nothing of it reached the outcome")
        await expect(rows.nth(3)).to_contain_text(HOSTILE)


async def test_the_pages_fit_a_phone_and_follow_the_theme(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    record = await finished_job(stack, gateway)
    context = await browser.new_context(
        base_url=gateway.url, viewport={"width": 390, "height": 800}, color_scheme="dark"
    )
    page = await context.new_page()
    colour = "getComputedStyle(document.body).backgroundColor"
    for path in (
        "/jobs",
        "/pool",
        "/submit",
        "/api",
        *(f"/jobs/{record.job}{tab}" for tab in ("", "/logs", "/rollouts", "/rollouts/1/0")),
    ):
        await page.goto(path)
        wide = await page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"{path} is {wide} pixels wide"
    dark = await page.evaluate(colour)
    await page.click("[data-theme-toggle]")
    light = await page.evaluate(colour)
    assert light != dark
    await page.goto("/jobs")
    assert await page.evaluate(colour) == light
    await context.close()
