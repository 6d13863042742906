"""Which trainer has a model: one that is away may have it, so nobody is told that there is none."""

import pytest
from tinkermq.actors.gateway.tinker.trainers import Trainers
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import RequestContext, Service
from tinkermq.schemas.tinker.names import ModelName
from tinkermq.schemas.tinker.operation import AboutModel, ModelInfo, TrainerOffer, TrainerOffers
from tinkermq.schemas.wire.errors import NobodyAnswersError, NotFoundError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import rpc

MODEL = ModelName("s1", 0)


def offered(*jobs: str) -> TrainerOffers:
    return TrainerOffers(
        offers=[TrainerOffer(job=job, base=f"b/{job}", max_context=64, max_rank=8) for job in jobs]
    )


async def test_a_model_whose_trainer_may_be_away_is_not_said_to_be_missing(
    own_broker: Broker,
) -> None:
    async def info(request: AboutModel, context: RequestContext) -> ModelInfo:
        if context.user != "local" or request.model != str(MODEL):
            raise NotFoundError(f"there is no model {request.model}")
        return ModelInfo(model=request.model, base="b/here", folder="f", arch="a", rank=4)

    async def offers(_: Empty) -> TrainerOffers:
        return offered("away", "here")

    async with await Service.start(own_broker, name="pool", description="Offers") as service:
        await service.endpoint("trainers", rpc("*", "scheduler", "trainers"), Empty, offers)
        await service.endpoint("info", rpc("*", "tinker-here", "info"), AboutModel, info)
        trainers = Trainers()
        assert await trainers.job_of_model("local", own_broker, MODEL) == "here"
        with pytest.raises(NobodyAnswersError):
            await trainers.job_of_model("local", own_broker, ModelName("s1", 1))
        assert await trainers.job_of_base("local", own_broker, "b/away") == "away"
        with pytest.raises(NotFoundError, match="this pool offers b/away, b/here"):
            await trainers.job_of_base("local", own_broker, "b/other")
