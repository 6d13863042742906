"""Episodes are found by their words, reward, version, length and row; read by key, side by side."""

import re
from typing import Any

import pytest
from playwright.async_api import expect
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.rollout import Group

from tests.actors.gateway.test_episodes import two_turns
from tests.actors.gateway.test_rest import finished_job
from tests.support.browser import Browser, watched_page
from tests.support.gateway import Gateway
from tests.support.groups import make_group
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
        await page.keyboard.press("ArrowRight")
        await page.wait_for_url("**/rollouts/3/0")
        await page.keyboard.press("ArrowLeft")
        await page.wait_for_url("**/rollouts/2/0")
        await page.click("text=Lay another beside it")
        await page.locator("td a.chip").first.click()
        await page.wait_for_url(re.compile("/rollouts/4/0.beside=2"))
        await expect(page.locator(".beside .m-user").first).to_contain_text("RARE")
    last = await gateway.get(f"/jobs/{job}/rollouts/4/0")
    assert 'rel="next"' not in last.text
    odd = await gateway.get(f"/jobs/{job}/rollouts/4/0?beside=x")
    assert odd.status == 400
