"""Whose a thing is, in a pool with users: over HTTP and over NATS, whatever path is tried."""

import asyncio
import io
import itertools
import json
import tarfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tinkermq.actors.gateway.tinker.trainers import Trainers
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.parts import last_part
from tinkermq.clients.home import Home
from tinkermq.schemas.infer import CompletionRequest
from tinkermq.schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    CheckpointExport,
    CheckpointPage,
    ExportCheckpoint,
    FetchFile,
    FilePart,
    ListCheckpoints,
    ListRuns,
    RunPage,
    SessionState,
    TellSession,
    TinkerCheckpoint,
)
from tinkermq.schemas.tinker.operation import (
    AboutCheckpoint,
    AboutModel,
    AwaitResult,
    ModelInfo,
    ModelOperation,
    OperationResult,
    OperationTaken,
)
from tinkermq.schemas.tinker.sampling import SamplerName
from tinkermq.schemas.wire.errors import AuthError, ExhaustedError, NotFoundError
from tinkermq.schemas.wire.message import Message
from tinkermq.schemas.wire.subjects import rpc, tinker_inbox

from tests.clients.command import tinkermq
from tests.support.models import make_tiny_model
from tests.support.secured import refused_listen, refused_publish
from tests.support.waiting import PATIENCE_S, eventually
from tests.tinker.sdks import BASE, PROGRAMS, SdkProgram, lacking

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass
class Pool:
    """A pool with a service, and two users of it."""

    home: Path
    keys: dict[str, str] = field(default_factory=dict[str, str])
    job: str = ""

    def command(self, *words: str, key: str = "") -> Any:
        given = {"TINKERMQ_HOME": str(self.home)}
        if key:
            given["TINKERMQ_API_KEY"] = self.keys[key]
        outcome = tinkermq(*words, "--json", env=given, timeout=PATIENCE_S)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    @property
    def state(self) -> Any:
        found = Home(self.home).read_running_stack()
        assert found is not None
        return found

    async def ask(self, user: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and answer of a request to the gateway."""
        return await asyncio.to_thread(self._ask, user, method, path, body)

    def _ask(self, user: str, method: str, path: str, body: Any) -> tuple[int, Any]:
        url = path if "://" in path else f"{self.state.gateway}/tinker/api/v1/{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, method=method)
        request.add_header("content-type", "application/json")
        if user:
            request.add_header("x-api-key", f"tml-{self.keys[user]}")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                raw, kind = answer.read(), answer.headers.get("content-type", "")
                return answer.status, json.loads(raw) if "json" in kind else raw
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    async def get(self, user: str, path: str) -> Any:
        status, answer = await self.ask(user, "GET", path)
        assert status == 200, answer
        return answer

    async def post(self, user: str, path: str, body: Any) -> Any:
        status, answer = await self.ask(user, "POST", path, body)
        assert status == 200, answer
        return answer

    async def done(self, user: str, path: str, body: Any) -> Any:
        """Send an operation, and return its result."""
        name = (await self.post(user, path, body))["request_id"]

        async def result() -> Any:
            status, answer = await self.ask(user, "POST", "retrieve_future", {"request_id": name})
            assert status in (200, 408), answer
            return answer if status == 200 else None

        return await eventually(result, name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    folder = tmp_path_factory.mktemp("owned")
    made = Pool(folder / "home")
    made.keys["root"] = made.command("init", "--admin", "root")["api_key"]
    try:
        made.command("up", "--port", "0", "--slots", "8", key="root")
        for user in ("ada", "bob"):
            made.keys[user] = made.command("user", "add", user, key="root")["api_key"]
        model = make_tiny_model(folder / BASE)
        words = (f"--model={BASE}={model}", f"output_dir={folder / 'runs'}")
        made.job = made.command("tinker", "up", *words, key="root")["jobs"][0]["job"]

        async def offered() -> bool:
            _, answer = await made.ask("ada", "GET", "get_server_capabilities")
            _, begun = await made.ask("ada", "POST", "create_session", {"sdk_version": "0.38.0"})
            return BASE in str(answer) and "session_id" in begun

        await eventually(offered, "the base model to be offered")
        yield made
    finally:
        made.command("down")


@dataclass
class Made:
    """What a user has made."""

    session: str
    model: str
    paths: dict[str, str]
    sampler: str


async def make(pool: Pool, user: str) -> Made:
    session = (await pool.post(user, "create_session", {"sdk_version": "0.38.0"}))["session_id"]
    lora = {"rank": 4, "seed": 7}
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
    model = (await pool.done(user, "create_model", body))["model_id"]
    paths = {
        f"{kind} {name}": (
            await pool.done(
                user, kind, {"model_id": model, "seq_id": 2 * number + step, "path": name}
            )
        )["path"]
        for number, name in enumerate(("open", "closed"))
        for step, kind in enumerate(("save_weights", "save_weights_for_sampler"), 1)
    }
    opened = {"session_id": session, "sampling_session_seq_id": 0}
    opened |= {"model_path": paths["save_weights_for_sampler closed"]}
    sampler = (await pool.post(user, "create_sampling_session", opened))["sampling_session_id"]
    return Made(session, model, paths, sampler)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adas(pool: Pool) -> Made:
    return await make(pool, "ada")


def place(path: str) -> str:
    """Return where a checkpoint is under REST."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


def sample(sampler: str) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [20, 21, 22]}]}
    return {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 4, "seed": 1},
    }


async def test_nothing_of_somebody_else_is_there_over_http(pool: Pool, adas: Made) -> None:
    optim = {"model_id": adas.model, "seq_id": 9, "adam_params": {"learning_rate": 0.1}}
    path = adas.paths["save_weights closed"]
    tried: list[tuple[str, str, Any]] = [
        ("POST", "get_info", {"model_id": adas.model}),
        ("POST", "optim_step", optim),
        ("POST", "save_weights", {"model_id": adas.model, "seq_id": 9, "path": "x"}),
        ("POST", "retrieve_future", {"request_id": f"{adas.model}:1"}),
        ("POST", "load_weights", {"session_id": "s9", "model_seq_id": 0, "path": path}),
        ("POST", "session_heartbeat", {"session_id": adas.session}),
        ("POST", f"sessions/{adas.session}/finish", {"reason": {"type": "success"}}),
        ("GET", f"sessions/{adas.session}", None),
        ("GET", f"training_runs/{adas.model}", None),
        ("GET", f"training_runs/{adas.model}/checkpoints", None),
        ("GET", f"samplers/{adas.sampler}", None),
        ("POST", "asample", sample(adas.sampler)),
        ("POST", "retrieve_future", {"request_id": f"{adas.sampler}:0@sampler-0"}),
    ]
    for one in adas.paths.values():
        opened = {"session_id": "s9", "sampling_session_seq_id": 0, "model_path": one}
        tried += [
            ("POST", "weights_info", {"tinker_path": one}),
            ("POST", "create_sampling_session", opened),
            ("GET", f"{place(one)}/archive", None),
            ("GET", f"{place(one)}/external_weights_urls", None),
            ("PUT", f"{place(one)}/ttl", {"ttl_seconds": 1}),
            ("POST", f"{place(one)}/publish", {}),
            ("DELETE", f"{place(one)}/publish", None),
            ("DELETE", place(one), None),
        ]
    for method, where, body in tried:
        status, answer = await pool.ask("bob", method, where, body)
        assert status == 404, (method, where, status, answer)
    for listed in ("training_runs", "checkpoints", "sessions"):
        assert adas.session not in str(await pool.get("bob", listed))
    whose = {"session_id": adas.session, "model_seq_id": 7, "base_model": BASE}
    whose |= {"lora_config": {"rank": 4}}
    assert (await pool.ask("bob", "POST", "create_model", whose))[0] == 404
    found = await pool.get("ada", f"training_runs/{adas.model}/checkpoints")
    assert {one["tinker_path"] for one in found["checkpoints"]} == set(adas.paths.values())
    assert {(one["public"], one["expires_at"]) for one in found["checkpoints"]} == {(False, None)}


async def test_nothing_of_somebody_else_is_there_over_nats(pool: Pool, adas: Made) -> None:
    path = adas.paths["save_weights closed"]
    asked: list[tuple[str, Message, type[Message]]] = [
        ("info", AboutModel(model=adas.model), ModelInfo),
        ("result", AwaitResult(model=adas.model, seq=1, wait_s=0), OperationResult),
        ("submit", ModelOperation(kind="optim_step", model=adas.model, seq=9, body=b"{}"),
         OperationTaken),
        ("checkpoint", AboutCheckpoint(path=path), ModelInfo),
        ("checkpoints", ListCheckpoints(model=adas.model), CheckpointPage),
        ("change", ChangeCheckpoint(path=path, action="delete"), TinkerCheckpoint),
        ("change", ChangeCheckpoint(path=path, action="publish"), TinkerCheckpoint),
        ("export", ExportCheckpoint(path=path), CheckpointExport),
        ("runs", ListRuns(model=adas.model), RunPage),
        ("session", TellSession(session=adas.session, event="beat"), SessionState),
    ]  # fmt: skip
    async with await connect(pool.state.url, name="bob", api_key=pool.keys["bob"]) as bob:
        trainers = Trainers()
        for method, request, reply in asked:
            with pytest.raises(NotFoundError, match="there is no"):
                await trainers.ask(bob, pool.job, method, request, reply)
        forged = FetchFile(ticket="WyJhZGEiXQ.AAAA", file="adapter_config.json")
        with pytest.raises(AuthError, match="not a URL of a checkpoint"):
            await trainers.ask(bob, pool.job, "fetch", forged, FilePart)
        for user in ("ada", "gateway"):
            for method in ("info", "change", "fetch", "submit"):
                await refused_publish(bob, rpc(user, f"tinker-{pool.job}", method))
        await refused_publish(bob, f"$JS.API.STREAM.MSG.GET.tmq-root-{pool.job}-op")
        await refused_listen(bob, f"{tinker_inbox('ada')}.>")
        await refused_listen(bob, rpc("*", f"tinker-{pool.job}", "submit"))


async def test_a_sample_that_nobody_wants_is_ended_by_who_asked_for_it(
    pool: Pool, adas: Made
) -> None:
    body = sample(adas.sampler)
    body |= {"seq_id": 5, "sampling_params": {"max_tokens": 100_000, "stop": []}}
    name = {"request_id": (await pool.post("ada", "asample", body))["request_id"]}
    assert (await pool.ask("bob", "POST", "cancel_future", name))[0] == 404
    await pool.post("ada", "cancel_future", name)
    assert (await pool.ask("ada", "POST", "retrieve_future", name))[0] == 410
    await pool.post("ada", "cancel_future", name)
    trained = {"request_id": f"{adas.model}:1"}
    status, answer = await pool.ask("ada", "POST", "cancel_future", trained)
    assert status == 400
    assert "cancel samples only" in answer["detail"]


async def test_a_path_is_a_model_for_who_may_read_it(pool: Pool, adas: Made) -> None:
    path = adas.paths["save_weights_for_sampler closed"]
    said: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    gateway, keys = pool.state.gateway, pool.keys
    ada = AsyncOpenAI(base_url=f"{gateway}/tinker/oai/api/v1", api_key=f"tml-{keys['ada']}")
    bob = AsyncOpenAI(base_url=f"{gateway}/v1", api_key=keys["bob"])
    async with ada, bob:
        assert (await ada.chat.completions.create(model=path, **said)).model == path
        for wanted in (path, path.replace("closed", "none")):
            with pytest.raises(openai.NotFoundError, match=f"there is no checkpoint {wanted}"):
                await bob.chat.completions.create(model=wanted, **said)
    service = f"tinker-{pool.job}"
    async with await connect(pool.state.url, name="bob", api_key=pool.keys["bob"]) as broker:
        for verb in ("chat", "complete", "cancel"):
            await refused_publish(broker, rpc("ada", service, verb))
        request = CompletionRequest(request="r1", adapter=path, prompts=[[20, 21]])
        with pytest.raises(NotFoundError, match="there is no checkpoint"):
            await last_part(Trainers().answer(broker, pool.job, request))


async def test_what_is_published_is_read_by_all_and_changed_by_its_owner_alone(
    pool: Pool, adas: Made
) -> None:
    for kind in ("save_weights", "save_weights_for_sampler"):
        await pool.post("ada", f"{place(adas.paths[f'{kind} open'])}/publish", {})
    weights, sampled = (
        adas.paths[f"{kind} open"] for kind in ("save_weights", "save_weights_for_sampler")
    )
    told = await pool.post("bob", "weights_info", {"tinker_path": weights})
    assert (told["base_model"], told["lora_rank"]) == (BASE, 4)
    session = (await pool.post("bob", "create_session", {"sdk_version": "0.38.0"}))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "path": weights, "optimizer": True}
    assert (await pool.done("bob", "load_weights", body))["model_id"] == f"{session}:train:0"
    opened = {"session_id": session, "sampling_session_seq_id": 0, "model_path": sampled}
    sampler = (await pool.post("bob", "create_sampling_session", opened))["sampling_session_id"]
    assert (await pool.get("bob", f"samplers/{sampler}"))["model_path"] == sampled
    assert isinstance(await pool.done("bob", "asample", sample(sampler)), bytes)
    archive = await pool.get("bob", f"{place(weights)}/archive")
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        assert "adapter_model.safetensors" in found.getnames()
    for method, where, body in (
        ("DELETE", place(weights), None),
        ("PUT", f"{place(weights)}/ttl", {"ttl_seconds": 1}),
        ("DELETE", f"{place(weights)}/publish", None),
    ):
        assert (await pool.ask("bob", method, where, body))[0] == 404
    for path in (adas.paths["save_weights closed"], adas.paths["save_weights_for_sampler closed"]):
        status, _ = await pool.ask("bob", "POST", "weights_info", {"tinker_path": path})
        assert status == 404
    assert weights not in str(await pool.get("bob", "checkpoints"))
    urls = (await pool.get("bob", f"{place(weights)}/external_weights_urls"))["urls"]
    assert (await pool.ask("", "GET", urls["adapter_config.json"]))[0] == 200
    await pool.ask("ada", "DELETE", f"{place(weights)}/publish")
    await pool.ask("ada", "DELETE", f"{place(sampled)}/publish")
    for path in (weights, sampled):
        status, answer = await pool.ask("bob", "POST", "weights_info", {"tinker_path": path})
        assert status == 404
        assert "is not published" in answer["detail"]
    assert (await pool.ask("bob", "POST", "asample", {**sample(sampler), "seq_id": 1}))[0] == 404
    assert (await pool.ask("", "GET", urls["adapter_config.json"]))[0] == 404


@pytest.mark.skipif(lacking("newest") != "", reason=lacking("newest") or "it is installed")
async def test_a_used_up_quota_pauses_a_program_and_its_samples_until_it_is_raised(
    pool: Pool, tmp_path: Path
) -> None:
    cay = pool.keys["cay"] = pool.command("user", "add", "cay", key="root")["api_key"]

    def quota(tokens: int) -> None:
        pool.command("user", "quota", "cay", "--tinker-tokens", str(tokens), key="root")

    quota(1500)
    words = (str(PROGRAMS / "loop_with_samples.py"), BASE, "40", "0.4")
    running = SdkProgram.start("newest", pool.state.gateway, tmp_path, *words, key=f"tml-{cay}")

    async def paused() -> bool:
        return "paused due to billing" in running.told

    await eventually(paused, "the program to be paused")
    assert "step 39" not in running.told
    opened = await make_sampler(pool, "cay")
    numbers = itertools.count()

    async def answered(status: int) -> Any:
        wanted = {**sample(opened), "seq_id": next(numbers)}
        got, answer = await pool.ask("cay", "POST", "asample", wanted)
        return answer if got == status else None

    refused = await eventually(lambda: answered(402), "samples to be refused")
    assert "used all tokens of the quota" in str(refused)
    path = SamplerName.of_base("s9", 0, BASE).source
    request = CompletionRequest(request="r2", adapter=path, prompts=[[20, 21]])
    async with await connect(pool.state.url, name="cay", api_key=cay) as broker:
        with pytest.raises(ExhaustedError, match="used all tokens of the quota"):
            await last_part(Trainers().answer(broker, pool.job, request))
    quota(10**6)
    assert "step 39" in await running.done()
    await eventually(lambda: answered(200), "samples to go on")


async def make_sampler(pool: Pool, user: str) -> str:
    """Open a sampling session on the base model."""
    session = (await pool.post(user, "create_session", {"sdk_version": "0.38.0"}))["session_id"]
    opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    return str((await pool.post(user, "create_sampling_session", opened))["sampling_session_id"])
