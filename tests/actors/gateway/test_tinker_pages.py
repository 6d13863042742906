"""The pages of sessions under the Tinker API, in a real browser, and what REST tells of them."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import expect
from tinkermq.actors.tinker.models import Models
from tinkermq.actors.tinker.service import Introspection
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.tinker.names import ModelName
from tinkermq.schemas.tinker.operation import (
    ModelInfo,
    ModelOperation,
    TrainerOffer,
    TrainerOffers,
)
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import rpc

from tests.support.browser import Browser, watched_page
from tests.support.gateway import Gateway, run_gateway

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

MODEL, BASE = "s1:train:0", "org/tiny"


def trained() -> Models:
    """Return what a trainer knows of a user's model after 300 steps, and of another user's."""
    models = Models()
    for user, session, steps in (("local", "s1", 300), ("bob", "s2", 1)):
        model = models.add(user, ModelName(session, 0))
        model.applied = 2 * steps
        model.info = ModelInfo(model=f"{session}:train:0", base=BASE, folder="f", arch="a", rank=4)
        for step in range(steps):
            for _ in range(2):  # two passes before each step
                model.history.add_pass({"loss:sum": 1000.0 - step}, forward_only=False)
            passed = model.history.join_passes()
            model.history.add_step({**passed, "grad_norm": 0.5})
    behind_gap = ModelOperation(kind="optim_step", model=MODEL, seq=602, body=b"x" * 2000)
    models.enqueue("local", behind_gap)
    return models


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def service(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A gateway, with one base model whose trainer answers and one whose trainer is away."""

    async def offers(_: Empty) -> TrainerOffers:
        return TrainerOffers(
            offers=[
                TrainerOffer(job=job, base=base, max_context=64, max_rank=8)
                for job, base in (("here", BASE), ("away", "org/away"))
            ]
        )

    folder = tmp_path_factory.mktemp("pages")
    async with (
        await connect(nats_server.url, name="trainer") as broker,
        await Service.start(broker, name="pool", description="Offers") as answering,
        run_gateway(nats_server.url, folder) as gateway,
    ):
        await answering.endpoint("trainers", rpc("*", "scheduler", "trainers"), Empty, offers)
        await Introspection(trained(), BASE).open(answering, "tinker-here")
        yield gateway


async def test_ones_models_their_curves_and_who_waits_are_shown(
    service: Gateway, browser: Browser
) -> None:
    async with watched_page(browser, service.url) as page:
        await page.goto("/tinker")
        row = page.locator("tr", has_text=MODEL)
        await expect(row).to_contain_text("for operation 601, which has not arrived")
        await expect(row).to_contain_text("2.0 kB")
        await expect(row).to_contain_text("grad_norm 0.500")
        await expect(page.locator("main")).to_contain_text("bob")
        await expect(page.locator("main")).not_to_contain_text("s2:train:0")
        await expect(page.locator("main")).to_contain_text("does not answer at the moment")
        await page.click(f"text={MODEL}")
        await expect(page.locator("h1")).to_have_text(MODEL)
        await expect(page.locator("[data-chart='loss:sum'] canvas")).to_be_visible()
        await expect(page.locator("#curves-note")).to_contain_text("Each point stands for 2 steps")
        await expect(page.locator("#charts")).to_have_attribute("data-last", "298")


async def test_rest_tells_of_ones_own_models_only(service: Gateway) -> None:
    told = (await service.get("/api/v1/tinker")).json["services"]
    assert [one["job"] for one in told] == ["here", "away"]
    assert [one["info"]["model"] for one in told[0]["models"]] == [MODEL]
    assert told[1]["models"] is None
    series = (await service.get(f"/api/v1/tinker/here/{MODEL}/metrics")).json["series"]
    assert series["loss:sum"]["high"][0] == 2000.0
    assert series["loss:sum"]["low"][-1] == 2 * 701.0
    for path in ("here/s2:train:0", "none/s1:train:0"):
        missing = await service.get(f"/api/v1/tinker/{path}/metrics")
        assert missing.status == 404
        assert "there is no" in missing.json["error"]["message"]
