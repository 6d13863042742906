"""The engines of a process and the agent loops that play with them, by policy."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...broker.time_use import TimeUse
from ...envs.remote import Environments
from ...schemas.config import JobConfig
from ..policies import MAIN, policy_config, policy_names
from .agent_loop import AgentLoop, EpisodeSampling
from .chat import ChatTokenizer
from .engine import Engine
from .transformers_engine import TransformersEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel


async def start_engine(
    config: JobConfig, version: int = 0, base: "PreTrainedModel | None" = None
) -> Engine:
    """Start the engine that the configuration asks for; its weights are those of `version`.

    `base` is a model in memory whose weights the adapter of the configuration is put beside.
    """
    return await TransformersEngine.start(
        config.model.path,
        max_slots=config.generator.max_requests,
        max_context=config.generator.max_context or config.rollout.max_tokens,
        dtype=config.generator.dtype,
        trust_remote_code=config.model.trust_remote_code,
        lora=config.lora,
        base=base,
        version=version,
        max_waiting=4 * config.generator.max_episodes,
    )


class Players:
    """One engine and one agent loop for each policy of a job."""

    def __init__(self, engines: dict[str, Engine], loops: dict[str, AgentLoop]) -> None:
        self.engines = engines
        self._loops = loops

    @classmethod
    async def start(
        cls,
        config: JobConfig,
        chat: ChatTokenizer,
        environments: Environments,
        sampling: EpisodeSampling,
        time_use: TimeUse | None = None,
    ) -> "Players":
        """Start the engines; `time_use` is told what the episodes wait for."""
        engines = {
            name: await start_engine(policy_config(config, name)) for name in policy_names(config)
        }
        loops = {
            name: AgentLoop(engine, chat, environments, config.rollout, sampling, time_use)
            for name, engine in engines.items()
        }
        return cls(engines, loops)

    @property
    def main(self) -> AgentLoop:
        """The loop of the main policy."""
        return self._loops[MAIN]

    def of(self, roles: Iterable[str]) -> dict[str, AgentLoop]:
        """Say who plays each role: its own policy, or the main one."""
        return {role: self._loops.get(role, self.main) for role in roles}

    def check_engines(self) -> None:
        """Raise what ended an engine, if one has ended: no episode can succeed any more."""
        for loop in self._loops.values():
            loop.check_engine()

    async def close(self) -> None:
        """End the engines."""
        for engine in self.engines.values():
            await engine.close()
