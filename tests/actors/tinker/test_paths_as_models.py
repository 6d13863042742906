"""A checkpoint's path as a model: samplers of its service answer OpenAI's and other clients."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file
from tinkermq.actors.engine.engine import Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.chat import ChatTokenizer, open_chat
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.storage.tinker_checkpoints import CheckpointFolders, StoredCheckpoint
from tinkermq.actors.tinker.catalogue import Catalogue
from tinkermq.actors.tinker.catalogue_service import CatalogueService
from tinkermq.actors.tinker.models import Models
from tinkermq.actors.tinker.sampling.engines import SampledBase, Snapshots
from tinkermq.actors.tinker.sampling.sampler import Sampler
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service, call
from tinkermq.broker.jetstream.streams import create_shared
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import JobConfig, ModelConfig
from tinkermq.schemas.tinker import wire
from tinkermq.schemas.tinker.datum import LoraSpec
from tinkermq.schemas.tinker.names import CheckpointKind, CheckpointName, ModelName
from tinkermq.schemas.tinker.operation import (
    ModelInfo,
    OperationResult,
    TrainerOffer,
    TrainerOffers,
)
from tinkermq.schemas.tinker.sampling import AwaitSample, SampleRequest, SampleTaken
from tinkermq.schemas.wire.errors import MessageError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import rpc

from tests.actors.gateway.http import serving
from tests.support.contexts import job_context
from tests.support.models import make_tiny_model
from tests.support.tinker import VOCAB
from tests.support.tinker_service import SCOPE
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED: Any = [{"role": "user", "content": "hi"}]
CONTEXT = 96
ENDS = (1, 200)
"""Ends of the model: of its tokenizer, and a second one of its generation_config.json."""


@dataclass
class Served:
    """A sampler in the test's process, a gateway before it, and the trainer's folder."""

    url: str
    client: AsyncOpenAI
    sampler: Sampler
    folders: CheckpointFolders
    engine: TransformersEngine
    chat: ChatTokenizer
    adapter: Path
    states: Path
    broker: Broker
    model: Path

    def path(
        self,
        name: str,
        *,
        user: str = "local",
        kind: CheckpointKind = "sampler_weights",
        **more: Any,
    ) -> str:
        """Let there be a checkpoint of a user; return its path."""
        found = CheckpointName(ModelName("s1", 0), kind, name)
        info = ModelInfo(model="s1:train:0", base="org/tiny", folder="f", arch="qwen3", rank=4)
        place = self.folders.place_of(user, found)
        stored = StoredCheckpoint(user, found, place, info, 1, time.time())
        stored.folder.mkdir(parents=True)
        for file in self.adapter.iterdir():
            (stored.folder / file.name).write_bytes(file.read_bytes())
        self.folders.commit(replace(stored, **more))
        return str(found)

    async def post(self, where: str, body: Any) -> httpx.Response:
        """Ask an endpoint."""
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            return await client.post(f"{self.url}/{where}", json=body)


def make_adapter(base: Path) -> Path:
    """Write an adapter that changes what the model says."""
    folder = base.with_name("adapter")
    trainer = AdapterTrainer.open(str(base), base_model="org/tiny")
    trainer.create("0", LoraSpec(rank=4))
    trainer.save("0", folder, with_optimizer=False)
    file = folder / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(file)
    save_file({n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()}, file)
    return folder


@asynccontextmanager
async def sampling(broker: Broker, config: JobConfig, base: SampledBase, folder: Path):
    """Run a sampler until the block ends."""
    context = await job_context(broker, SCOPE, "sampler", config)
    sampler = Sampler(context, base, Snapshots(broker, SCOPE, folder))
    task = asyncio.create_task(sampler.run())
    await until(lambda: context.presence.state == "working" or task.done(), "the sampler")
    try:
        yield sampler
    finally:
        context.stopping.set()
        await asyncio.wait_for(task, PATIENCE_S)
        await context.service.stop(0)


async def offered(_: Empty) -> TrainerOffers:
    offer = TrainerOffer(job=SCOPE.job, base="org/tiny", max_context=CONTEXT, max_rank=8)
    return TrainerOffers(offers=[offer])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("paths")
    model = make_tiny_model(folder / "base")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ENDS)}))
    states = folder / "states"
    config = JobConfig.model_validate(
        {"model": {"path": str(model)}, "env": {"game": ""}, "tinker": {"base": "org/tiny"}}
    )
    engine = await TransformersEngine.start(str(model), max_slots=4, max_context=CONTEXT)
    base = SampledBase(engine, open_chat(config.model, must_chat=False), VOCAB, CONTEXT, 256)
    with NatsServer(folder / "nats") as server:
        async with (
            await connect(server.url, name="test") as broker,
            await Service.start(broker, name="pool", description="trainer") as service,
        ):
            await create_shared(broker)
            await service.endpoint("trainers", rpc("*", "scheduler", "trainers"), Empty, offered)
            await CatalogueService(Catalogue(states), Models()).open(service, SCOPE)
            async with sampling(broker, config, base, states) as sampler, serving(broker) as url:
                client = AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE_S)
                chat = open_chat(config.model)
                folders = CheckpointFolders(states)
                adapter = await asyncio.to_thread(make_adapter, model)
                parts = (folders, engine, chat, adapter, states, broker, model)
                yield Served(url, client, sampler, *parts)
                await client.close()
    await engine.close()


async def expected(served: Served, prompt: list[int], most: int, path: str) -> str:
    """Return what the adapter says, greedily."""
    await served.engine.add_adapter("expected", served.adapter)
    made = await served.engine.generate(
        prompt,
        Sampling(most, temperature=0, stop_token_ids=served.chat.stop_token_ids),
        request_id=f"expected-{path}",
        adapter="expected",
    )
    served.engine.drop_adapter("expected")
    plain = await served.engine.generate(
        prompt, Sampling(most, temperature=0), request_id=f"plain-{path}"
    )
    assert plain.token_ids.tolist() != made.token_ids.tolist()
    return served.chat.decode(made.token_ids)


async def test_a_path_answers_in_each_api_whole_and_streamed(served: Served) -> None:
    path = served.path("said")
    prompt = served.chat.prompt(ASKED)
    words = await expected(served, prompt, 12, path)
    used = dict(served.sampler.tokens)
    asked: Any = {"model": path, "max_tokens": 12, "temperature": 0}
    create = served.client.chat.completions.create
    chat = await create(
        messages=ASKED, logprobs=True, extra_body={"return_token_ids": True}, **asked
    )
    assert (chat.model, chat.choices[0].message.content) == (path, words)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(prompt)
    assert served.sampler.tokens["local"] - used.get("local", 0) == chat.usage.total_tokens
    chunks = [one async for one in await create(messages=ASKED, stream=True, **asked)]
    said = [one.choices[0].delta.content for one in chunks if one.choices]
    assert "".join(text or "" for text in said) == words
    completion = await served.client.completions.create(prompt=prompt, n=2, **asked)
    assert [one.text for one in completion.choices] == [words, words]
    response = await served.client.responses.create(
        model=path, input="hi", max_output_tokens=12, temperature=0
    )
    assert response.output_text == words
    message = await served.post("messages", {**asked, "messages": ASKED})
    assert message.json()["content"][0]["text"] == words
    shown = await served.client.models.retrieve(path)
    assert (shown.id, shown.owned_by) == (path, "tinker")
    assert path not in [one.id for one in (await served.client.models.list()).data]


async def test_a_reader_who_leaves_ends_the_work_and_pays_for_what_was_drawn(
    served: Served,
) -> None:
    asked: Any = {
        "model": served.path("long"),
        "extra_body": {"top_k": 1},
        "stop": ["no such text"],
    }
    before = served.sampler.tokens.get("local", 0)
    stream = await served.client.completions.create(prompt="a", stream=True, **asked)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: served.engine.stats().running == 0, "the work to end")
    await until(
        lambda: served.sampler.tokens.get("local", 0) - before > 1, "what was drawn to count"
    )
    assert served.sampler.tokens["local"] - before <= CONTEXT


def missing_paths(served: Served) -> dict[str, tuple[int, str]]:
    """Return paths that cannot be sampled: status, and words of message and remedy."""
    return {
        served.path("of-ada", user="ada"): (404, "never saved, was deleted, or belongs to another"),
        served.path("late", expires=1.0): (404, "save it anew, with a longer ttl_seconds"),
        served.path("removed", gone="deleted"): (404, "was deleted. save it anew"),
        served.path("packed", kind="external_weights"): (
            400,
            "save the model with save_weights_for_sampler",
        ),
        "tinker://s1:train:0/sampler_weights/none": (404, "there is no checkpoint tinker://s1"),
        "tinker://s1:train:0": (404, "a path is tinker://<session>:train:<n>/weights/<name>"),
    }


async def test_what_cannot_be_sampled_is_told_in_the_words_of_each_api(served: Served) -> None:
    published = served.path("for-all", user="ada", is_public=True)
    told = await served.post("messages", {"model": published, "max_tokens": 2, "messages": ASKED})
    assert told.status_code == 200
    of_kind = {404: "not_found_error", 400: "invalid_request_error"}
    for path, (status, words) in missing_paths(served).items():
        chat: Any = {"model": path, "messages": ASKED, "max_tokens": 2}
        for where, body in (
            ("chat/completions", chat),
            ("chat/completions", {**chat, "stream": True}),
            ("completions", {"model": path, "prompt": "a"}),
            ("responses", {"model": path, "input": "hi"}),
            ("messages", chat),
        ):
            answer = await served.post(where, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (status, of_kind[status]), (path, error)
            assert words in error["message"], (path, where, error)


async def test_a_service_whose_samplers_are_away_is_503_and_where_none_runs_404(
    own_server: NatsServer, served: Served
) -> None:
    path = served.path("alone")
    async with (
        await connect(own_server.url, name="other") as broker,
        await Service.start(broker, name="pool", description="trainer") as service,
        serving(broker) as url,
    ):
        await create_shared(broker)
        offers: list[TrainerOffer] = []

        async def offers_now(_: Empty) -> TrainerOffers:
            return TrainerOffers(offers=offers)

        await service.endpoint("trainers", rpc("*", "scheduler", "trainers"), Empty, offers_now)
        client = AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE_S)
        with pytest.raises(openai.NotFoundError, match="start the one that has saved it"):
            await client.chat.completions.create(model=path, messages=ASKED)
        offers += (await offered(Empty())).offers
        with pytest.raises(openai.InternalServerError, match="it starts again; see `tinkermq ps`"):
            await client.chat.completions.create(model=path, messages=ASKED)
        await CatalogueService(Catalogue(served.states), Models()).open(service, SCOPE)
        with pytest.raises(openai.InternalServerError, match="a sampler of the Tinker service"):
            await client.chat.completions.create(model=path, messages=ASKED)
        await client.close()


async def test_without_a_chat_template_texts_are_continued_and_chats_refused(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "plain")
    (model / "chat_template.jinja").unlink()
    chat = open_chat(ModelConfig(path=str(model)), must_chat=False)
    assert chat.decode(chat.encode("abc")) == "abc"
    assert chat.stop_token_ids
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        chat.prompt(ASKED)


async def sampled(served: Served, seq: int, **params: Any) -> list[tuple[list[int], Any, int]]:
    """Sample four continuations as Tinker's SDK asks for them: tokens, log-probs, reason."""
    body = {
        "sampling_session_id": "s1",
        "seq_id": seq,
        "prompt": {"chunks": [{"tokens": served.chat.prompt(ASKED)}]},
        "num_samples": 4,
        "sampling_params": {"max_tokens": 60, "seed": 7, **params},
    }
    waiting: Any = {"timeout_s": PATIENCE_S, "waiting_for": "the sampler"}
    request = SampleRequest(
        request=str(seq), source="base:org/tiny", body=json.dumps(body).encode()
    )
    name = f"tinker-{SCOPE.job}"
    subject = rpc("local", name, "sample")
    taken = await call(served.broker, subject, request, SampleTaken, **waiting)
    told = rpc("local", name, f"sampled-{taken.actor}")
    wanted = AwaitSample(request=str(seq), wait_s=60.0)
    result = await call(served.broker, told, wanted, OperationResult, **waiting)
    assert result.state == "done", result.error
    return [
        (np.frombuffer(one.tokens, "<i4").tolist(), np.frombuffer(one.logprobs, "<f4"), reason)
        for one in wire.SampleResponse.FromString(result.body).sequences
        for reason in [one.stop_reason]
    ]


async def test_samples_end_with_the_token_that_completes_a_stop_text(served: Served) -> None:
    free = await sampled(served, 1, stop=[])
    decode: Any = load_tokenizer(str(served.model)).decode

    def completed(ids: list[int], stops: list[str]) -> int | None:
        for num, token in enumerate(ids, 1):
            text = decode(ids[:num]).rstrip("�")
            if token in ENDS or any(stop in text for stop in stops):
                return num
        return None

    text = decode(free[0][0])
    certain = [place for place in range(3, 40) if "�" not in text[place : place + 2]]
    first, second = certain[0], certain[-1]
    stops = [
        text[first : first + 2],
        [text[second], text[first]],
        text[first],
        [text[second : second + 2], "never"],
        "never",
        decode(free[0][0][-1:]) or "never",
    ]
    for seq, stop in enumerate(stops, 2):
        wanted = [stop] if isinstance(stop, str) else stop
        ended = 0
        for one, whole in zip(await sampled(served, seq, stop=stop), free, strict=True):
            num = completed(whole[0], wanted)
            assert one[0] == whole[0][:num]
            assert one[1] == pytest.approx(whole[1][:num], abs=1e-5)
            assert one[2] == (1 if num is None else 0)
            ended += num is not None
        assert ended or wanted == ["never"]


async def test_stop_texts_are_added_to_the_ends_of_the_model(served: Served) -> None:
    (first, second), all_ends = ENDS, {*ENDS}
    assert {*served.chat.end_token_ids} >= all_ends
    met: set[int] = set()
    for seq in range(40, 60):
        free = await sampled(served, 10 * seq, stop=[], seed=seq)
        cases: list[tuple[Any, set[int]]] = [
            (None, all_ends),
            ("never", all_ends),
            ("", all_ends),
            (["never", "ever"], all_ends),
            ([first], {first}),
            ([second], {second}),
        ]
        for place, (stop, ends) in enumerate(cases, 1):
            ended = await sampled(served, 10 * seq + place, stop=stop, seed=seq)
            for one, whole in zip(ended, free, strict=True):
                num = next((n for n, token in enumerate(whole[0], 1) if token in ends), None)
                assert one[0] == whole[0][:num]
                assert one[2] == (1 if num is None else 0)
                met |= set() if num is None else {one[0][-1]}
        if met >= all_ends:
            return
    raise AssertionError("no sample had both ends of the model")


async def test_a_number_that_no_engine_holds_is_refused_and_ends_no_sampler(served: Served) -> None:
    for seq, params in enumerate(({"top_k": 1 << 63}, {"stop": [1 << 63]}), 20):
        with pytest.raises(AssertionError, match="cannot be sampled"):
            await sampled(served, seq, **params)
    with pytest.raises(MessageError, match="at most 4096 items"):
        await sampled(served, 22, stop=list(range(5000)))
    assert len(await sampled(served, 23)) == 4
