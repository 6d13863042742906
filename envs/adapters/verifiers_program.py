"""Run an episode of a verifiers environment as an agent's program.

    agent:
      command: ["{python}", -m, tinkermq.envs.adapters.verifiers_program, my-taskset]

verifiers runs the task itself, harness, tools and interception included; its client of the model is
pointed at the episode's proxy. The seed of the task, or `number` in its row, says which task it is.
Agents run where the program does (`runtime: subprocess`), unless `--env-config` says otherwise.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import ConfigError, GameError, TinkermqError
from ..registry import extra

_EXTRA = extra("verifiers", "verifiers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the episode that the environment variables name; write its reward; return the code."""
    chosen = _parsed(arguments)
    try:
        reward = asyncio.run(_play(chosen, dict(os.environ)))
    except TinkermqError as error:
        sys.stderr.write(f"{error.message}. {error.hint}\n")
        return 1
    Path(os.environ["TINKERMQ_REWARD"]).write_text(json.dumps(reward), encoding="utf-8")
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verifiers_program", description=__doc__)
    parser.add_argument("taskset", help="the taskset's id, as verifiers takes it")
    parser.add_argument("--config", default="{}", help="the taskset's configuration, as JSON")
    parser.add_argument("--env", default="", help="an environment other than the taskset's own")
    parser.add_argument("--env-config", default="{}", help="its configuration, as JSON")
    parser.add_argument("--num-tasks", type=int, default=1024, help="draw one of the first so many")
    return parser.parse_args(arguments)


async def _play(chosen: argparse.Namespace, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the reward of an episode; GameError if verifiers could not run it."""
    taskset = {**_map(chosen.config, "--config"), "id": chosen.taskset}
    settings = {**_map(chosen.env_config, "--env-config"), "id": chosen.env, "taskset": taskset}
    vf = _EXTRA.load("v1")
    for agent in vf.configs.agent.agent_config_fields(vf.resolve_env_config(settings)):
        settings[agent] = {"runtime": {"type": "subprocess"}, **settings.get(agent, {})}
    env = vf.load_environment(vf.resolve_env_config(settings))
    tasks = list(env.taskset.take(chosen.num_tasks))
    if not tasks:
        raise GameError(f"the taskset {chosen.taskset} has no tasks")
    endpoint = {"base_url": variables["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
    context = vf.ModelContext(
        model=variables.get("OPENAI_MODEL", "policy"),
        client=vf.EvalClientConfig(**endpoint),
        sampling=vf.SamplingConfig(),
    )
    async with env.serving():
        episode = await env.run_episode(tasks[_number(variables) % len(tasks)], context)
    return _worth(episode)


def _worth(episode: Any) -> dict[str, Any]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        why = str(errors[0])[:500] if errors else "it does not say why"
        hint = "try it with verifiers' own `eval`"
        raise GameError(f"verifiers could not run the episode: {why}", hint=hint)
    trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    info: dict[str, float] = {}
    for trace in trained:
        info |= trace.metrics
        info |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    reward = sum(float(trace.reward) for trace in trained) / len(trained)
    return {"reward": reward, "info": info}


def _number(variables: Mapping[str, str]) -> int:
    """Return the number of the task: the row's, or else the seed."""
    row: dict[str, Any] = {}
    if path := variables.get("TINKERMQ_TASK"):
        row = dict(read_json(Path(path).read_bytes()))
    number = row.get("number")
    return number if isinstance(number, int) else int(variables.get("TINKERMQ_SEED", "0"))


def _map(text: str, name: str) -> dict[str, Any]:
    try:
        value: Any = read_json(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}", hint='write {"key": "value"}') from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={text!r:.80} is not an object", hint='write {"key": "value"}')
    return cast("dict[str, Any]", value)


if __name__ == "__main__":
    sys.exit(main())
