"""Agent programs that show images to a small vision model, in all three APIs, through the stack."""

import base64
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tinkermq.clients import AgentEnvironment, AgentEpisode, AsyncServiceClient

from tests.support.configs import small_job
from tests.support.images import IMAGE_ID, make_vision_model, png
from tests.support.models import make_tiny_model
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]

SMALL, TALL = png(16, 16), png(24, 40, 1)


def images_job(model: Path) -> dict[str, Any]:
    """Return a job whose programs the client runs."""
    return small_job(
        model,
        rollout={
            "group_size": 3,
            "max_prompt_tokens": 256,
            "max_turn_tokens": 8,
            "max_response_tokens": 128,
        },
        training={"num_steps": 2, "batch_size": 2, "save_freq": 1, "keep_rollouts": True},
        env={"game": "agent", "hosts": 0},
        agent={"client": True, "timeout_s": 60},
    )


def as_url(image: bytes) -> str:
    """Return an image as OpenAI's APIs take it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


async def by_chat(model: AgentEpisode) -> str:
    """Show an image, and another one behind the answer."""
    async with model.async_openai() as client:

        async def ask(messages: list[Any]) -> Any:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            return answer.choices[0].message

        def seen(text: str, image: bytes) -> Any:
            shown = {"type": "image_url", "image_url": {"url": as_url(image)}}
            return {"role": "user", "content": [{"type": "text", "text": text}, shown]}

        first = await ask(messages := [seen("look", SMALL)])
        messages += [first.model_dump(), seen("and", TALL)]
        return (await ask(messages)).content


async def by_responses(model: AgentEpisode) -> str:
    """Do the same with Responses, the second time as what follows the first."""
    async with model.async_openai() as client:

        def seen(text: str, image: bytes) -> Any:
            told = {"type": "input_text", "text": text}
            shown = {"type": "input_image", "image_url": as_url(image), "detail": "auto"}
            return [{"role": "user", "content": [told, shown]}]

        first = await client.responses.create(model="policy", input=seen("look", SMALL))
        second = await client.responses.create(
            model="policy", input=seen("and", TALL), previous_response_id=first.id
        )
        return second.output_text


async def by_messages(model: AgentEpisode) -> str:
    """Do the same with Messages."""
    async with model.async_anthropic() as client:

        async def ask(messages: list[Any]) -> Any:
            return await client.messages.create(model="policy", max_tokens=8, messages=messages)

        def seen(text: str, image: bytes) -> Any:
            data = base64.b64encode(image).decode()
            source = {"type": "base64", "media_type": "image/png", "data": data}
            told = {"type": "text", "text": text}
            return {"role": "user", "content": [told, {"type": "image", "source": source}]}

        first = await ask(messages := [seen("look", SMALL)])
        messages += [{"role": "assistant", "content": first.content}, seen("and", TALL)]
        return "".join(block.text for block in (await ask(messages)).content)


async def test_images_of_programs_are_trained_and_replayed(stack: Stack, tmp_path: Path) -> None:
    async def program(task: dict[str, Any], model: AgentEpisode) -> float:
        said = [await ask(model) for ask in (by_chat, by_responses, by_messages)]
        return float(len("".join(said)) % 3)

    job = await stack.submit(images_job(make_vision_model(tmp_path / "model")))
    await job.until("RUNNING")
    url = f"{stack.server.url}/{job.scope.user}/{job.scope.job}"
    with AgentEnvironment(program, job.record.config) as env:
        async with AsyncServiceClient(url) as client:
            await client.set_config(job.record.config, env)
        await job.until("COMPLETED")
    groups = [entry.group for entry in await job.entries() if entry.group]
    for group in groups:
        assert sorted(group.images) == sorted([SMALL, TALL])  # once for all calls of all episodes
        for row in group.trajectories:
            shown = [
                part["image"]
                for message in row.messages
                for part in message["content"]
                if isinstance(part, dict) and part["type"] == "image"
            ]
            # One alone where the policy has said an image's token: the second begins a row.
            given = ((row.token_ids == IMAGE_ID) & (row.mask == 0)).sum()
            assert given == {1: 4, 2: 4 + 15}[len(shown)]
    lags = [metric.values.get("staleness/abs_log_ratio/lag_0") for metric in await job.metrics()]
    assert all(lag < 1e-4 for lag in lags if lag is not None)
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


async def test_a_model_of_text_tells_programs_in_each_apis_words(
    stack: Stack, tmp_path: Path
) -> None:
    told: list[dict[str, Any]] = []

    async def program(task: dict[str, Any], model: AgentEpisode) -> float:
        async with model.async_openai() as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hi"}]
            )
        for ask in (by_chat, by_responses):
            with pytest.raises(openai.BadRequestError, match="reads text alone") as refused:
                await ask(model)
            told.append(refused.value.body)  # type: ignore[arg-type]
        with pytest.raises(anthropic.BadRequestError, match="reads text alone") as refused:
            await by_messages(model)
        told.append(refused.value.body["error"])  # type: ignore[index,arg-type]
        return float(len(answer.choices[0].message.content or "") % 2)

    job = await stack.submit(images_job(make_tiny_model(tmp_path / "model")))
    await job.until("RUNNING")
    url = f"{stack.server.url}/{job.scope.user}/{job.scope.job}"
    with AgentEnvironment(program, job.record.config) as env:
        async with AsyncServiceClient(url) as client:
            await client.set_config(job.record.config, env)
        await job.until("COMPLETED")
    assert {one["type"] for one in told} == {"invalid_request_error"}
    assert all("vision-language model" in one["message"] for one in told)
    groups = [entry.group for entry in await job.entries() if entry.group]
    assert {row.info["agent"]["calls"] for group in groups for row in group.trajectories} == {1.0}
