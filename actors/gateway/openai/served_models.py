"""What the name of a model means: a job that serves it, or a checkpoint of a Tinker service."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from ....broker.client.connection import Broker
from ....schemas.infer import ChatRequest, CompletionRequest, InferPart
from ....schemas.tinker.names import is_path
from ....schemas.wire.errors import ConfigError
from ..tinker.trainers import Trainers
from .serving_jobs import ServingJobs


class ServedModel(Protocol):
    """Something that answers."""

    @property
    def adapter(self) -> str:
        """What a request names, so that it is answered with that."""
        ...

    def ask(
        self, broker: Broker, query: ChatRequest | CompletionRequest
    ) -> AsyncGenerator[InferPart, None]:
        """Have a request answered; closing the generator cancels the work."""
        ...

    def shown(self) -> dict[str, Any]:
        """Return it as OpenAI tells of a model."""
        ...


@dataclass(frozen=True)
class SampledPath:
    """A checkpoint that the samplers of a Tinker service answer with."""

    adapter: str
    """Its path."""
    job: str
    """The service."""
    trainers: Trainers

    def ask(
        self, broker: Broker, query: ChatRequest | CompletionRequest
    ) -> AsyncGenerator[InferPart, None]:
        """Ask one of the samplers; closing the generator cancels the work."""
        return self.trainers.answer(broker.user, broker, self.job, query)

    def shown(self) -> dict[str, Any]:
        """Return it as OpenAI tells of a model."""
        told = {"id": self.adapter, "object": "model", "created": 0}
        return {**told, "owned_by": "tinker", "job": self.job}


class ServedModels:
    """The models of each user."""

    def __init__(self, trainers: Trainers) -> None:
        """Find checkpoints at `trainers`."""
        self.serving = ServingJobs()
        """The jobs that serve."""
        self._trainers = trainers

    async def find(self, broker: Broker, name: str) -> ServedModel:
        """Return what answers under a name; raises NotFoundError, NobodyAnswersError."""
        if is_path(name):
            for serving in await self.serving.list(broker):
                if serving.is_called(name):
                    return serving
            return await self._sampled(broker, name)
        return await self.serving.find(broker, name)

    async def _sampled(self, broker: Broker, path: str) -> SampledPath:
        name = await self._trainers.source(broker, path)
        if name.kind == "external_weights":
            raise ConfigError(
                f"{path} was saved to be downloaded, and is not sampled from",
                hint="save the model with save_weights_for_sampler, and name that path",
            )
        job = await self._trainers.job_of_checkpoint(broker.user, broker, name)
        return SampledPath(str(name), job, self._trainers)
