"""The Playground page in a real browser."""

import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import expect
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.infer import ChatRequest
from tinkermq.schemas.wire.errors import ConfigError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.gateway.canned import Canned, canned_server
from tests.actors.gateway.test_rest import HOSTILE
from tests.support.browser import Browser, watched_page
from tests.support.gateway import Gateway, run_gateway

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


ANSWER = "article.m-assistant"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def own(nats_server: NatsServer) -> AsyncIterator[Broker]:
    """A broker without a scheduler, which would look for the nodes of what is served."""
    async with await connect(nats_server.url, name="test") as connection:
        yield connection


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def page_of(own: Broker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway to it."""
    async with run_gateway(own.url, tmp_path_factory.mktemp("gateway")) as running:
        yield running


def named() -> tuple[JobScope, str]:
    """Return a job, and what it serves, that no other test has."""
    number = uuid.uuid4().hex[:8]
    return JobScope("local", f"job-{number}"), f"run-{number}@4"


@pytest_asyncio.fixture(loop_scope="session")
async def served(own: Broker) -> AsyncIterator[Canned]:
    """A served model."""
    async with canned_server(own, *named()) as one:
        yield one


async def test_an_answer_is_shown_with_its_tokens_and_the_next_one_knows_of_it(
    served: Canned, page_of: Gateway, browser: Browser, tmp_path: Path
) -> None:
    served.words = ["Hel", HOSTILE]
    async with watched_page(browser, page_of.url) as page:
        await page.goto(f"/playground?model={served.model}")
        await page.fill("textarea[name=text]", "hi")
        await page.click("button:text('Send')")
        await expect(page.locator(f"{ANSWER} > pre")).to_have_text(f"Hel{HOSTILE}")
        await expect(page.locator(f"{ANSWER} .tok")).to_have_text(["Hel", HOSTILE])
        await expect(page.locator(f"{ANSWER} .tok").nth(1)).to_have_class("tok made l2")
        await expect(page.locator(f"{ANSWER} header")).to_contain_text("2 tokens")
        assert await page.evaluate("window.hacked === undefined")
        await page.fill("input[name=temperature]", "0.5")
        await page.fill("textarea[name=text]", "and?")
        await page.press("textarea[name=text]", "Control+Enter")
        await expect(page.locator(ANSWER)).to_have_count(2)
        await expect(page.locator("[data-again]")).to_be_visible()
        async with page.expect_download() as download:
            await page.click("button:text('JSON')")
        await (await download.value).save_as(tmp_path / "said.json")
    asked = served.asked[-1]
    assert isinstance(asked, ChatRequest)
    assert [one.role for one in asked.messages] == ["user", "assistant", "user"]
    assert (asked.decoding.temperature, served.asked[-2].decoding.temperature) == (0.5, 1.0)
    said = json.loads((tmp_path / "said.json").read_text())
    assert [one["content"] for one in said["messages"]][:2] == ["hi", f"Hel{HOSTILE}"]


async def test_an_answer_is_stopped_and_an_error_is_told_once(
    served: Canned, page_of: Gateway, browser: Browser
) -> None:
    served.hang = True
    async with watched_page(browser, page_of.url) as page:
        await page.goto(f"/playground?model={served.model}")
        await page.fill("textarea[name=text]", "hi")
        await page.click("button:text('Send')")
        await expect(page.locator(f"{ANSWER} .tok")).to_have_count(2)
        await page.click("button:text('Stop')")
        await served.cancelled.wait()
        await expect(page.locator("[data-stop]")).to_be_hidden()
        served.error, served.hang = ConfigError("the prompt is too long"), False
        await page.fill("textarea[name=text]", "more")
        await page.click("button:text('Send')")
        await expect(page.locator(f"{ANSWER} .problem")).to_contain_text("the prompt is too long")
        await expect(page.locator(".problem")).to_have_count(1)


async def test_a_model_that_does_not_answer_yet_is_waited_for(
    own: Broker, page_of: Gateway, browser: Browser
) -> None:
    scope, model = named()
    async with watched_page(browser, page_of.url) as page:
        await page.goto("/playground")
        await expect(page.locator("[data-offers]")).to_contain_text("Nothing is served")
        await page.goto(f"/playground?model={model}&job=job-1")
        await expect(page.locator("[data-note]")).to_contain_text(f"{model} does not answer yet")
        await expect(page.locator("button:text('Send')")).to_be_disabled()
        async with canned_server(own, scope, model):
            await expect(page.locator("button:text('Send')")).to_be_enabled()
            serving = page.locator("[data-serving]")
            await expect(serving).to_contain_text("keeps its slot of the pool")
            await expect(serving).to_have_attribute("action", f"/jobs/{scope.job}/stop")
            await expect(page.locator("[data-offers]")).to_be_hidden()


# Episodes are found by their words, reward, version, length and row; read by key, side by side.
