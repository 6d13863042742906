"""A vision-language model learns to look at drawings, through the whole stack.

A policy that does not look names the right one of three shapes one time in three.
"""

import asyncio
import io
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tinkermq.broker.feed import read_metrics
from tinkermq.clients import AsyncInferenceSchedulerClient, run_inference_async
from tinkermq.clients.inference.openai_play import Endpoint, play_with_endpoint
from tinkermq.clients.inference.play import PlayOptions
from tinkermq.envs.games.geo3k import Geo3KToolGame, make_data
from tinkermq.envs.write_data import write_rows

from tests.actors.gateway.http import serving
from tests.support.configs import example, small_job
from tests.support.images import IMAGE_ID, make_vision_model
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
        async with serving(stack.broker) as url:
            endpoint = await asyncio.to_thread(Endpoint.find, url, served["name"])
            options = PlayOptions(**played, max_turns=3, max_tokens_per_turn=12)
            over_http = await play_with_endpoint(endpoint, options)
        await client.cancel_job(served["job_id"])
    assert {result.error for result in [*report.results, *over_http.results]} == {None}
    for result in report.results:
        assert (result.token_ids or []).count(IMAGE_ID) == 4
    greedy = {result.task: result.messages for result in report.results}
    assert {result.task: result.messages for result in over_http.results} == greedy


COLOURS = {"red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 220)}


def square(rng: random.Random, colour: str, side: int = 16) -> bytes:
    """Return a square of about this colour as a PNG file."""
    shade = tuple(value + rng.randint(-30, 30) for value in COLOURS[colour])
    file = io.BytesIO()
    Image.new("RGB", (side, side), shade).save(file, "PNG")
    return file.getvalue()


def about_two_squares(rng: random.Random) -> dict[str, Any]:
    """Return a conversation that shows a square, and another after the first answer."""
    first, second = rng.choices(list(COLOURS), k=2)
    messages = [
        {"role": "user", "content": "<image>colour?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "<image>and this?"},
        {"role": "assistant", "content": second},
    ]
    return {"messages": messages, "images": [square(rng, first), square(rng, second)]}


async def test_conversations_with_images_are_learnt_once_and_replayed_to_the_bit(
    stack: Stack, tmp_path: Path
) -> None:
    rng = random.Random(0)
    rows = [about_two_squares(rng) for _ in range(512)]
    noise = Image.frombytes("RGB", (1800, 1800), rng.randbytes(3 * 1800 * 1800))
    noise.save(file := io.BytesIO(), "PNG")
    rows[7]["images"][0] = file.getvalue()  # larger than a message may be
    config = {
        "name": "squares",
        "model": {"path": str(make_vision_model(tmp_path / "model"))},
        "sft": {"data": [str(write_rows(tmp_path / "squares.parquet", rows))]},
        "rollout": {"max_prompt_tokens": 64, "max_turn_tokens": 8, "max_response_tokens": 64},
        "learner": {"lr": 3e-3, "max_row_tokens": 512, "microbatch_tokens": 4096},
        "training": {"num_steps": 80, "batch_size": 32, "save_freq": 20, "keep_rollouts": True},
    }
    job = await stack.submit(config)
    await job.until_event("checkpoint_saved")
    await job.kill("learner")
    await job.until("COMPLETED", deadline_s=400)
    metrics = await read_metrics(stack.broker, job.scope)
    losses = [one.values["actor/pg_loss"] for one in metrics if "actor/pg_loss" in one.values]
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
    assert losses[-1] < 0.1  # who does not look has a third of the words right: over 0.2
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    given_up = await job.events("task_given_up")
    assert given_up
    assert all("the server takes at most" in event.message for event in given_up)
