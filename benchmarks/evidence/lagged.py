"""A run in one process whose lag is exact: step t trains what the weights of step t - lag made.

In a pool the lag is what generation and learning make it; here it is forced, so that its effect
can be measured. All else is the system's own: its engine, agent loop, games, groups, advantages,
losses, corrections and optimiser. Tasks and each token's draw depend on the seed alone, so two runs
of one seed differ in what is compared and in nothing else.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.policy.chat import make_chat
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.rollout.agent_loop import EpisodePlan, EpisodeSampling
from tinkermq.actors.rollout.groups import GroupRunner
from tinkermq.actors.rollout.players import Players
from tinkermq.actors.rollout.recording import EpisodeRecorder, TaskRecorder
from tinkermq.actors.training.policies import Policies, load_models
from tinkermq.actors.training.ranks import Ranks
from tinkermq.envs.data import HostData
from tinkermq.envs.evaluation import task_seed
from tinkermq.envs.game import StepResult
from tinkermq.envs.host_client import Environments, Start, Started
from tinkermq.envs.registry import load_game
from tinkermq.envs.running.episodes import Episodes, Opening
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.env import DescribeReply
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.task import Task

_SEED_BITS = (1 << 62) - 1
Weights = dict[str, torch.Tensor]


@dataclass
class Curve:
    """What a run measured."""

    validation: dict[int, float] = field(default_factory=dict[int, float])
    """Step to the mean reward of the validation episodes."""
    rewards: list[float] = field(default_factory=list[float])
    """Mean reward of what each step trained."""
    numbers: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """What each step of the learner told."""
    samples: int = 0
    """Episodes that were trained."""
    seconds: float = 0.0
    """Of all of it."""
    train_s: float = 0.0
    """Of generation and training, without validations."""
    told: dict[str, float] = field(default_factory=dict[str, float])
    """What else was measured, by its name."""


class LaggedRun:
    """Trains a job without broker and processes, `lag` versions behind."""

    def __init__(self, job: dict[str, Any], *, lag: int, test_every: int) -> None:
        """`job` is a configuration as for `submit`; its `training.max_staleness` is not looked at.

        Raises ConfigError for one that is refused.
        """
        bounded = job["training"] | {"max_staleness": lag}
        self.config: JobConfig = parse_config(deepcopy(job) | {"training": bounded})
        self._lag = lag
        self._test_every = test_every
        torch.set_num_threads(1)

    async def run(self, save: Path | None = None) -> Curve:
        """Train all steps; return what was measured. The model is written to `save`."""
        started, config = time.perf_counter(), self.config
        games = GamesHere(config)
        players = await self._players(games, EpisodeSampling.of(config.rollout))
        examined = Players.of_engines(
            players.engines, config, make_chat(config), games, self._evaluation
        )
        try:
            runner = GroupRunner(players, games, config, "here")
            curve, policies = await self._train(runner, players, examined, games)
            if save is not None:
                policies.save(save, load_tokenizer(config.model.path))
        finally:
            await players.close()
            games.end()
        curve.seconds = time.perf_counter() - started
        return curve

    async def examine(self, trained: Mapping[int, Weights]) -> dict[int, float]:
        """Validate weights that something else trained, by step, as a run's own are validated."""
        games = GamesHere(self.config)
        examined = await self._players(games, self._evaluation)
        try:
            return {
                step: await self._examine(examined, games, weights, step)
                for step, weights in trained.items()
            }
        finally:
            await examined.close()
            games.end()

    async def sample(self) -> list[Group]:
        """Return a group of each row of the training data, played by the untrained model.

        The rows are whole batches.
        """
        games = GamesHere(self.config)
        players = await self._players(games, EpisodeSampling.of(self.config.rollout))
        order, groups = DataOrder(self.config.seed, games.num_train), list[Group]()
        try:
            runner = GroupRunner(players, games, self.config, "here")
            for step in range(1, (games.num_train or 0) // self.config.training.batch_size + 1):
                groups += await self._roll_out(runner, order, step)
        finally:
            await players.close()
            games.end()
        return groups

    @property
    def _evaluation(self) -> EpisodeSampling:
        evaluation = self.config.evaluation
        return EpisodeSampling(evaluation.temperature, evaluation.top_p)

    async def _players(self, games: "GamesHere", sampling: EpisodeSampling) -> Players:
        return await Players.start(self.config, make_chat(self.config), games, sampling)

    async def _train(
        self, runner: GroupRunner, players: Players, examined: Players, games: "GamesHere"
    ) -> tuple[Curve, Policies]:
        config, curve = self.config, Curve()
        steps = config.training.num_steps or 0
        models = load_models(config, None)
        policies = Policies.open(config, models, Ranks(config), total_steps=steps, folder=None)
        order, cpu_s = DataOrder(config.seed, games.num_train), 0.0
        past = deque([_weights(policies)])
        curve.validation[0] = await self._examine(examined, games, past[-1], 0)
        for step in range(1, steps + 1):
            begun, begun_cpu = time.perf_counter(), time.process_time()
            await players.engines[MAIN].load_weights(max(0, step - 1 - self._lag), past[0])
            if len(past) > self._lag:  # the engine has a copy
                past.popleft()
            groups = await self._roll_out(runner, order, step)
            curve.rewards.append(_mean_reward(groups))
            curve.samples += sum(len(group.sampled) for group in groups)
            report = await asyncio.to_thread(policies.step, groups, step)
            curve.numbers.append(report.numbers)
            past.append(_weights(policies))
            curve.train_s += time.perf_counter() - begun
            cpu_s += time.process_time() - begun_cpu
            if step % self._test_every == 0 or step == steps:
                curve.validation[step] = await self._examine(examined, games, past[-1], step)
        curve.told["train_cpu_s"] = cpu_s
        return curve, policies

    async def _roll_out(self, runner: GroupRunner, order: DataOrder, step: int) -> list[Group]:
        size, config = self.config.training.batch_size, self.config
        tasks = [self._task(order, index) for index in range((step - 1) * size, step * size)]
        played = (
            runner.run_group(task, "here", recorder=_SeededTask(f"{config.seed} {task.task}"))
            for task in tasks
        )
        return list(await asyncio.gather(*played))

    def _task(self, order: DataOrder, index: int) -> Task:
        chosen = order.choose(index, 0)
        size = self.config.rollout.group_size
        return Task(task=index, sample=chosen.sample, seed=chosen.seed, group_size=size)

    async def _examine(
        self, examined: Players, games: "GamesHere", weights: Weights, step: int
    ) -> float:
        """Play the validation episodes with these weights; return their mean reward."""
        await examined.engines[MAIN].load_weights(step, weights)
        seed, loop = self.config.seed, examined.main

        async def play(number: int) -> float:
            start = Start("val", number, task_seed(seed, number))
            recorder = _SeededEpisode(f"{seed} val {number}")
            plan = EpisodePlan(f"val-{step}-{number}", start)
            return (await loop.run(plan, recorder=recorder)).reward

        rewards = await asyncio.gather(*map(play, range(games.num_val)))
        return sum(rewards) / len(rewards)


class GamesHere(Environments):
    """The games of a job in this process; an action is answered as soon as it is given."""

    def __init__(self, config: JobConfig) -> None:
        """Open the game's data; raises what the game raises."""
        self._data = HostData(config.env, config.seed)
        self._episodes = Episodes(load_game(config.env.game), config.env.kwargs)
        self.num_train, self.num_val = self._data.num_train, self._data.num_val

    @property
    def rewards_ends(self) -> bool:
        """Only the game gives rewards."""
        return False

    async def describe(self) -> DescribeReply:
        """Say what game it is."""
        facts = self._episodes.probe()
        return DescribeReply(
            game=facts.name,
            num_train=self.num_train,
            num_val=self.num_val,
            host="here",
            roles=facts.roles,
        )

    async def reset(self, episode: str, start: Start) -> Started:
        """Start an episode."""
        record = self._data.record(start.split, start.sample)
        opening = Opening(episode, start.seed, record, start.kwargs, start.split)
        return Started("here", self._episodes.reset(opening))

    async def step(
        self, host: str, episode: str, turn: int, action: str, *, seated: bool = False
    ) -> StepResult:
        """Play an action."""
        del host, turn, seated
        return self._episodes.step(episode, action)

    def close(self, host: str = "", episode: str = "") -> None:
        """Forget an episode."""
        del host
        self._episodes.drop(episode)

    def end(self) -> None:
        """Give the data's files back."""
        self._data.close()


class _SeededTask(TaskRecorder):
    """Gives each episode of a task its own seed."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def open(self, number: int) -> EpisodeRecorder:
        return _SeededEpisode(f"{self._name} {number}")


class _SeededEpisode(EpisodeRecorder):
    """Gives each turn of an episode its own seed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def seed(self, turn: int) -> int | None:
        digest = hashlib.sha256(f"{self._name} {turn}".encode()).digest()
        return int.from_bytes(digest[:8], "little") & _SEED_BITS


def copied_weights(model: Any) -> Weights:
    """Return copies of a model's weights by their names, as an engine loads them."""
    tensors = policy_tensors(model)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _weights(policies: Policies) -> Weights:
    return copied_weights(policies.models[MAIN])


def _mean_reward(groups: Sequence[Group]) -> float:
    rewards = [item.reward for group in groups for item in group.sampled]
    return sum(rewards) / len(rewards)
