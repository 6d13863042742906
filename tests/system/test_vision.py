"""A vision-language model learns to look at drawings, through the whole stack.

A policy that does not look names the right one of three shapes one time in three.
"""

from pathlib import Path
from typing import Any, cast

import pytest
from tinkermq.clients import AsyncInferenceSchedulerClient, run_inference_async
from tinkermq.envs.games.geo3k import Geo3KToolGame, make_data
from tinkermq.schemas.wire.images import with_data_urls

from tests.actors.gateway.http import openai_client
from tests.support.configs import example, small_job
from tests.support.images import IMAGE_ID
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model
from tests.support.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.learns
@pytest.mark.parametrize("seed", [0, 1])
async def test_the_answers_come_to_be_those_of_the_drawings(
    stack: Stack, tmp_path: Path, seed: int
) -> None:
    train, val = make_data(tmp_path)
    config = example(
        "geo3k",
        f"seed={seed}",
        f"model.path={warm_model('geo3k')}",
        f"env.train_data=[{train}]",
        f"env.val_data=[{val}]",
    )
    job = await stack.submit(config)
    await job.until("COMPLETED", deadline_s=400)
    results = await job.validations()
    before, after = (results[step]["val/mean_score"] for step in (0, max(results)))
    assert before <= 0.65
    assert after >= 0.75
    assert after >= before + 0.2
    assert results[max(results)]["val/failed_episodes"] == 0


async def test_tries_with_feedback_are_trained_replayed_and_served_with_their_drawings(
    stack: Stack, tmp_path: Path
) -> None:
    """With an adapter, which is trained on the eyes, too."""
    train, val = make_data(tmp_path, 24, 8)
    limits = {"max_turns": 3, "max_prompt_tokens": 24, "max_turn_tokens": 12}
    config = small_job(
        warm_model("geo3k"),
        env={
            "game": "geo3k_tool",
            "train_data": [str(train)],
            "val_data": [str(val)],
            "num_val": 8,
        },
        rollout={**limits, "max_response_tokens": 192},
        lora={"rank": 4},
        training={"num_steps": 3},
    )
    job = await stack.submit(config)
    await job.until("COMPLETED", deadline_s=300)
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    episodes = [episode for group in groups for episode in group.sampled]
    for group in groups:
        assert len(group.images) == 1  # once for all episodes
    for episode in episodes:
        assert (episode.token_ids[: int(episode.mask.argmax())] == IMAGE_ID).sum() == 4
        assert episode.messages[0]["content"][0] == {"type": "image", "image": 0}
        *tries, last = [round(float(reward), 2) for reward in episode.rewards]
        assert set(tries) <= {-0.05}
        assert last == 1 or (last == 0 and len(tries) == 2)
    assert {len(episode.rewards) for episode in episodes} == {1, 2, 3}
    assert (await job.validations())[3]["val/failed_episodes"] == 0

    played: dict[str, Any] = {"game_class": Geo3KToolGame, "data_path": val, "max_samples": 8}
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        served = await client.submit_inference_job(
            f"{job.record.name}@3", config={"output_dir": str(tmp_path)}
        )
        report = await run_inference_async(served["vllm_server_url"], **played, token_ids=True)
        async with openai_client(stack.broker) as openai:
            for result in report.results:
                *_, last = (n for n, m in enumerate(result.messages) if m["role"] == "assistant")
                chat = await openai.chat.completions.create(
                    model=served["name"],
                    messages=cast("Any", with_data_urls(result.messages[:last])),
                    max_tokens=12,
                    temperature=0,
                )
                assert chat.choices[0].message.content == result.messages[last]["content"]
        await client.cancel_job(served["job_id"])
    assert {result.error for result in report.results} == {None}
    for result in report.results:
        assert (result.token_ids or []).count(IMAGE_ID) == 4
