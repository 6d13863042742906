"""A taskset of verifiers with an environment of its own, of several turns."""

# verifiers: not installed for development.
# pyright: reportMissingImports=false

import random

import verifiers.v1 as vf


class LadderData(vf.TaskData):
    steps: int


class LadderTask(vf.Task[LadderData]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"

    @vf.reward(weight=0.5)
    async def climbed(self, trace: vf.Trace) -> float:
        return float(trace.info.get("climbed", 0) == self.data.steps)

    @vf.reward(weight=0.5)
    async def quick(self, trace: vf.Trace) -> float:
        return float(trace.num_turns == self.data.steps)


class LadderEnvConfig(vf.EnvConfig):
    climber: vf.AgentConfig = vf.AgentConfig(max_turns=5)


class LadderEnv(vf.Env[LadderEnvConfig]):
    """Tells a number for each step of the ladder; the climber must say it back."""

    async def run(self, task, agents):
        climbed = 0
        async with agents.climber.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and climbed < task.data.steps:
                number = random.randrange(10)  # as careless as many environments are
                segment = await interaction.turn(f"say {number}")
                climbed += segment.last_reply == str(number)
                interaction.trace.info["climbed"] = climbed

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_metric("turns", trace.num_turns)


class LadderTaskset(vf.Taskset[LadderTask]):
    INFINITE = True

    def load(self):
        index = 0
        while True:
            yield LadderTask(LadderData(prompt="ready?", steps=2 + index % 2), self.config.task)
            index += 1


__all__ = ["LadderEnv", "LadderTaskset"]
