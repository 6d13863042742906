"""The endpoints of the Tinker API, under `/tinker/api/v1`.

The gateway stores nothing: the request id identifies the operation, and a repeated request gets the
result of the first. So any gateway can answer any request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ....schemas.tinker import sampling
from ....schemas.tinker.checkpoints import TellSession
from ....schemas.tinker.names import CheckpointName, ModelName, OperationName, session_name
from ....schemas.tinker.operation import AwaitResult, ModelOperation, OperationKind
from ....schemas.wire import errors
from ..sessions import Visitor
from . import requests
from .rest import Downloads, RestApi
from .trainers import TrainerRecords, Trainers

# -- information about the service -----------------------------------------------------------------

Handler = Callable[[Request], Awaitable[Response]]
_CHUNK_BYTES = 2_000_000
_CONFIG_S = 300
SAMPLES_AT_ONCE = 192
"""Open samples of one sampling client, each on a connection of its own.

Fewer than a user's running requests (`MAX_RUNNING`), so that training and heartbeats continue.
"""


_ABOUT: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "client/config"): {
        "proto_compress_fwdbwd": True,
        "fwdbwd_max_chunk_bytes_count": _CHUNK_BYTES,
        "sample_max_concurrent_requests": SAMPLES_AT_ONCE,
    },
    ("POST", "client/dynamic_config"): {
        "refresh_interval_sec": _CONFIG_S,
        "sample_cancel_enabled": True,
    },
    ("POST", "telemetry"): {"status": "accepted"},
    ("GET", "healthz"): {"status": "ok"},
}
"""Endpoints about the service, by method and path, and their replies. Telemetry is dropped."""


PREFIX = "/tinker/api/v1"
_NOTHING = b""
"""Body of a refused operation. It is submitted and fails, so that later operations do not wait for
its number."""
_GONE = 410
_PAUSE_S = 1.0
"""Pause before the reply for a missing trainer, since clients poll again at once."""


def routes(trainers: Trainers) -> list[Route]:
    """Return the endpoints, for the gateway's application."""
    records = TrainerRecords(trainers)
    api = TinkerApi(trainers, records)

    def always(reply: dict[str, Any]) -> Handler:
        async def answer(_: Request) -> Response:
            return JSONResponse(reply)

        return answer

    posts: dict[str, Handler] = {
        "create_model": api.create_model,
        "get_info": api.get_info,
        "weights_info": api.weights_info,
        "forward_backward": api.forward_backward,
        "load_weights": api.load_weights,
        "retrieve_future": api.retrieve_future,
        "cancel_future": api.cancel_future,
        "create_sampling_session": api.create_sampling_session,
        "asample": api.sample,
    }
    kinds: tuple[OperationKind, ...] = (
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
    )
    for kind in kinds:
        posts[kind] = partial(api.operation, kind)
    return [
        *(
            Route(f"{PREFIX}/{path}", _guarded(handler), methods=["POST"])
            for path, handler in posts.items()
        ),
        *(
            Route(f"{PREFIX}/{path}", _guarded(handler), methods=[method])
            for method, path, handler in (
                ("GET", "samplers/{sampler}", api.sampler),
                ("GET", "get_server_capabilities", api.capabilities),
                *((method, path, always(reply)) for (method, path), reply in _ABOUT.items()),
                *RestApi(records).routes(),
                *Downloads(trainers, records).routes(),
            )
        ),
        Route(
            PREFIX + "/{path:path}",
            _guarded(_not_offered),
            methods=["GET", "POST", "PUT", "DELETE"],
        ),
    ]


class TinkerApi:
    """The endpoints about models, their operations and samples."""

    def __init__(self, trainers: Trainers, records: TrainerRecords) -> None:
        """Send requests to trainers and samplers."""
        self._trainers = trainers
        self._records = records

    async def capabilities(self, request: Request) -> Response:
        """Return the base models."""
        visitor = await requests.visitor_of_key(request)
        models = [
            {
                "model_name": offer.base,
                "max_context_length": offer.max_context or None,
                "trainable": True,
                "sampleable": True,
            }
            for offer in await self._trainers.offers(visitor.broker)
        ]
        return JSONResponse({"supported_models": models})

    async def create_model(self, request: Request) -> Response:
        """Make a model on a base model."""
        visitor, raw, body = await requests.visitor_and_body(request)
        model = requests.new_model(body)
        base = requests.text_in(body, "base_model")
        job = await self._trainers.job_of_base(visitor.broker, base)
        name = OperationName(model, 0)
        return await self._submit(visitor, "create_model", name, raw, job=job)

    async def load_weights(self, request: Request) -> Response:
        """Make a model from a checkpoint, or load one into a model."""
        visitor, raw, body = await requests.visitor_and_body(request)
        path = requests.text_in(body, "path")
        if body.get("model_id") is not None:
            number = requests.name_of_json(body)
            try:
                CheckpointName.parse(path)
            except errors.NotFoundError:
                await self._submit(visitor, "load_weights", number, _NOTHING)
                raise
            return await self._submit(visitor, "load_weights", number, raw)
        source = CheckpointName.parse(path)
        name = OperationName(requests.new_model(body), 0)
        job = await self._trainers.job_of_checkpoint(visitor.broker, source)
        return await self._submit(visitor, "load_weights", name, raw, job=job)

    async def get_info(self, request: Request) -> Response:
        """Return information about a model."""
        visitor, _, body = await requests.visitor_and_body(request)
        model = ModelName.parse(requests.text_in(body, "model_id"))
        job = await self._trainers.job_of_model(visitor.broker, model)
        info = await self._trainers.info(visitor.broker, model, job)
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": info.model,
                "model_name": info.base,
                "is_lora": True,
                "lora_rank": info.rank,
                "optimizer_config": {"type": "adamw"},
                "model_data": {
                    "arch": info.arch,
                    "model_name": info.base,
                    "tokenizer_id": info.folder,
                },
            }
        )

    async def weights_info(self, request: Request) -> Response:
        """Return information about a checkpoint."""
        visitor, _, body = await requests.visitor_and_body(request)
        name = CheckpointName.parse(requests.text_in(body, "tinker_path"))
        info = await self._trainers.checkpoint(visitor.broker, name)
        return JSONResponse(
            {
                "base_model": info.base,
                "is_lora": True,
                "lora_rank": info.rank,
                "train_unembed": info.train_unembed,
                "train_mlp": info.train_mlp,
                "train_attn": info.train_attn,
                "optimizer_config": {"type": "adamw"},
            }
        )

    async def forward_backward(self, request: Request) -> Response:
        """Submit a loss; errors in its data are in the result."""
        visitor = await requests.visitor_of_key(request)
        if not request.headers.get("content-type", "").startswith(requests.PROTOBUF):
            raise errors.MessageError(
                "forward_backward must be protobuf", hint="upgrade the SDK: tinker>=0.25"
            )
        raw = await request.body()
        encoding = request.headers.get("content-encoding", "")
        if encoding not in ("", "identity", "zstd"):
            raise errors.MessageError(
                f"the body is encoded as {encoding!r}", hint="send zstd, or plain"
            )
        may_be_large = encoding == "zstd" or len(raw) > requests.LARGE
        name = await requests.in_thread(
            may_be_large, lambda: requests.name_of_protobuf(raw, encoding == "zstd")
        )
        try:
            requests.check_size(raw)
        except HTTPException:
            await self._submit(visitor, "forward_backward", name, _NOTHING)
            raise
        return await self._submit(
            visitor, "forward_backward", name, raw, is_zstd=encoding == "zstd"
        )

    async def operation(self, kind: OperationKind, request: Request) -> Response:
        """Submit another operation on a model."""
        visitor, raw, body = await requests.visitor_and_body(request)
        return await self._submit(visitor, kind, requests.name_of_json(body), raw)

    async def retrieve_future(self, request: Request) -> Response:
        """Wait for a result and return it, or 408 after a while."""
        visitor, _, body = await requests.visitor_and_body(request)
        text = requests.text_in(body, "request_id")
        if (sample := sampling.SampleName.parse(text)) is not None:
            return await self._sampled(visitor, sample)
        name = OperationName.parse(text)
        awaited = AwaitResult(model=str(name.model), seq=name.seq)
        try:
            job = await self._trainers.job_of_model(visitor.broker, name.model)
            result = await self._trainers.result(visitor.broker, job, awaited)
        except (errors.BrokerError, errors.DeadlineError, errors.NobodyAnswersError) as error:
            await asyncio.sleep(_PAUSE_S)  # restarts; accepted operations are in its log
            return requests.not_ready(str(name), error.message)
        return requests.answered(str(name), result)

    async def cancel_future(self, request: Request) -> Response:
        """Cancel a sample."""
        visitor, _, body = await requests.visitor_and_body(request)
        name = sampling.SampleName.parse(text := requests.text_in(body, "request_id"))
        if name is None:
            raise errors.MessageError(
                f"request {text[:80]!r} cannot be cancelled", hint="cancel samples only"
            )
        job = await self._trainers.job_of_sampler(visitor.broker, name.sampler)
        cancelled = sampling.AwaitSample(
            request=f"{name.sampler}:{name.seq}", wait_s=0, cancel=True
        )
        with suppress(errors.NotFoundError, errors.DeadlineError):  # it, or its sampler, has ended
            await self._trainers.sampled(visitor.broker, job, name.actor, cancelled)
        return JSONResponse({})

    async def create_sampling_session(self, request: Request) -> Response:
        """Begin a sampling session on a checkpoint or a base model."""
        visitor, _, body = await requests.visitor_and_body(request)
        number = requests.number_in_body(
            body.get("sampling_session_seq_id"), "sampling_session_seq_id", 0
        )
        session = requests.text_in(body, "session_id")
        if body.get("model_path") is not None:
            path = CheckpointName.parse(requests.text_in(body, "model_path"))
            await self._trainers.checkpoint(visitor.broker, path)
            name = sampling.SamplerName.of_checkpoint(session, number, path)
        else:
            name = sampling.SamplerName.of_base(
                session, number, requests.text_in(body, "base_model")
            )
            await self._trainers.job_of_sampler(visitor.broker, name)
        opened = TellSession(session=session_name(session), event="sampler", sampler=str(name))
        await self._records.report_event(visitor.broker, opened)
        fields = {"type": "create_sampling_session", "sampling_session_id": str(name)}
        return JSONResponse(fields)

    async def sampler(self, request: Request) -> Response:
        """Return the checkpoint or base model of a sampling session."""
        visitor = await requests.visitor_of_key(request)
        name = sampling.SamplerName.parse(request.path_params["sampler"])
        if (base := name.base) is None:
            base = (await self._trainers.checkpoint(visitor.broker, name.checkpoint)).base
        path = None if name.base is not None else str(name.checkpoint)
        return JSONResponse({"sampler_id": str(name), "base_model": base, "model_path": path})

    async def sample(self, request: Request) -> Response:
        """Submit a prompt to a sampler; `retrieve_future` returns its continuations."""
        visitor, raw, body = await requests.visitor_and_body(request)
        if len(raw) > sampling.MAX_SAMPLE_BYTES:
            raise HTTPException(413, f"a prompt may have {sampling.MAX_SAMPLE_BYTES:,} bytes")
        sampler = sampling.SamplerName.parse(requests.text_in(body, "sampling_session_id"))
        seq = requests.number_in_body(body.get("seq_id"), "seq_id", 0, 10**19)
        job = await self._trainers.job_of_sampler(visitor.broker, sampler)
        sample = sampling.SampleRequest(source=sampler.source, request=f"{sampler}:{seq}", body=raw)
        accepted = await self._trainers.sample(visitor.broker, job, sample)
        name = sampling.SampleName(sampler, seq, accepted.actor)
        ids = [f"{sampler}:{seq}:{number}" for number in range(accepted.num_samples)]
        return JSONResponse({"request_id": str(name), "sample_sequence_ids": ids})

    async def _sampled(self, visitor: Visitor, name: sampling.SampleName) -> Response:
        """Return continuations, or 410 if their sampler died; the client then samples again."""
        job = await self._trainers.job_of_sampler(visitor.broker, name.sampler)
        awaited = sampling.AwaitSample(request=f"{name.sampler}:{name.seq}")
        try:
            result = await self._trainers.sampled(visitor.broker, job, name.actor, awaited)
        except (errors.NotFoundError, errors.DeadlineError) as error:
            return JSONResponse({"detail": error.message}, _GONE)
        return requests.answered(str(name), result)

    async def _submit(
        self,
        visitor: Visitor,
        kind: OperationKind,
        name: OperationName,
        raw: bytes,
        *,
        job: str = "",
        is_zstd: bool = False,
    ) -> Response:
        """Submit an operation to the trainer `job`, by default the one that has its model."""
        job = job or await self._trainers.job_of_model(visitor.broker, name.model)
        operation = ModelOperation(
            kind=kind, model=str(name.model), seq=name.seq, body=raw, is_zstd=is_zstd
        )
        accepted = await self._trainers.submit(visitor.broker, job, operation)
        self._trainers.remember(visitor.user, name.model, job)
        return JSONResponse({"request_id": accepted.request_id, "model_id": str(name.model)})


def _guarded(endpoint: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return a handler that answers errors in the API's format."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except errors.TinkermqError as error:
            message = f"{error.message} ({error.hint})" if error.hint else error.message
            return JSONResponse({"detail": message}, error.status)
        except HTTPException as error:
            return JSONResponse({"detail": error.detail}, error.status_code)

    return answer


async def _not_offered(request: Request) -> Response:
    path = request.path_params["path"]
    raise errors.NotFoundError(f"this service does not offer {request.method} /{path}")
