"""A program learns what the game of the same task does: the calculator, with the openai package."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tinkermq.clients import AgentEnvironment, AgentEpisode
from tinkermq.clients.base import JobAddress
from tinkermq.envs.games.calculator import CALL, calculate
from tinkermq.envs.registry import companion, load_game

from tests.support.configs import example
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model

pytestmark = [
    pytest.mark.learns,
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="session"),
]


async def calculator(task: dict[str, Any], model: AgentEpisode) -> float:
    """Multiply two numbers; a formula in the answer is calculated, and the model asked again."""
    question = str(model.prompt[-1]["content"])
    messages: list[Any] = [{"role": "user", "content": question}]
    async with model.async_openai() as client:
        said = await client.chat.completions.create(model="policy", messages=messages)
        answer = said.choices[0].message.content or ""
        if call := CALL.fullmatch(answer.strip()):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": calculate(call)})
            said = await client.chat.completions.create(model="policy", messages=messages)
            answer = said.choices[0].message.content or ""
    left, right = question.split("*")
    return float(answer.strip() == str(int(left) * int(right)))


def validations(results: dict[int, dict[str, float]]) -> tuple[float, float]:
    """Return the mean scores before and after."""
    return results[0]["val/mean_score"], results[max(results)]["val/mean_score"]


async def test_a_program_learns_as_the_game_of_the_same_task_does(
    stack: Stack, tmp_path: Path
) -> None:
    config = example("calculator", f"model.path={warm_model('calculator')}")
    train, val = companion(load_game("calculator"), "make_data")(tmp_path)
    config["env"] |= {"train_data": [str(train)], "val_data": [str(val)]}
    game = await stack.submit(config)
    await game.until("COMPLETED", deadline_s=600)
    program = {**config, "agent": {"client": True, "timeout_s": 60, "per_host": 512}}
    program["rollout"] = {key: v for key, v in config["rollout"].items() if key != "max_turns"}
    data = {key: config["env"][key] for key in ("train_data", "val_data", "num_val")}
    program["env"] = {**data, "hosts": 0}
    job = await stack.submit(program)
    await job.until("RUNNING")
    with AgentEnvironment(calculator, program) as environment:
        url = JobAddress(stack.server.url, job.scope).server_url
        await asyncio.to_thread(environment.setup, url)
        await job.until("COMPLETED", deadline_s=600)
    (before, after), (_, as_game) = (
        validations(await job.validations()),
        validations(await game.validations()),
    )
    assert before < 0.6
    assert after > 0.75
    assert abs(after - as_game) < 0.12  # as far as seeds of the game are apart
