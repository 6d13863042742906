"""The pages in a real browser: jobs, curves, rollouts, playground, sessions."""

import csv
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from playwright.async_api import Page, expect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.feed import (
    publish_dead,
    publish_log,
    publish_metric,
    publish_trace,
    read_dead,
)
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.metric import LogLines, Metric
from tinkermq.schemas.node import Gpu, NodeStatus, NodeSync
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.task import Blame, DeadLetter, Task
from tinkermq.schemas.wire.subjects import BUCKET_NODES, JobScope
from tinkermq.schemas.wire.subjects import node as node_subject
from tinkermq.schemas.wire.trace import GroupTrace, StepTrace, new_trace

from tests.actors.gateway.test_data import two_turns
from tests.actors.gateway.test_rest import HOSTILE, finished_job
from tests.support.browser import PATIENCE_MS, Browser, watched_page
from tests.support.configs import UNHURRIED, small_job
from tests.support.gateway import Gateway
from tests.support.groups import make_group, make_trajectory
from tests.support.stack import Stack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


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
        await page.click("text=New run")
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
        await expect(page.locator("[data-part=head]")).to_contain_text("cancelled")
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
                re.compile(r"3 · H200 +97 % · 68.7 GB of 137.4 GB")
            )
            name = (await waits.read()).name
            field = page.get_by_label(f"Priority of {name}")
            await field.fill("7")
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
        {**call, "call": 3, "row": None, "untrained": "other", "branch_reward": 2, "name": HOSTILE},
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
        await expect(rows.nth(3)).to_contain_text("no: not of the main conversation")
        await expect(rows.nth(3)).to_contain_text(HOSTILE)


async def long_episode(stack: Stack, scope: JobScope) -> None:
    """Append an episode of 120 turns, in which the policy and a tool say what would do harm."""
    asks: list[dict[str, Any]] = [{"role": "user", "content": HOSTILE}]
    for turn in range(120):
        call = {"id": "c", "function": {"name": HOSTILE, "arguments": f"{HOSTILE} {'x' * 2000}"}}
        asks += [
            {"role": "assistant", "content": f"turn {turn}", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": HOSTILE, "content": f"answer {turn} " + "y" * 30_000},
        ]
    turns = [([5, 6], [7])] * 120
    episode = make_trajectory([1, 2], turns, [0.0] * 119 + [1.0], messages=asks, role="")
    await RolloutLog(stack.broker, scope).append(make_group([episode], 1))


def step_trace(step: int) -> StepTrace:
    """Return the trace of a step that waited for a group of a generator with a harmful name."""
    group = GroupTrace(
        task=7, traceparent=new_trace(), source=HOSTILE, issued=90.0, arrived=99.0, weights_s=1.0,
        rollout_s=6.0, generate_s=4.0, environment_s=2.0, answer_s=0.1,
    )  # fmt: skip
    return StepTrace(
        step=step, traceparent=new_trace(), formed=100.0, ended=103.0, send_s=1.0,
        learner={"wait": 5.0, "train": 2.5, "publish": 0.5}, num_groups=1, groups=[group],
        generators={HOSTILE: {"generate": 4.0, "swap": 0.5}}, hosts={"host": {"play": 3.0}},
    )  # fmt: skip


async def test_an_episode_is_walked_step_by_step_and_each_step_has_an_address(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    record = await finished_job(stack, gateway)
    await long_episode(stack, record.scope)
    current = ".step[aria-current=step] .step-number"
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{record.job}/rollouts/2/0")
        await expect(page.locator(".step")).to_have_count(50)
        for key, number in (("j", 1), ("ArrowRight", 2), ("j", 3), ("k", 2), ("ArrowLeft", 1)):
            await page.keyboard.press(key)
            await expect(page.locator(current)).to_have_text(f"{number}/120")
            await expect(page.locator(f"#step-{number}")).to_be_focused()
        await page.goto(f"/jobs/{record.job}/rollouts/2/0?at=50#step-50")
        await expect(page.locator(current)).to_have_text("50/120")
        await page.keyboard.press("j")
        await page.wait_for_url("**/2/0?at=51#step-51")
        await expect(page.locator(current)).to_have_text("51/120")
        await expect(page.locator("#step-51 .m-assistant > pre")).to_have_text("turn 50")
        folded = page.locator("#step-51 .m-tool details.fold")
        await expect(folded.locator("pre")).to_be_hidden()
        await folded.locator("summary").click()
        await expect(folded.locator("pre")).to_contain_text("answer 49")
        assert await page.evaluate("window.hacked === undefined")
        assert await page.locator("img[src=x]").count() == 0
    steps = (await gateway.get(f"/api/v1/jobs/{record.job}/rollouts/2/0")).json["steps"]
    assert [one["turn"] for one in steps] == list(range(120))


async def test_a_step_is_drawn_as_a_timeline_and_told_as_a_trace_file(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    record = await finished_job(stack, gateway)
    none = await gateway.get(f"/api/v1/jobs/{record.job}/timeline")
    assert (none.status, "no traces" in none.text) == (404, True), none.text
    for step in (1, 2, 2, 3):  # step 2 was repeated after a resumption
        await publish_trace(stack.broker, record.scope, step_trace(step))
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{record.job}/timeline")
        await expect(page.locator("nav h2")).to_have_text("Step 3")
        await expect(page.locator("main")).to_contain_text(f"it waited for task 7 of {HOSTILE}")
        await expect(page.locator(".timeline svg > text:not(.tick)")).to_have_count(2)
        for kind in ("wait", "train", "publish", "send", "weights", "generate", "swap"):
            assert await page.locator(f".timeline .t-{kind}").count() == 1, kind
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("nav h2")).to_have_text("Step 2")
        await expect(page.locator(".limit")).to_contain_text("the learner waited 62% of the time")
        await expect(page.locator(".limit code").first).to_have_text("generator.count")
        assert await page.evaluate("window.hacked === undefined")
        assert await page.locator("img[src=x]").count() == 0
    url = f"/api/v1/jobs/{record.job}/timeline"
    events = (await gateway.get(f"{url}?from=2&to=3")).json["traceEvents"]
    steps = [one for one in events if one["name"] == "step"]
    assert [one["args"]["tinkermq.step"] for one in steps] == [2, 3]
    assert {one["dur"] for one in steps} == {8e6}
    assert (await gateway.get(f"{url}?from=9&to=9")).status == 404
    assert (await gateway.get(f"{url}?from=1&to=101")).status == 400


async def test_tasks_that_failed_for_good_are_listed_repeated_and_dropped(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    record = await finished_job(stack, gateway)
    blame = Blame(boundary="task", code="bad_row", message=HOSTILE + "z" * 900, hint="mend it")
    for number in range(4):
        task = Task(task=number, seed=7, group_size=2)
        letter = DeadLetter(task=task, blame=blame, num_attempts=1, source=HOSTILE, time=1.0)
        await publish_dead(stack.broker, record.scope, letter)
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{record.job}/failed")
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(4)
        await expect(rows.first).to_contain_text("mend it")
        await expect(rows.first.locator("summary")).to_contain_text("characters")
        await rows.first.locator("button:text('Repeat')").click()
        await expect(rows).to_have_count(3)
        await rows.first.locator("button:text('Drop')").click()
        await expect(rows).to_have_count(2)
        assert await page.evaluate("window.hacked === undefined")
        assert await page.locator("img[src=x]").count() == 0
        await page.click("button:text('Drop all')")
        await expect(page.locator("main")).to_contain_text("No task has failed for good")
    letters = await read_dead(stack.broker, record.scope)
    decided = [(one.task.task, one.decision) for one in letters if one.decision]
    assert decided[:2] == [(3, "repeat"), (2, "drop")]
    assert sorted(decided[2:]) == [(0, "drop"), (1, "drop")]


AUDIT = """() => {
  const rgb = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const mix = (top, below, i) => top[i] * top[3] + below[i] * (1 - top[3]);
  const over = (top, below) => [...[0, 1, 2].map((i) => mix(top, below, i)), 1];
  const ground = (one) => {
    const layer = one ? rgb(getComputedStyle(one).backgroundColor) : [255, 255, 255, 1];
    return layer[3] >= 1 ? layer : over(layer, ground(one.parentElement));
  };
  const linear = (part) => (part <= 10 ? part / 3295 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
  const wrong = [];
  if (document.querySelectorAll("h1").length !== 1) wrong.push("not one h1");
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("wider than the window");
  if (window.hacked !== undefined || document.querySelector("img[src=x]")) wrong.push("a text ran");
  for (const one of document.querySelectorAll("body *")) {
    if (!one.checkVisibility() || one.disabled || one.closest("svg, .uplot")) continue;
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const below = ground(one), text = over(rgb(getComputedStyle(one).color), below);
    const [a, b] = [light(text), light(below)];
    const says = one.outerHTML.slice(0, 99);
    if (own && Math.max(a, b) / Math.min(a, b) < 4.5) wrong.push(`faint: ${says}`);
    if (!one.matches("a, button, input:not([type=hidden]), select, textarea")) continue;
    const label = one.closest("label")?.textContent || one.getAttribute("aria-label");
    if (!(label || one.textContent).trim()) wrong.push(`no name: ${says}`);
  }
  return wrong;
}"""
"""Return what is wrong with a page: contrast below 4.5, controls without names, too wide."""


async def strange_values(stack: Stack, scope: JobScope) -> None:
    """Append a group whose rewards are no numbers, with words of any direction and no spaces."""
    words = HOSTILE + "\u202eمرحبا שלום " + "x" * 4000
    asks = [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
    rewards = (float("nan"), float("inf"), float("-inf"), 0.5)
    episodes = [
        make_trajectory([1, 2], [([5, 6], [7])], [reward], messages=asks, info={words: words})
        for reward in rewards
    ]
    log = RolloutLog(stack.broker, scope)
    await log.append(make_group(episodes, 2))
    await log.append_payload(3, b"no group")
    lines = LogLines(actor="learner", attempt=1, lines=[words], time=1.0)
    await publish_log(stack.broker, scope, lines)
    blame = Blame(boundary="task", code="bad_row", message=words, hint=words)
    letter = DeadLetter(
        task=Task(task=1, seed=2**63, group_size=1), blame=blame, num_attempts=1, source=words,
        time=1.0,
    )  # fmt: skip
    await publish_dead(stack.broker, scope, letter)


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
async def test_every_page_fits_can_be_read_and_names_its_controls_whatever_a_run_says(
    stack: Stack, gateway: Gateway, browser: Browser, width: int, scheme: Any
) -> None:
    strange: dict[str, Any] = {"name": "n" * 60, "reason": "r" * 3000, "notes": HOSTILE}
    record = await finished_job(stack, gateway, state="FAILED", tags=["t" * 60], **strange)
    await long_episode(stack, record.scope)
    await strange_values(stack, record.scope)
    await publish_trace(stack.broker, record.scope, step_trace(1))
    tabs = ("", "/logs", "/events", "/config", "/checkpoints", "/timeline", "/failed", "/rollouts")
    episodes = ("/rollouts/1/0", "/rollouts/2/0", "/rollouts/3/0", "/rollouts/3/1?beside=3/2")
    view: Any = {"width": width, "height": 800}
    context = await browser.new_context(base_url=gateway.url, viewport=view, color_scheme=scheme)
    page = await context.new_page()
    colour = "getComputedStyle(document.body).backgroundColor"
    for path in (
        *("/jobs", "/pool", "/submit", "/api", "/playground", "/tinker", "/compare"),
        *(f"/compare?run={record.job}", f"/remove?how=delete&run={record.job}"),
        *(f"/jobs/{record.job}{tab}" for tab in (*tabs, *episodes)),
    ):
        answer = await page.goto(path)
        assert answer is not None
        assert answer.status == 200, path
        assert await page.evaluate(AUDIT) == [], path
    dark = await page.evaluate(colour)
    await page.click("[data-theme-toggle]")
    light = await page.evaluate(colour)
    assert light != dark
    await page.goto("/jobs")
    assert await page.evaluate(colour) == light
    await context.close()


# -- Curves in a real browser: found, pinned, moved, smoothed, saved, and several runs compared ----

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
    assert rows[0] == ["step", "training"]
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
        later = await finished_job(stack, gateway)  # the table is fetched anew
        await expect(page.locator(f"input[name=run][value='{later.job}']")).to_be_visible()
        await expect(page.locator(f"input[name=run][value='{jobs[-1]}']")).to_be_focused()
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


# -- The table of jobs in a real browser: runs are labelled, chosen, archived and deleted ----------


CONFIG = {"env": {"game": "bandit"}, "model": {"path": "tiny"}}


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
        reward = page.locator(f"[data-group=overview] [data-chart={REWARD}]")
        await expect(reward.locator("b").first).to_have_text("Reward, training")
        await expect(reward.locator(".last .line")).to_have_text("1")  # one mean over both seeds
        label = re.compile(r"Reward, training over step: all \(2 seeds\) 1$")
        await expect(reward.locator("[role=img]")).to_have_attribute("aria-label", label)
        await page.uncheck("input[name=seeds]")
        await expect(reward.locator(".last .line")).to_have_count(2)
        await expect(page.locator("table code:text-is('seed')")).to_have_count(1)
        await page.locator("a:text('leave out')").first.click()
        await expect(page.locator(".title .sub")).to_contain_text("1 runs")


# -- The playground in a real browser, over a served model whose words the test chooses ------------


def told(number: int, words: str, sample: int, reward: float = 1.0) -> Group:
    """Return a group of one episode that was asked and answered with some words."""
    episode = two_turns()
    episode.messages[0]["content"] = f"asked {words}"
    group = make_group([episode], number)
    group.trajectories[0].rewards[:] = 0.0
    group.trajectories[0].rewards[-1] = reward
    return group.model_copy(update={"task": group.task.model_copy(update={"sample": sample})})


async def run_with_groups(stack: Stack, gateway: Gateway, groups: int = 3) -> str:
    """Return a job whose log has more groups; the first of it is `finished_job`'s."""
    record = await finished_job(stack, gateway)
    log = RolloutLog(stack.broker, record.scope)
    for number in range(1, groups + 1):
        words = "for a RARE thing" if number == 1 else f"number {number}"
        await log.append(told(number, words, number % 2, float(number)))
    return record.job


async def found(gateway: Gateway, job: str, query: str) -> dict[str, Any]:
    answer = await gateway.get(f"/api/v1/jobs/{job}/rollouts?{query}")
    assert answer.status == 200, answer.text
    return answer.json


async def test_groups_are_found_by_what_their_episodes_say_and_were_worth(
    stack: Stack, gateway: Gateway
) -> None:
    job = await run_with_groups(stack, gateway)

    async def tasks(query: str) -> list[int]:
        return [one["task"] for one in (await found(gateway, job, query))["groups"]]

    assert await tasks("q=rare+ASKED") == [1]
    assert await tasks("q=asked") == [3, 2, 1]
    assert await tasks("q=nowhere") == []
    assert await tasks("reward_from=2&reward_to=2.5") == [2]
    assert await tasks("sample=1") == [3, 1]
    assert await tasks("tokens_from=100000") == []
    (first,) = (await found(gateway, job, "q=rare"))["groups"]
    assert first["prompt"] == "asked for a RARE thing"
    assert first["answer"]
    assert [one["found"] for one in first["episodes"]] == [True]
    wrong = await gateway.get(f"/api/v1/jobs/{job}/rollouts?reward_from=much")
    assert wrong.status == 400
    assert "reward_from='much'" in wrong.json["error"]["message"]


async def test_what_is_rare_is_sought_through_the_log_from_page_to_page(
    stack: Stack, gateway: Gateway
) -> None:
    job = await run_with_groups(stack, gateway, groups=60)
    page = await found(gateway, job, "q=rare")
    assert [one["task"] for one in page["groups"]] == [1]
    assert page["older"] is None
    first = await found(gateway, job, "q=asked")
    assert len(first["groups"]) >= 24
    more = await found(gateway, job, f"q=asked&before={first['older']}")
    seen = [one["task"] for page in (first, more) for one in page["groups"]]
    assert seen == sorted(set(seen), reverse=True)


async def test_episodes_are_read_one_after_the_other_and_side_by_side(
    stack: Stack, gateway: Gateway, browser: Browser
) -> None:
    job = await run_with_groups(stack, gateway)
    async with watched_page(browser, gateway.url) as page:
        await page.goto(f"/jobs/{job}/rollouts")
        await page.fill("input[name=q]", "rare")
        await page.keyboard.press("Enter")
        await expect(page.locator(".preview")).to_contain_text("RARE")
        await page.locator("td a.chip").first.click()
        await page.wait_for_url("**/rollouts/2/0")
        await page.keyboard.press("Shift+ArrowRight")
        await page.wait_for_url("**/rollouts/3/0")
        await page.keyboard.press("Shift+ArrowLeft")
        await page.wait_for_url("**/rollouts/2/0")
        await page.click("text=Lay another beside it")
        await page.locator("td a.chip").first.click()
        await page.wait_for_url(re.compile("/rollouts/4/0.beside=2"))
        await expect(page.locator(".beside .m-user").first).to_contain_text("RARE")
    last = await gateway.get(f"/jobs/{job}/rollouts/4/0")
    assert 'rel="next"' not in last.text
    odd = await gateway.get(f"/jobs/{job}/rollouts/4/0?beside=x")
    assert odd.status == 400
