"""Shows users their models, the curves of these, and who waits for the trainer."""

import time
from collections import Counter

from ...broker.client.rpc import RequestContext, Service
from ...schemas.tinker.names import ModelName
from ...schemas.tinker.operation import AboutModel
from ...schemas.tinker.sessions import (
    AboutSessions,
    ModelCurves,
    ModelShown,
    SessionsShown,
    TenantShown,
)
from ...schemas.wire.errors import NotFoundError
from ...schemas.wire.subjects import rpc
from .models import Models, TrainedModel


class Showing:
    """Answers what users ask about their sessions."""

    def __init__(self, models: Models, base: str) -> None:
        """Show `models`, all of one base model."""
        self._models = models
        self._base = base

    async def open(self, service: Service, name: str) -> None:
        """Listen to users."""
        await service.endpoint("sessions", rpc("*", name, "sessions"), AboutSessions, self._list)
        await service.endpoint("curves", rpc("*", name, "curves"), AboutModel, self._curves)

    async def _list(self, _: AboutSessions, context: RequestContext) -> SessionsShown:
        mine = [self._shown(one) for one in self._models if one.user == context.user]
        return SessionsShown(
            base=self._base, models=[one for one in mine if one], tenants=self._tenants()
        )

    async def _curves(self, request: AboutModel, context: RequestContext) -> ModelCurves:
        model = self._models.find(context.user, ModelName.parse(request.model))
        shown = None if model is None else self._shown(model)
        if model is None or shown is None:
            raise NotFoundError(
                f"there is no model {request.model}", hint="see your models: `/tinker`"
            )
        return ModelCurves(shown=shown, points=model.history.points())

    def _shown(self, model: TrainedModel) -> ModelShown | None:
        """Return what is to be seen of a model, None for one that is not made yet."""
        if model.info is None:
            return None
        return ModelShown(
            info=model.info.model_copy(update={"applied": model.applied}),
            steps=model.history.steps,
            tokens=model.tokens,
            waiting=len(model.waiting),
            waiting_bytes=_waiting_bytes(model),
            reason=self._reason(model),
            idle_s=time.monotonic() - model.used if model.used else None,
            last=model.history.last,
        )

    def _reason(self, model: TrainedModel) -> str:
        if model.has_gap:
            return f"for operation {model.applied + 1}, which has not come"
        before = self._models.num_before(model)
        return f"its turn; {before} other models have something to be done" if model.waiting else ""

    def _tenants(self) -> list[TenantShown]:
        models, waiting, size = Counter[str](), Counter[str](), Counter[str]()
        tokens = Counter[str]()
        for model in self._models:
            models[model.user] += 1
            tokens[model.user] += model.tokens
            waiting[model.user] += len(model.waiting)
            size[model.user] += _waiting_bytes(model)
        return [
            TenantShown(
                user=user,
                models=count,
                tokens=tokens[user],
                waiting=waiting[user],
                waiting_bytes=size[user],
            )
            for user, count in sorted(models.items())
        ]


def _waiting_bytes(model: TrainedModel) -> int:
    return sum(len(one.body) for one in model.waiting.values())
