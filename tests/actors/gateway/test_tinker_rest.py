"""Requests of the Tinker SDK about what is kept, and which trainer has a model."""

import io
import json
import math
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tinkermq.actors.gateway.server import make_app
from tinkermq.actors.gateway.sessions import Sessions
from tinkermq.actors.gateway.tinker.trainers import Trainers
from tinkermq.actors.storage.tinker_checkpoints import CheckpointFolders, StoredCheckpoint
from tinkermq.actors.tinker.catalogue import Catalogue
from tinkermq.actors.tinker.catalogue_service import CatalogueService
from tinkermq.actors.tinker.models import Models
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import RequestContext, Service
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.tinker.names import CheckpointName, ModelName
from tinkermq.schemas.tinker.operation import (
    MAX_BODY_BYTES,
    AboutCheckpoint,
    AboutModel,
    AboutSessions,
    ModelInfo,
    ModelOperation,
    ModelShown,
    OperationTaken,
    SessionsShown,
    TrainerOffer,
    TrainerOffers,
)
from tinkermq.schemas.tinker.wire import ForwardBackwardRequest
from tinkermq.schemas.wire.errors import (
    CheckpointGoneError,
    NobodyAnswersError,
    NotFoundError,
)
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import JobScope, rpc

from tests.support.waiting import PATIENCE_S

API = "http://127.0.0.1:8780/tinker/api/v1"
SDK = {"x-api-key": "tml-any", "user-agent": "AsyncTinker/Python 0.38.0"}
PARTS = {"adapter_model.safetensors": b"weights" * 1000, "adapter_config.json": b'{"r": 4}'}


WRONG: list[tuple[str, str, Any, int, str]] = [
    ("POST", "create_model", {"session_id": "s1", "model_seq_id": 0, "base_model": "no/such"},
     404, "there is no base model 'no/such' here (this pool offers org/base)"),
    ("POST", "optim_step", b" " * (MAX_BODY_BYTES + 1), 413, "a request may have 7,340,032"),
    ("POST", "asample", b" " * (4 << 20) + b"{}", 413, "a prompt may have 4,194,304 bytes"),
    ("POST", "optim_step", b"{", 400, "it is not valid JSON"),
    ("POST", "optim_step", {"model_id": "s1:train:0", "seq_id": 0}, 400, "seq_id=0"),
    ("POST", "optim_step", {"model_id": "../x", "seq_id": 1}, 404, "there is no model '../x'"),
    ("POST", "load_weights", {"session_id": "s1", "model_seq_id": 0, "path": "tinker://a/b/c"},
     404, "there is no checkpoint 'tinker://a/b/c'"),
    ("POST", "weights_info", {"tinker_path": "tinker://s1:train:0/weights/no"},
     404, "there is no checkpoint tinker://s1:train:0/weights/no (it was never saved"),
    ("POST", "forward_backward", {}, 400, "upgrade the SDK: tinker>=0.25"),
    ("POST", "create_session", {"user_metadata": 3}, 400, "must be a JSON object, not '3'"),
    ("POST", "create_session", {"user_metadata": {"a": "x" * 5000}}, 400, "at most 4,096"),
    ("POST", "session_heartbeat", {}, 400, "session_id=None is not a text"),
    ("POST", "session_heartbeat", {"session_id": "../x"}, 404, "there is no session '../x'"),
    ("POST", "sessions/s1/finish", {"reason": "done"}, 400, "reason='done' must be a JSON obj"),
    ("GET", "sessions/s9", None, 404, "there is no session s9"),
    ("GET", "training_runs/s9:train:0", None, 404, "there is no training run s9:train:0"),
    ("GET", "training_runs?limit=many", None, 400, "limit='many' must be an integer"),
    ("GET", "training_runs?project_id=p", None, 400, "this service has no projects"),
    ("PUT", "training_runs/s1:train:0/checkpoints/weights/a/ttl", {"ttl_seconds": "1"},
     400, "ttl_seconds='1' must be an integer"),
    ("DELETE", "training_runs/s1:train:0/checkpoints/weights/a", None,
     404, "there is no checkpoint tinker://s1:train:0/weights/a"),
    ("GET", "files/j1/x.y/adapter_config.json", None, 403, "this is not a URL of a checkpoint"),
    ("GET", "files/a%20b/x.y/adapter_config.json", None, 400, "job id 'a b' cannot be part"),
    ("GET", "files/%3E/x.y/checkpoint.tar", None, 400, "job id '>' cannot be part"),
    ("GET", "files/j1.*/x.y/adapter_config.json", None, 400, "job id 'j1.*' cannot be part"),
    ("GET", "files/j1%0D%0APUB/x.y/a", None, 400, "cannot be part of a subject"),
    ("GET", f"files/j1/{'x' * 2000}/a", None, 404, "this is not a URL of a checkpoint's file"),
    ("GET", "billing/usage/events", None, 404, "does not offer GET /billing/usage/events"),
    ("POST", "copy_weights", {}, 404, "does not offer POST /copy_weights"),
]  # fmt: skip
"""Method, path and body, and how they are refused."""


@dataclass
class Api:
    """A gateway in the test's process, and what stands behind it."""

    client: httpx.AsyncClient
    catalogue: Catalogue
    folder: Path

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and answer of a request."""
        url = path if "://" in path else f"{API}/{path}"
        sent = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
        answer = await self.client.request(method, url, content=sent)
        is_json = "json" in answer.headers.get("content-type", "")
        return answer.status_code, answer.json() if is_json else answer.content

    async def good(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer of a request that is answered."""
        status, answer = await self.ask(method, path, body)
        assert status == 200, answer
        return answer

    async def refused(self, status: int, words: str, method: str, path: str, body: Any) -> None:
        """See a request refused in these words."""
        found, answer = await self.ask(method, path, body)
        assert found == status, answer
        assert words in answer["detail"]

    def has_run(self, session: str) -> str:
        """Let there be a training run with a checkpoint of each kind; return its id."""
        info = ModelInfo(
            model=f"{session}:train:0", base="org/base", folder="f", arch="qwen3", rank=4
        )
        self.catalogue.begin_run("local", info, {"renderer_name": "role_colon"}, 50.0)
        folders = CheckpointFolders(self.folder)
        for number, kind in enumerate(("weights", "sampler_weights", "external_weights")):
            name = CheckpointName.parse(f"tinker://{info.model}/{kind}/c{number}")
            place = folders.place_of("local", name)
            stored = StoredCheckpoint("local", name, place, info, 1, 100.0 + number, 7)
            stored.folder.mkdir(parents=True)
            for file, data in PARTS.items():
                (stored.folder / file).write_bytes(data)
            folders.commit(replace(stored, user_metadata={"k": "v"}))
        self.catalogue.load()
        return info.model


async def _offers(_: Empty) -> TrainerOffers:
    return TrainerOffers(
        offers=[TrainerOffer(job="j1", base="org/base", max_context=64, max_rank=8)]
    )


@asynccontextmanager
async def _client(sessions: Sessions) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(sessions, local_only=True, secure=False))
    async with httpx.AsyncClient(transport=transport, headers=SDK, timeout=PATIENCE_S) as client:
        yield client
    await sessions.close()


@pytest_asyncio.fixture
async def api(own_server: NatsServer, own_broker: Broker, tmp_path: Path) -> AsyncIterator[Api]:
    async with await Service.start(own_broker, name="pool", description="Trainer") as service:
        await service.endpoint("trainers", rpc("*", "scheduler", "trainers"), Empty, _offers)
        catalogue = Catalogue(tmp_path)
        await CatalogueService(catalogue, Models()).open(service, JobScope("local", "j1"))
        async with _client(Sessions(own_server.url, with_keys=False)) as client:
            yield Api(client, catalogue, tmp_path)


async def test_what_is_kept_is_told_and_changed_as_the_sdk_asks(api: Api) -> None:
    begin = {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0"}
    begun = await api.good("POST", "create_session", {**begin, "type": "create_session"})
    assert begun.keys() == {"type", "session_id"}
    session = begun["session_id"]
    await api.good("POST", "session_heartbeat", {"session_id": session})
    run = api.has_run(session)
    assert await api.good("GET", "sessions?limit=20&offset=0&access_scope=owned") == {
        "sessions": [session]
    }
    assert await api.good("GET", f"sessions/{session}?access_scope=owned") == {
        "training_run_ids": [run],
        "sampler_ids": [],
        "user_metadata": {"a": "b"},
        "display_name": None,
    }
    listed = await api.good("GET", "training_runs?limit=20&offset=0&access_scope=owned")
    assert listed["cursor"] == {"offset": 0, "limit": 20, "total_count": 1}
    (told,) = listed["training_runs"]
    assert told == await api.good("GET", f"training_runs/{run}?access_scope=owned")
    assert (told["lora_rank"], told["user_metadata"]) == (4, {"renderer_name": "role_colon"})
    assert told["last_checkpoint"]["checkpoint_id"] == "weights/c0"
    assert told["last_request_time"] == "1970-01-01T00:01:41Z"
    found = await api.good("GET", "checkpoints?limit=2&offset=1")
    assert [one["checkpoint_type"] for one in found["checkpoints"]] == ["sampler", "training"]
    assert found["cursor"]["total_count"] == 3
    place = f"training_runs/{run}/checkpoints/weights/c0"
    await api.good("PUT", f"{place}/ttl", {"ttl_seconds": 7200})
    assert (await api.good("POST", f"{place}/publish"))["public"]
    assert not (await api.good("DELETE", f"{place}/publish"))["public"]
    await api.good("PUT", f"{place}/ttl", {"ttl_seconds": None})
    await api.good("DELETE", place)
    found = await api.good("GET", f"training_runs/{run}/checkpoints")
    assert [one["checkpoint_id"] for one in found["checkpoints"]] == [
        "external_weights/c2",
        "sampler_weights/c1",
    ]
    api.client.headers["user-agent"] = "AsyncTinker/Python 0.25.0"  # which cannot read the first
    assert len((await api.good("GET", f"training_runs/{run}/checkpoints"))["checkpoints"]) == 1
    await api.good("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}})
    over = {"session_id": session}
    await api.refused(410, f"session {session} is over", "POST", "session_heartbeat", over)


async def test_files_are_fetched_without_a_key(api: Api) -> None:
    run = api.has_run("s1")
    del api.client.headers["x-api-key"]
    place = f"training_runs/{run}/checkpoints/external_weights/c2"
    urls = (await api.good("GET", f"{place}/external_weights_urls"))["urls"]
    assert set(urls) == set(PARTS)
    assert (
        await api.good("GET", urls["adapter_model.safetensors"])
        == PARTS["adapter_model.safetensors"]
    )
    assert json.loads(await api.good("GET", urls["adapter_config.json"])) == {
        "r": 4,
        "base_model_name_or_path": "org/base",
    }
    answer = await api.client.get(f"{API}/{place}/archive")
    assert answer.status_code == 302
    archive = await api.good("GET", answer.headers["location"])
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert set(opened.getnames()) == {*PARTS, "checkpoint_complete"}
    await api.refused(
        403,
        "not a URL of a checkpoint",
        "GET",
        urls["adapter_config.json"].replace("files/j1/", "files/j1/x"),
        None,
    )


async def test_a_wrong_request_is_refused_in_words(api: Api) -> None:
    for method, path, body, status, words in WRONG:
        await api.refused(status, words, method, path, body)


async def test_what_is_refused_takes_its_number_so_that_later_operations_need_not_wait(
    own_server: NatsServer, own_broker: Broker
) -> None:
    taken: list[tuple[str, int, bytes]] = []

    async def submit(operation: ModelOperation, _: RequestContext) -> OperationTaken:
        taken.append((operation.kind, operation.seq, operation.body))
        return OperationTaken(request_id=str(operation.name))

    async def info(request: AboutModel, _: RequestContext) -> ModelInfo:
        return ModelInfo(model=request.model, base="org/base", folder="f", arch="qwen3", rank=4)

    large = ForwardBackwardRequest(model_id="s1:train:0", seq_id=8, loss_fn="x" * MAX_BODY_BYTES)
    load = {"model_id": "s1:train:0", "seq_id": 7, "path": "tinker://mistyped"}
    async with await Service.start(own_broker, name="pool", description="Trainer") as service:
        await service.endpoint("trainers", rpc("*", "scheduler", "trainers"), Empty, _offers)
        await service.endpoint("submit", rpc("*", "tinker-j1", "submit"), ModelOperation, submit)
        await service.endpoint("info", rpc("*", "tinker-j1", "info"), AboutModel, info)
        async with _client(Sessions(own_server.url, with_keys=False)) as client:
            answer = await client.post(f"{API}/load_weights", json=load)
            assert answer.status_code == 404
            assert "there is no checkpoint 'tinker://mistyped'" in answer.json()["detail"]
            client.headers["content-type"] = "application/x-protobuf"
            body = large.SerializeToString()
            answer = await client.post(f"{API}/forward_backward", content=body)
            assert answer.status_code == 413
    assert taken == [("load_weights", 7, b""), ("forward_backward", 8, b"")]


async def test_metrics_that_are_no_number_are_null(
    own_server: NatsServer, own_broker: Broker
) -> None:
    async def sessions(_: AboutSessions) -> SessionsShown:
        about = ModelInfo(model="s1:train:0", base="b", folder="f", arch="qwen3", rank=4)
        last = {"loss:sum": math.nan}
        shown = ModelShown(info=about, steps=1, waiting=0, waiting_bytes=0, last=last)
        return SessionsShown(base="b", models=[shown])

    async with await Service.start(own_broker, name="pool", description="Trainer") as service:
        await service.endpoint("trainers", rpc("*", "scheduler", "trainers"), Empty, _offers)
        about = rpc("*", "tinker-j1", "sessions")
        await service.endpoint("sessions", about, AboutSessions, sessions)
        async with _client(Sessions(own_server.url, with_keys=False)) as client:
            answer = await client.get("http://127.0.0.1:8780/api/v1/tinker")
            assert answer.status_code == 200
            (shown,) = answer.json()["services"][0]["models"]
            assert shown["last"] == {"loss:sum": None}


async def test_an_sdk_that_was_not_tested_is_told_so(api: Api) -> None:
    for version, key, words in (
        ("0.24.0", "error_message", "install tinker>=0.25"),
        ("0.99.0", "warning_message", "tested with tinker 0.25 to 0.38, not with 0.99.0"),
        ("mine", "warning_message", "tested with tinker 0.25 to 0.38"),
    ):
        assert words in (await api.good("POST", "create_session", {"sdk_version": version}))[key]


async def test_a_key_of_another_form_is_refused(own_server: NatsServer) -> None:
    async with _client(Sessions(own_server.url, with_keys=True)) as client:
        for key in ("tml-secret", "tmq_ada_secret"):
            answer = await client.post(f"{API}/create_session", json={}, headers={"x-api-key": key})
            assert answer.status_code == 401
            assert "tml-tmq_<user>_<secret>" in answer.json()["detail"]


# Which trainer has a model: one that is away may have it, so nobody is told that there is none.


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
        assert await trainers.job_of_model(own_broker, MODEL) == "here"
        with pytest.raises(NobodyAnswersError):
            await trainers.job_of_model(own_broker, ModelName("s1", 1))
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
            await Trainers().job_of_checkpoint(own_broker, name)
