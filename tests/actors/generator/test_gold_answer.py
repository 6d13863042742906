"""The gold answer of a row never reaches the model: neither as text nor as token."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.rollout.agent_loop import AgentLoop, EpisodePlan, EpisodeSampling
from tinkermq.broker.client.connection import Broker
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.datasets import verl_row, write_rows
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments, Start
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.config.sections import RolloutConfig
from tinkermq.schemas.wire.subjects import JobScope

TRUTH = "gold-42"


class TellingGame(AbstractGame):
    """Returns the gold answer where a model must not read it."""

    def get_system_prompt(self) -> str:
        """Return no system prompt."""
        return ""

    def get_initial_user_message(self) -> str:
        """Return nothing: the question is in the data."""
        return ""

    def reset(self, ground_truth: str = "", **_: Any) -> str:
        """Return the gold answer, which a dataset game must not show."""
        self._truth, self._turn = ground_truth, 0
        return ground_truth

    def step(self, action: str) -> StepResult:
        """Tell the gold answer in `info` only."""
        self._turn += 1
        return StepResult("no", 0.0, self._turn > 1, info={"ground_truth": self._truth})

    def get_state(self) -> dict[str, Any]:
        """Tell the gold answer to whoever records states."""
        return {"ground_truth": self._truth}


async def test_what_a_model_reads_holds_no_gold_answer(
    broker: Broker,
    scope: JobScope,
    folder: Path,
    tmp_path: Path,
) -> None:
    row = verl_row("6*7", TRUTH, data_source="telling", split="train", index=0)
    path = str(write_rows(tmp_path / "rows.jsonl", [row]))
    env = EnvConfig(game=f"{__name__}:TellingGame", train_data=[path], val_data=[path])
    host, stopping = EnvironmentHost(broker, scope, env, seed=0), asyncio.Event()
    hosting = asyncio.create_task(host.run(stopping))
    tokenizer = load_tokenizer(str(folder))
    rollout = RolloutConfig(max_turns=2, max_turn_tokens=4, max_response_tokens=64)
    hosts = Environments(broker, scope, env, lambda _: nullcontext())
    chat = ChatTokenizer(tokenizer)
    engine = await TransformersEngine.start(str(folder), max_slots=2, max_context=160)
    loop = AgentLoop(engine, chat, hosts, rollout, EpisodeSampling.of(rollout))
    played = await loop.run(EpisodePlan("e0", Start("train", 0, 0), greedy=True))
    await engine.close()
    stopping.set()
    await hosting
    assert len(played.turn_ends) == 2
    assert played.info == {"ground_truth": TRUTH}  # for the record of the episode
    assert TRUTH not in str(played.messages)
    assert TRUTH not in str(tokenizer.decode(played.token_ids.tolist()))
