"""An episode with images from the file to the learner: played in turns, recorded, and agreed on."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from tinkermq.actors.policy.chat import ChatTokenizer, make_chat
from tinkermq.actors.rollout.agent_loop import (
    AgentLoop,
    EpisodeFailed,
    EpisodePlan,
    EpisodeSampling,
)
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer, _all
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    create_shared,
    delete_job_streams,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.envs.games.geo3k import make_data
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments, Start
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.wire.errors import DataError, ModelError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.generator.conftest import EngineKind, StartEngine
from tests.support.groups import make_group
from tests.support.images import IMAGE, IMAGE_ID, make_vision_model, png


def _config(model: Path, data: Path, **rollout: Any) -> JobConfig:
    train, val = make_data(data, 2, 2)
    limits = {"max_turns": 2, "max_prompt_tokens": 24, "max_turn_tokens": 6}
    return JobConfig.model_validate(
        {
            "model": {"path": str(model)},
            "env": {"game": "geo3k_tool", "train_data": [str(train)], "val_data": [str(val)]},
            "rollout": {"group_size": 3, **limits, "max_response_tokens": 80, **rollout},
        }
    )


@pytest_asyncio.fixture(loop_scope="package")
async def seen(nats_server: NatsServer) -> AsyncIterator[tuple[Broker, JobScope]]:
    """A connection in the engines' event loop, and a job with its streams."""
    async with await connect(nats_server.url, name="test") as broker:
        await create_shared(broker)
        scope = JobScope("local", f"job-seen-{uuid.uuid4().hex[:8]}")
        await create_job_streams(broker, scope, LimitsConfig())
        yield broker, scope
        await delete_job_streams(broker, scope)


@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize("seeing", ["qwen2_vl"], indirect=True)
async def test_the_learner_computes_the_logprobs_that_the_engine_recorded(
    seen: tuple[Broker, JobScope],
    start: StartEngine,
    engine_kind: EngineKind,
    seeing: Path,
    tmp_path: Path,
) -> None:
    broker, scope = seen
    config = _config(seeing, tmp_path)
    host, stopping = EnvironmentHost(broker, scope, config.env, seed=0), asyncio.Event()
    hosting = asyncio.create_task(host.run(stopping))
    chat = make_chat(config)
    engine = await start(seeing)
    hosts = Environments(broker, scope, config.env, lambda _: nullcontext())
    loop = AgentLoop(engine, chat, hosts, config.rollout, EpisodeSampling.of(config.rollout))
    heard: list[bytes] = []

    async def overhear(message: Msg) -> None:
        heard.append(message.data)

    listening = await broker.nc.subscribe(">", cb=overhear)
    plans = [EpisodePlan(f"e{number}", Start("train", 0, 0)) for number in range(3)]
    group = make_group(await asyncio.gather(*(loop.run(plan) for plan in plans)))
    prompt = group.trajectories[0].token_ids[: int(group.trajectories[0].mask.argmax())]
    assert (prompt == IMAGE_ID).sum() == 4
    if engine_kind == "transformers":  # the prompt is shorter than what vLLM shares
        assert engine.stats().reused_tokens > 2 * len(prompt)  # the group's, and cached turns
    shared = group.with_shared_images()
    (image,) = shared.images
    assert len(heard) >= 6  # reset and two steps, asked and answered
    # in each answer to resets once, of which there is one unless the machine is slow; in no turn
    assert 1 <= sum(data.count(image) for data in heard) <= len(plans)
    await listening.unsubscribe()
    assert shared.trajectories[0].messages[0]["content"][0] == {"type": "image", "image": 0}
    assert [item.turn_ends.size for item in shared.trajectories] == [2, 2, 2]
    small = loop.__class__(
        engine,
        chat,
        hosts,
        config.rollout.model_copy(update={"max_prompt_tokens": len(prompt) - 1}),
        EpisodeSampling(1.0),
    )
    with pytest.raises(EpisodeFailed, match=f"has {len(prompt)} tokens"):
        await small.run(EpisodePlan("small", Start("train", 0, 0)))
    stopping.set()
    await hosting
    await engine.close()
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=1)
    trainer.check_readable(shared)
    batch = assemble([shared])
    ours_N, _ = trainer._score_all(trainer._packer.pack(batch, _all(batch)), batch, trainer._scorer)
    np.testing.assert_allclose(ours_N.numpy(), batch.behaviour_N.numpy(), atol=1e-4)


def test_an_image_takes_the_tokens_of_its_size_and_equal_texts_differ_by_it(
    folder: Path, tmp_path: Path
) -> None:
    chat = make_chat(_config(make_vision_model(tmp_path / "model"), tmp_path))

    def asked(image: Any, text: str = "?") -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
        return [{"role": "user", "content": parts}]

    for width, height, tokens in ((16, 16, 4), (40, 24, 15), (400, 300, 54)):
        ids = chat.first_prompt(asked(png(width, height)))
        assert (ids == IMAGE_ID).sum() == tokens
        assert ids.tolist() == chat.prompt(asked({"bytes": png(width, height), "path": None}))
    named = chat.first_prompt(asked(png(16, 16), f"what is {IMAGE}?"))
    assert (named == IMAGE_ID).sum() == 4  # what a text says is no image
    assert f"what is {IMAGE}?" in chat.decode(named)
    with pytest.raises(DataError, match=r"not there in bytes, but as 'a\.png'"):
        chat.first_prompt(asked("a.png"))
    with pytest.raises(DataError, match="cannot be opened"):
        chat.first_prompt(asked(b"GIF89a"))
    with pytest.raises(DataError, match=r"\d+ × 1 pixels cannot be seen"):
        chat.first_prompt(asked(png(900, 1)))
    text_only: ChatTokenizer = make_chat(_config(folder, tmp_path))
    with pytest.raises(ModelError, match="reads text alone"):
        text_only.first_prompt(asked(png(8, 8)))
