"""The example agent is worth what the game of the same task is, whatever its model says."""

import json
from pathlib import Path

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.agents.local_run import LocalCall, open_program
from tinkermq.envs.games.calculator import CalculatorGame
from tinkermq.schemas.config.job import JobConfig

from tests.support.configs import example

ROOT = Path(__file__).resolve().parents[3]
ANSWERS = [["=12*34", " 408\n"], ["=12*3", "=12*34"], ["no idea"]]


class Reciting:
    """A model that says one thing after the other."""

    def __init__(self, answers: list[str]) -> None:
        self._answers = iter(answers)

    async def say(self, call: LocalCall) -> str:
        """Say the next."""
        return next(self._answers)


def as_game(answers: list[str]) -> float:
    """What the game gives for the answers."""
    game = CalculatorGame()
    game.reset(ground_truth="408", extra_info={"question": "12*34"})
    return sum(game.step(answer).reward for answer in answers)


async def test_the_example_agent_earns_what_the_game_gives(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "12*34", "answer": "408"}))
    config = example("agent", f"env.train_data=[{data}]", "env.val_data=[]")
    async with open_program(broker, JobConfig.model_validate(config)) as program:
        for answers in ANSWERS:
            run = await program.run(Reciting(answers).say, row=0)
            assert run.result is not None, run.error
            assert run.result.reward == as_game(answers), answers
            assert len(run.model.calls) == len(answers)
