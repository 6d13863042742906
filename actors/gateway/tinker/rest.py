"""The Tinker API's endpoints for runs, sessions, checkpoints and their files.

A download URL needs no key: it contains a ticket that the checkpoint's trainer signed. The gateway
fetches the file from the trainer with its own credentials.
"""

import asyncio
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from ....broker.client.connection import Broker
from ....schemas.config.sections import ADAPTER_FILES
from ....schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    CheckpointAction,
    CheckpointExport,
    FetchFile,
    FilePart,
    TellSession,
    TinkerCheckpoint,
    TrainingRun,
    metadata_of,
)
from ....schemas.tinker.names import CheckpointName, ModelName, session_name
from ....schemas.tinker.operation import ModelCurves, SessionsShown, TrainerOffer
from ....schemas.wire import errors
from ..sessions import Visitor
from ..web import Json, gateway_of, number_in, visitor_of
from .requests import (
    json_body,
    note_to,
    supports_external_weights,
    text_in,
    visitor_and_body,
    visitor_of_key,
)
from .trainers import TrainerRecords, Trainers

Handler = Callable[[Request], Awaitable[Response]]
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_GONE = 410
_FARTHEST = 10**6
_RUN = "training_runs/{run}"
_CHECKPOINT = _RUN + "/checkpoints/{kind}/{name}"


class RestApi:
    """The endpoints of runs, sessions and checkpoints."""

    def __init__(self, records: TrainerRecords) -> None:
        """Answer with the records of all trainers."""
        self._records = records

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return the method, path and handler of each endpoint."""
        return [
            ("POST", "create_session", self.create_session),
            ("POST", "session_heartbeat", self.heartbeat),
            ("POST", "sessions/{session}/finish", self.finish),
            ("GET", "sessions", self.list_sessions),
            ("GET", "sessions/{session}", self.get_session),
            ("GET", "training_runs", self.list_runs),
            ("GET", _RUN, self.get_run),
            ("GET", f"{_RUN}/checkpoints", self.list_of_run),
            ("GET", "checkpoints", self.list_of_user),
            ("DELETE", _CHECKPOINT, partial(self._change, "delete")),
            ("PUT", f"{_CHECKPOINT}/ttl", partial(self._change, "expire")),
            ("POST", f"{_CHECKPOINT}/publish", partial(self._change, "publish")),
            ("DELETE", f"{_CHECKPOINT}/publish", partial(self._change, "unpublish")),
        ]

    async def create_session(self, request: Request) -> Response:
        """Begin a session, which groups the runs and samplers of a client."""
        visitor, _, body = await visitor_and_body(request)
        session, version = f"s{secrets.token_hex(8)}", str(body.get("sdk_version") or "")[:80]
        name = body.get("display_name")
        event = TellSession(
            session=session,
            event="begin",
            user_metadata=metadata_of(body.get("user_metadata")),
            display_name=None if name is None else str(name)[:200],
            sdk_version=version,
        )
        await self._records.report_event(visitor.broker, event)
        notes = note_to(version)
        if body.get("project_id") is not None:
            notes["info_message"] = "this service has no projects: project_id is ignored"
        return JSONResponse({"type": "create_session", "session_id": session, **notes})

    async def heartbeat(self, request: Request) -> Response:
        """Record that a session is alive; 410 for an ended one."""
        visitor, _, body = await visitor_and_body(request)
        event = TellSession(session=session_name(text_in(body, "session_id")), event="beat")
        try:
            state = await self._records.report_event(visitor.broker, event)
        except errors.NobodyAnswersError:  # the trainer restarts; the session continues
            state = "live"
        if state == "over":
            return JSONResponse({"detail": f"session {event.session} is over"}, _GONE)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """End a session; the first reason is kept."""
        visitor, _, body = await visitor_and_body(request)
        reason: Any = body.get("reason") or {}
        if not isinstance(reason, dict):
            raise errors.MessageError(f"reason={str(reason)[:80]!r} must be a JSON object")
        message = str(cast("dict[str, Any]", reason).get("type") or "")
        detail = str(body.get("detail") or "")
        event = TellSession(
            session=session_name(request.path_params["session"]),
            event="finish",
            reason=": ".join(item for item in (message, detail) if item)[:1000],
        )
        await self._records.report_event(visitor.broker, event)
        return JSONResponse({})

    async def list_sessions(self, request: Request) -> Response:
        """Return the ids of sessions."""
        visitor = await visitor_of_key(request)
        reply = await self._records.sessions(visitor.broker, *_page(request, 20))
        return JSONResponse({"sessions": [item.session for item in reply]})

    async def get_session(self, request: Request) -> Response:
        """Return the runs and samplers of a session."""
        visitor = await visitor_of_key(request)
        session = session_name(request.path_params["session"])
        reply = await self._records.session(visitor.broker, session)
        return JSONResponse(
            {
                "training_run_ids": reply.models,
                "sampler_ids": reply.samplers,
                "user_metadata": reply.user_metadata,
                "display_name": reply.display_name,
            }
        )

    async def list_runs(self, request: Request) -> Response:
        """Return training runs, the last used first."""
        visitor = await visitor_of_key(request)
        if request.query_params.get("project_id"):
            raise errors.MessageError("this service has no projects", hint="leave project_id out")
        offset, limit = _page(request, 20)
        runs, total = await self._records.runs(visitor.broker, offset, limit)
        shown = [_run(run) for run in runs]
        return JSONResponse({"training_runs": shown, "cursor": _cursor(offset, limit, total)})

    async def get_run(self, request: Request) -> Response:
        """Return one training run."""
        visitor = await visitor_of_key(request)
        return JSONResponse(_run(await self._records.run(visitor.broker, _model(request))))

    async def list_of_run(self, request: Request) -> Response:
        """Return the checkpoints of a training run, newest first."""
        visitor = await visitor_of_key(request)
        reply = await self._records.checkpoints_of(visitor.broker, _model(request))
        checkpoints = _checkpoints(request, reply)
        return JSONResponse({"checkpoints": checkpoints, "cursor": None})

    async def list_of_user(self, request: Request) -> Response:
        """Return all checkpoints of a user, newest first."""
        visitor = await visitor_of_key(request)
        offset, limit = _page(request, 100)
        listed, total = await self._records.checkpoints(visitor.broker, offset, limit)
        checkpoints = _checkpoints(request, listed)
        return JSONResponse({"checkpoints": checkpoints, "cursor": _cursor(offset, limit, total)})

    async def _change(self, action: CheckpointAction, request: Request) -> Response:
        """Delete a checkpoint, change who may read it, or set when it expires.

        `ttl_seconds` in the body of `expire` counts from now; null: never.
        """
        visitor = await visitor_of_key(request)
        ttl = (await json_body(request))[1].get("ttl_seconds") if action == "expire" else None
        is_valid = isinstance(ttl, int) and not isinstance(ttl, bool) and 1 <= ttl <= 10**10
        if ttl is not None and not is_valid:
            raise errors.MessageError(
                f"ttl_seconds={ttl!r} must be an integer ≥ 1", hint="null: it never expires"
            )
        message = ChangeCheckpoint(path=str(checkpoint_in(request)), action=action, ttl_s=ttl)
        return JSONResponse(_checkpoint(await self._records.change(visitor.broker, message)))


def checkpoint_in(request: Request) -> CheckpointName:
    """Return the checkpoint in a path; raises NotFoundError for an invalid name."""
    named = request.path_params
    return CheckpointName.parse(f"tinker://{named['run']}/{named['kind']}/{named['name']}")


def iso(seconds: float) -> str:
    """Return a time in ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _model(request: Request) -> ModelName:
    return ModelName.parse(request.path_params["run"])


def _page(request: Request, limit: int) -> tuple[int, int]:
    """Return offset and limit of a list; raises MessageError for another value."""
    offset, most = number_in(request, "offset", 0) or 0, number_in(request, "limit", limit) or 0
    return min(offset, _FARTHEST), min(most, _FARTHEST)


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _run(run: TrainingRun) -> dict[str, Any]:
    last, sampled = run.checkpoint, run.sampler_checkpoint
    return {
        "training_run_id": run.model,
        "base_model": run.base,
        "model_owner": run.owner,
        "is_lora": True,
        "lora_rank": run.rank,
        "corrupted": False,
        "last_request_time": iso(run.time),
        "last_checkpoint": None if last is None else _checkpoint(last),
        "last_sampler_checkpoint": None if sampled is None else _checkpoint(sampled),
        "user_metadata": run.user_metadata,
    }


def _checkpoints(request: Request, listed: list[TinkerCheckpoint]) -> list[dict[str, Any]]:
    """Return checkpoints as JSON, without kinds that an older SDK cannot read."""
    reads_all = supports_external_weights(request.headers.get("user-agent", ""))
    return [
        _checkpoint(item) for item in listed if reads_all or "/external_weights/" not in item.path
    ]


def _checkpoint(checkpoint: TinkerCheckpoint) -> dict[str, Any]:
    name = CheckpointName.parse(checkpoint.path)
    return {
        "checkpoint_id": f"{name.kind}/{name.name}",
        "checkpoint_type": _TYPES[name.kind],
        "time": iso(checkpoint.time),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.is_public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": iso(checkpoint.expires) if checkpoint.expires else None,
    }


# -- downloads -------------------------------------------------------------------------------------

FILES = "/tinker/api/v1/files"
_ARCHIVE = "checkpoint.tar"
_COMPLETE = "checkpoint_complete"
"""File in an archive with which the SDK recognises a complete one."""


class Downloads:
    """The endpoints of checkpoints' files."""

    def __init__(self, trainers: Trainers, records: TrainerRecords) -> None:
        """Fetch parts of files from trainers."""
        self._trainers = trainers
        self._records = records

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return the method, path and handler of each endpoint."""
        return [
            ("GET", f"{_CHECKPOINT}/external_weights_urls", self.urls),
            ("GET", f"{_CHECKPOINT}/archive", self.archive),
            ("GET", "files/{job}/{ticket}/{file}", self.file),
        ]

    async def urls(self, request: Request) -> Response:
        """Return a URL for each file of a checkpoint."""
        job, export = await self._exported(request)
        place = _place(request, job, export)
        urls = {file.name: f"{place}/{file.name}" for file in export.files}
        return JSONResponse({"urls": urls, "expires": iso(export.expires)})

    async def archive(self, request: Request) -> Response:
        """Redirect to the archive of a checkpoint, which older SDKs request."""
        job, export = await self._exported(request)
        if {file.name for file in export.files} != set(ADAPTER_FILES):
            raise errors.NotFoundError(
                "an encrypted checkpoint has no archive",
                hint="use the URLs of its files",
            )
        expires = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(export.expires))
        url = f"{_place(request, job, export)}/{_ARCHIVE}"
        return RedirectResponse(url, 302, headers={"expires": expires})

    async def file(self, request: Request) -> Response:
        """Return a file, or the archive of a checkpoint."""
        broker, named = await self._own(request), request.path_params
        job, ticket, name = named["job"], named["ticket"], named["file"]

        async def part(file: str, offset: int) -> FilePart:
            try:
                message = FetchFile(ticket=ticket, file=file, offset=offset)
            except ValidationError:
                raise errors.NotFoundError("this is not a URL of a checkpoint's file") from None
            return await self._trainers.ask(broker, job, "fetch", message, FilePart)

        if name != _ARCHIVE:
            first = await part(name, 0)
            return _streamed(_contents(part, name, first), first.size_bytes, name)
        firsts = [await part(item, 0) for item in ADAPTER_FILES]
        block = tarfile.BLOCKSIZE  # to which each file is padded, after a header of one
        size = sum(block + -(-item.size_bytes // block) * block for item in firsts) + 3 * block
        return _streamed(_archived(part, firsts), size, name)

    async def _exported(self, request: Request) -> tuple[str, CheckpointExport]:
        visitor = await visitor_of_key(request)
        await self._own(request)
        return await self._records.export(visitor.broker, checkpoint_in(request))

    async def _own(self, request: Request) -> Broker:
        """Return the gateway's own connection; raises StateError without one."""
        gateway = gateway_of(request)
        if not gateway.sessions.with_keys:
            return (await gateway.sessions.visitor(session=None, key=None)).broker
        if gateway.own is None:
            raise errors.StateError(
                "this gateway cannot send files: it has no credentials",
                hint="start it with TINKERMQ_CREDENTIALS (gateway.creds of `tinkermq init`)",
            )
        return gateway.own


Fetch = Callable[[str, int], Awaitable[FilePart]]


async def _contents(fetch: Fetch, name: str, first: FilePart) -> AsyncIterator[bytes]:
    """Yield the contents of a file whose first part was fetched."""
    yield first.data
    sent = len(first.data)
    while sent < first.size_bytes:
        part = await fetch(name, sent)
        if not part.data or part.size_bytes != first.size_bytes:
            raise errors.StateError(f"{name} was saved anew while it was sent")
        sent += len(part.data)
        yield part.data


async def _archived(fetch: Fetch, firsts: list[FilePart]) -> AsyncIterator[bytes]:
    """Yield a tar archive of a checkpoint."""
    for name, first in zip(ADAPTER_FILES, firsts, strict=True):
        yield _header(name, first.size_bytes)
        async for some in _contents(fetch, name, first):
            yield some
        yield bytes(-first.size_bytes % tarfile.BLOCKSIZE)
    yield _header(_COMPLETE, 0)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, int(time.time()), 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def _streamed(parts: AsyncIterator[bytes], size: int, name: str) -> Response:
    headers = {
        "content-length": str(size),
        "content-disposition": f'attachment; filename="{name}"',
    }
    return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)


def _place(request: Request, job: str, export: CheckpointExport) -> str:
    base = str(request.base_url).rstrip("/")
    if gateway_of(request).secure:
        base = base.replace("http://", "https://", 1)
    return f"{base}{FILES}/{job}/{export.ticket}"


# -- sessions for pages and the REST interface -----------------------------------------------------


@dataclass(frozen=True)
class ServiceView:
    """One base model of the pool, with a user's models."""

    offer: TrainerOffer
    sessions: SessionsShown | None
    """None while its trainer does not answer."""


async def services_of(request: Request, visitor: Visitor) -> list[ServiceView]:
    """Return the base models of the pool with a visitor's models."""
    trainers = gateway_of(request).trainers

    async def view(offer: TrainerOffer) -> ServiceView:
        try:
            return ServiceView(offer, await trainers.sessions(visitor.broker, offer.job))
        except (errors.NobodyAnswersError, errors.DeadlineError):
            return ServiceView(offer, None)

    offers = await trainers.offers(visitor.broker)
    return list(await asyncio.gather(*(view(offer) for offer in offers)))


async def curves_of(request: Request, visitor: Visitor) -> ModelCurves:
    """Return the curves of the model in the path; raises NotFoundError."""
    trainers, job = gateway_of(request).trainers, request.path_params["job"]
    if job not in {offer.job for offer in await trainers.offers(visitor.broker)}:
        raise errors.NotFoundError(
            f"there is no base model of job {job[:80]!r}", hint="see `/tinker`"
        )
    model = request.path_params["model"][:80]
    return await trainers.curves(visitor.broker, job, model)


async def get_sessions(request: Request) -> Response:
    """Return the base models and the visitor's models."""
    reply = await services_of(request, await visitor_of(request))
    shown: list[dict[str, Any]] = [
        {
            **item.offer.to_map(),
            "models": item.sessions and [model.to_map() for model in item.sessions.models],
            "tenants": item.sessions and [user.to_map() for user in item.sessions.tenants],
        }
        for item in reply
    ]
    return Json({"services": shown})


async def get_metrics(request: Request) -> Response:
    """Return the curves of a model."""
    reply = await curves_of(request, await visitor_of(request))
    return Json({"complete": True, **reply.points})
