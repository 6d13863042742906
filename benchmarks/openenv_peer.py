"""OpenEnv's own server and client, run by the interpreter of an environment that has its package.

`app` is an environment that does nothing, for uvicorn. As a program it plays it with OpenEnv's
generic client: arguments are URL, sessions, episodes of each session and steps of each episode; it
prints the steps per second.
"""

# pyright: reportMissingImports=false

import asyncio
import os
import sys
import time
from typing import Any, cast

from openenv.core import GenericEnvClient as UntypedClient
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment as UntypedEnvironment
from openenv.core.env_server.types import Action as UntypedAction
from openenv.core.env_server.types import Observation as UntypedObservation
from openenv.core.env_server.types import State

Environment, Action = cast(Any, UntypedEnvironment), cast(Any, UntypedAction)
Observation, GenericEnvClient = cast(Any, UntypedObservation), cast(Any, UntypedClient)


class Said(Action):
    """What the policy says."""

    message: str


class Heard(Observation):
    """What the environment answers."""

    reply: str = ""


class IdleEnvironment(Environment):
    """Answers at once, and never ends."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **_: Any) -> Any:
        """Begin an episode."""
        return Heard(reply="begin")

    def step(self, action: Any, **_: Any) -> Any:
        """Answer what was said."""
        return Heard(reply=action.message, reward=0.5)

    @property
    def state(self) -> State:
        """Return nothing."""
        return State()


app = create_app(
    IdleEnvironment,
    Said,
    Heard,
    env_name="idle",
    max_concurrent_envs=int(os.environ.get("MAX_SESSIONS", "1000")),
)


async def play(url: str, num_episodes: int, num_steps: int) -> None:
    """Play some episodes, each on a session of its own."""
    for seed in range(num_episodes):
        async with GenericEnvClient(base_url=url) as client:
            await client.reset(seed=seed)
            for _ in range(num_steps):
                await client.step({"message": "hello"})


async def main() -> None:
    """Play with all sessions at once."""
    url, (num_sessions, num_episodes, num_steps) = sys.argv[1], map(int, sys.argv[2:])
    started = time.perf_counter()
    await asyncio.gather(*(play(url, num_episodes, num_steps) for _ in range(num_sessions)))
    seconds = time.perf_counter() - started
    print(num_sessions * num_episodes * num_steps / seconds)


if __name__ == "__main__":
    asyncio.run(main())
