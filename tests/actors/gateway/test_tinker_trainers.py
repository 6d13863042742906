"""Which trainer has a model: one that is away may have it, so nobody is told that there is none."""

import pytest
from tinkermq.actors.gateway.tinker.trainers import Trainers
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import RequestContext, Service
from tinkermq.schemas.tinker.names import CheckpointName, ModelName
from tinkermq.schemas.tinker.operation import (
    AboutCheckpoint,
    AboutModel,
    ModelInfo,
    TrainerOffer,
    TrainerOffers,
)
from tinkermq.schemas.wire.errors import (
    CheckpointGoneError,
    NobodyAnswersError,
    NotFoundError,
)
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
        assert await trainers.job_of_base(own_broker, "b/away") == "away"
        with pytest.raises(NotFoundError, match="this pool offers b/away, b/here"):
            await trainers.job_of_base(own_broker, "b/other")


async def test_that_a_checkpoint_has_expired_is_told_by_the_service_that_had_it(
    own_broker: Broker,
) -> None:
    async def offers(_: Empty) -> TrainerOffers:
        return offered("had", "never", "away")

    async def had(request: AboutCheckpoint) -> ModelInfo:
        raise CheckpointGoneError(f"the checkpoint {request.path} has expired")

    async def never(request: AboutCheckpoint) -> ModelInfo:
        raise NotFoundError(f"there is no checkpoint {request.path}")

    name = CheckpointName(MODEL, "weights", "best")
    async with await Service.start(own_broker, name="pool", description="Offers") as service:
        await service.endpoint("trainers", rpc("*", "scheduler", "trainers"), Empty, offers)
        for job, answer in (("had", had), ("never", never)):
            subject = rpc("*", f"tinker-{job}", "checkpoint")
            await service.endpoint(job, subject, AboutCheckpoint, answer)
        with pytest.raises(CheckpointGoneError, match="best has expired"):
            await Trainers().job_of_checkpoint("local", own_broker, name)
