"""Which adapters a sampler's engine holds, and what is told of a prompt."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.engine.engine import Drawn, PromptScores, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.tinker.sampling.engines import MeteredEngine, SampledAdapters, Snapshot
from tinkermq.actors.tinker.sampling.sampler import Sampled, write_samples
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.schemas.tinker import wire
from tinkermq.schemas.tinker.datum import LoraSpec
from tinkermq.schemas.tinker.names import CheckpointName, ModelName
from tinkermq.schemas.tinker.sampling import SamplerName
from tinkermq.schemas.wire.errors import ModelError, NotFoundError

from tests.support.cancelling import cancel_everywhere
from tests.support.models import make_tiny_model, until


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model, and beside it three adapters of a trainer."""
    folder = make_tiny_model(tmp_path_factory.mktemp("sampled") / "base")
    trainer = AdapterTrainer.open(str(folder), base_model="org/tiny")
    for number in range(3):
        trainer.create(str(number), LoraSpec(rank=2 + number))
        trainer.save(str(number), folder.parent / str(number), with_optimizer=False)
    return folder


async def test_an_idle_adapter_gives_way_and_where_all_work_one_waits(base: Path) -> None:
    engine = await TransformersEngine.start(str(base), max_slots=4, max_context=32)
    adapters = held(engine, 2)
    places = [snapshot(base, number) for number in range(3)]
    async with adapters.using(None) as name:
        assert name == ""
    async with adapters.using(places[1]) as second, adapters.using(places[0]) as first:
        third = asyncio.create_task(one_token(engine, adapters, places[2]))
        assert await one_token(engine, adapters, places[0]) == first
        assert not third.done()
        assert adapters.num_held == 2
    assert await third == "2"
    assert adapters.num_held == 2
    with pytest.raises(NotFoundError):  # the one that was idle for longest
        await engine.score([1, 2], request_id="gone", adapter=first)
    await engine.score([1, 2], request_id="there", adapter=second)
    await engine.close()


def held(engine: TransformersEngine, most: int, freed: list[str] | None = None) -> SampledAdapters:
    """Hold adapters whose folders are here."""

    async def fetch(wanted: Snapshot) -> Path:
        assert wanted.folder is not None
        return wanted.folder

    def free(given_up: Snapshot) -> None:
        if freed is not None:
            freed.append(f"{given_up.name}@{given_up.version}")

    return SampledAdapters(engine, most, fetch, free)


def snapshot(base: Path, number: int, *, moves: bool = False, version: int = 0) -> Snapshot:
    """Return one of the trainer's adapters."""
    path = CheckpointName(ModelName("s", 0), "sampler_weights", f"c{number}")
    source = SamplerName.of_checkpoint("s", 0, path, moves=moves)
    name = "moving" if moves else str(number)
    return Snapshot(name, version, "ada", source, str(path), base.parent / str(number))


async def one_token(engine: TransformersEngine, adapters: SampledAdapters, wanted: Snapshot) -> str:
    """Draw with an adapter; return its name."""
    async with adapters.using(wanted) as name:
        await engine.generate([1], Sampling(1), request_id=f"draw-{name}", adapter=name)
        return name


async def test_a_folder_that_holds_no_adapter_is_told_to_each_who_asks(base: Path) -> None:
    engine = await TransformersEngine.start(str(base), max_slots=4, max_context=32)
    adapters = held(engine, 1)
    for _ in range(2):
        with pytest.raises(ModelError, match="cannot be read"):
            async with adapters.using(snapshot(base, 7)):
                pass
    assert adapters.num_held == 0
    assert await one_token(engine, adapters, snapshot(base, 0)) == "0"
    await engine.close()


async def test_samples_move_on_to_newer_weights_and_never_back(base: Path) -> None:
    engine = await TransformersEngine.start(str(base), max_slots=4, max_context=1000)
    freed: list[str] = []
    adapters = held(engine, 2, freed)
    async with adapters.using(snapshot(base, 0, moves=True, version=3)) as name:
        assert [one.version for one in adapters.in_flight()] == [3]
        drawn: list[Drawn] = []
        long = engine.generate(
            [1], Sampling(990), request_id="long", adapter=name, on_token=drawn.append
        )
        running = asyncio.create_task(long)
        await until(lambda: len(drawn) > 3)
        for version in (5, 4):
            async with adapters.using(snapshot(base, 1, moves=True, version=version)):
                pass
        assert [one.version for one in adapters.in_flight()] == [5]
        await until(lambda: drawn[-1].version == 5)
        engine.cancel("long")
        assert set((await running).versions.tolist()) == {3, 5}
    assert freed == ["moving@3"]
    assert adapters.in_flight() == []
    await engine.close()


async def test_what_was_drawn_for_a_cancelled_sample_counts_and_its_place_is_free(
    base: Path,
) -> None:
    engine = await TransformersEngine.start(str(base), max_slots=4, max_context=1000)
    metered = MeteredEngine(engine, 1)
    drawn: list[Drawn] = []
    sample = metered.generate(
        "ada", [1], Sampling(990), request_id="long", adapter="", on_token=drawn.append
    )
    running = asyncio.create_task(sample)
    await until(lambda: len(drawn) > 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(drawn) <= metered.tokens["ada"] < 990
    await metered.generate("bob", [1], Sampling(2), request_id="next", adapter="")
    assert metered.tokens["bob"] == 2
    await engine.close()


async def test_another_users_rows_begin_while_ones_own_fill_the_engine(base: Path) -> None:
    engine = await TransformersEngine.start(str(base), max_slots=8, max_context=1000)
    metered = MeteredEngine(engine, 8)
    steps: list[Drawn] = []

    async def draw(user: str, number: int, tokens: int) -> None:
        note = steps.append if (user, number) == ("ada", 0) else None
        name = f"{user}-{number}"
        await metered.generate(
            user, [1], Sampling(tokens), request_id=name, adapter="", on_token=note
        )

    many = [asyncio.create_task(draw("ada", number, 990)) for number in range(32)]
    await until(lambda: len(steps) > 3)
    before = len(steps)
    await draw("bob", 0, 4)
    assert len(steps) - before < 200, "a step draws a token of each row"
    assert not any(task.done() for task in many)
    for task in many:
        task.cancel()
    await asyncio.wait(many)
    await engine.close()


def test_what_is_told_of_a_prompt() -> None:
    sampled = Sampled(np.array([5], np.int32), np.array([-1.5], np.float32), "stop")
    scores = PromptScores(
        np.array([np.nan, -0.5], np.float32),
        np.array([[0, 0], [7, 8]], np.int32),
        np.array([[np.nan, np.nan], [-0.5, -2.0]], np.float32),
    )
    read = wire.SampleResponse.FromString(write_samples([sampled], scores, with_logprobs=True))
    logprobs = np.frombuffer(read.prompt_logprobs, "<f4")
    assert np.isnan(logprobs[0])
    assert logprobs[1] == -0.5
    top = read.topk_prompt_logprobs
    assert (top.length, top.k) == (2, 2)
    assert np.frombuffer(top.token_ids, "<i4").tolist() == [0, 0, 7, 8]
    assert np.frombuffer(top.logprobs, "<f4").tolist() == [-99999.0, -99999.0, -0.5, -2.0]
    alone = wire.SampleResponse.FromString(write_samples([sampled], scores))
    assert not alone.HasField("prompt_logprobs")
    assert alone.HasField("topk_prompt_logprobs")


async def test_a_request_cancelled_at_any_await_leaves_its_adapter_to_others(base: Path) -> None:
    engine = await TransformersEngine.start(str(base), max_slots=4, max_context=32)
    adapters = held(engine, 1)
    metered = MeteredEngine(engine, 1)

    async def draw() -> None:
        async with adapters.using(snapshot(base, 0)) as name:
            await metered.generate("ada", [1], Sampling(2), request_id="a", adapter=name)

    async def others_are_served() -> None:
        async with asyncio.timeout(60), adapters.using(snapshot(base, 1)) as name:
            await metered.generate("bob", [1], Sampling(1), request_id="b", adapter=name)

    assert await cancel_everywhere(draw, others_are_served) > 2
    await engine.close()


async def test_whoever_waits_for_a_place_gets_it_from_a_cancelled_one(base: Path) -> None:
    engine = await TransformersEngine.start(str(base), max_slots=4, max_context=32)
    adapters = held(engine, 1)
    is_held, ends = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with adapters.using(snapshot(base, 0)):
            is_held.set()
            await ends.wait()

    holding = asyncio.create_task(hold())
    await is_held.wait()
    waiting = [
        asyncio.create_task(one_token(engine, adapters, snapshot(base, number)))
        for number in (1, 2)
    ]
    await asyncio.sleep(0)
    holding.cancel()
    waiting[0].cancel()
    assert await asyncio.wait_for(waiting[1], 60) == "2"
    await engine.close()
