"""Programs of the policy run in the sandbox of a pool's environment host, and are trained on."""

from pathlib import Path

import pytest
from tinkermq.envs.registry import companion, load_game

from tests.support.configs import example
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_an_asynchronous_run_trains_on_programs_that_it_wrote(
    stack: Stack, tmp_path: Path
) -> None:
    train, val = companion(load_game("math_code"), "make_data")(tmp_path)
    overrides = [
        f"model.path={warm_model('math_code')}",
        f"env.train_data=[{train}]",
        f"env.val_data=[{val}]",
        "env.num_val=4",
        "env.kwargs.rewards={answer: 1, boxed: 0.1}",
        "rollout.group_size=4",
        "training.batch_size=4",
        "training.num_steps=3",
        "training.keep_rollouts=true",
        "training.test_freq=0",
    ]
    job = await stack.submit(example("math_code", *overrides))
    await job.until("COMPLETED")
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    played = [one for group in groups for one in group.trajectories]
    assert len(played) >= 4 * 4 * 3
    answers = [
        (one.messages[0]["content"], one.messages[2])
        for one in played
        if one.messages[1]["content"] == f"```py\n{one.messages[0]['content']}\n```"
    ]
    assert answers, "no program was run"
    for question, answer in answers:
        left, right = question.split("*")
        assert answer == {"role": "user", "content": str(int(left) * int(right))}
    assert len(await job.metrics()) == 3
    assert await job.dead() == []
