"""What is shown of sessions under the Tinker API: models, who waits, and curves."""

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....schemas.tinker.operation import TrainerOffer
from ....schemas.tinker.sessions import ModelCurves, SessionsShown
from ....schemas.wire.errors import DeadlineError, NobodyAnswersError, NotFoundError
from ..sessions import Visitor
from ..web import gateway_of, visitor_of


@dataclass(frozen=True)
class ServiceShown:
    """One base model of the pool, as one user sees it."""

    offer: TrainerOffer
    sessions: SessionsShown | None
    """None while its trainer does not answer."""


async def services_of(request: Request, visitor: Visitor) -> list[ServiceShown]:
    """Return the base models of the pool, with a visitor's models on each."""
    trainers = gateway_of(request).trainers

    async def one(offer: TrainerOffer) -> ServiceShown:
        try:
            seen = await trainers.sessions(visitor.user, visitor.broker, offer.job)
        except (NobodyAnswersError, DeadlineError):
            seen = None
        return ServiceShown(offer, seen)

    offers = await trainers.offers(visitor.broker)
    return list(await asyncio.gather(*(one(offer) for offer in offers)))


async def curves_of(request: Request, visitor: Visitor) -> ModelCurves:
    """Return the curves of the model in the path; raises NotFoundError."""
    trainers, job = gateway_of(request).trainers, request.path_params["job"]
    if job not in {offer.job for offer in await trainers.offers(visitor.broker)}:
        raise NotFoundError(f"there is no base model of job {job[:80]!r}", hint="see `/tinker`")
    model = request.path_params["model"][:80]
    return await trainers.curves(visitor.user, visitor.broker, job, model)


async def get_sessions(request: Request) -> Response:
    """Answer with the base models and the visitor's models."""
    found = await services_of(request, await visitor_of(request))
    told: list[dict[str, Any]] = [
        {
            **one.offer.to_map(),
            "models": one.sessions and [model.to_map() for model in one.sessions.models],
            "tenants": one.sessions and [user.to_map() for user in one.sessions.tenants],
        }
        for one in found
    ]
    return JSONResponse({"services": told})


async def get_metrics(request: Request) -> Response:
    """Answer with the curves of a model."""
    found = await curves_of(request, await visitor_of(request))
    return JSONResponse({"complete": True, **found.points})
