"""Run an episode of an OpenEnv harness environment as an agent's program.

    agent:
      command: ["{python}", -m, tinkermq.envs.adapters.openenv_program, "my_env.server:make"]

A harness environment runs a real agent, Claude Code or Codex say, and one step is one message to
it. Each user message of the task's prompt is such a step, until the environment is done; its
rewards are added. `my_env.server:make` makes the environment here, and the agent that it starts
finds the model of the episode in the usual environment variables. A URL names a server that runs
elsewhere; its reset is told where the model is (`--reset`), if the environment takes that.
"""

import argparse
import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import ConfigError, GameError, TinkermqError
from ...schemas.wire.foreign import clean_text, shown, words_of
from ...schemas.wire.message import summarize
from ..agents.programs.environment import last_user_text
from ..registry import Extra, extra
from .openenv_client import Observation

_PACKAGE = Extra("openenv", "pip install openenv")
_WEBSOCKETS = extra("websockets", "openenv")
_RESET = {"base_url": "{openai_base_url}", "api_key": "{api_key}", "model": "{model}"}
"""Default reset parameters for a server elsewhere (`--reset`)."""
_MAX_BYTES = 64 << 20
_PING_TIMEOUT_S = 600.0
"""Time to wait for a busy server; `agent.timeout_s` bounds the episode."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the episode that the environment variables name; write its reward; return the code."""
    chosen = _parsed(arguments)
    try:
        worth = _play(chosen, dict(os.environ))
    except TinkermqError as error:
        sys.stderr.write(f"{error.message}. {error.hint}\n")
        return 1
    Path(os.environ["TINKERMQ_REWARD"]).write_text(json.dumps(worth), encoding="utf-8")
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="openenv_program", description=__doc__)
    parser.add_argument("environment", help="module:factory, or the URL of a server")
    parser.add_argument(
        "--reset",
        help="parameters of the environment's reset, as JSON; {openai_base_url}, "
        "{anthropic_base_url}, {api_key} and {model} in its texts are the episode's",
    )
    return parser.parse_args(arguments)


@dataclass
class _Observed:
    """An environment's answer."""

    reward: float
    done: bool
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _play(chosen: argparse.Namespace, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the reward of an episode; GameError if it could not run."""
    target: str = chosen.environment
    is_elsewhere = "://" in target
    reset = _parameters(chosen.reset, _RESET if is_elsewhere else {}, variables)
    messages = _messages(variables)
    environment = _Elsewhere(target) if is_elsewhere else _Here(target)
    reward, num_turns, is_done = 0.0, 0, False
    with closing(environment):
        environment.reset(reset)
        for message in messages:
            observed = environment.step(message)
            if problem := observed.metadata.get("error"):
                raise GameError(
                    f"the environment's agent failed in turn {num_turns + 1}: "
                    f"{clean_text(problem)}",
                    hint="see its own log; a crash and a time limit are the environment's",
                )
            reward, num_turns = reward + observed.reward, num_turns + 1
            is_done = observed.done
            if is_done:
                break
    return {"reward": reward, "info": {"turns": num_turns, "done": float(is_done)}}


def _parameters(
    text: str | None, default: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return the parameters of the reset, with the episode's seed, id, and access to the model."""
    value: Any = default
    if text is not None:
        try:
            value = read_json(text)
        except ValueError as error:
            hint = 'write {"key": "value"}'
            raise ConfigError(f"--reset is not JSON: {error}", hint=hint) from error
        if not isinstance(value, dict):
            hint = 'write {"key": "value"}'
            raise ConfigError(f"--reset={text!r:.80} is not an object", hint=hint)
    access = {
        "{openai_base_url}": variables.get("OPENAI_BASE_URL", ""),
        "{anthropic_base_url}": variables.get("ANTHROPIC_BASE_URL", ""),
        "{api_key}": variables.get("OPENAI_API_KEY", ""),
        "{model}": variables.get("OPENAI_MODEL", "policy"),
    }
    episode = {
        "seed": int(variables.get("TINKERMQ_SEED", "0")),
        "episode_id": variables.get("TINKERMQ_EPISODE", "")[:255] or None,
    }
    return {**episode, **cast("dict[str, Any]", _filled(value, access))}


def _filled(value: Any, access: Mapping[str, str]) -> Any:
    """Return a value with names in braces replaced by the episode's values."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: _filled(item, access) for key, item in items}
    if isinstance(value, list):
        return [_filled(item, access) for item in cast("list[Any]", value)]
    if isinstance(value, str):
        for name, instead in access.items():
            value = value.replace(name, instead)
    return value


def _messages(variables: Mapping[str, str]) -> list[str]:
    """Return the user messages of the task's prompt; each is a turn."""
    path = variables.get("TINKERMQ_TASK")
    row: Any = read_json(Path(path).read_bytes()) if path else {}
    prompt: Any = cast("dict[str, Any]", row).get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    listed = cast("list[dict[str, Any]]", prompt if isinstance(prompt, list) else [])
    texts = [last_user_text([message]) for message in listed if message.get("role") == "user"]
    if not any(texts):
        raise ConfigError(
            "the task has no prompt: there is nothing to say to the environment's agent",
            hint="give the rows of env.train_data a column prompt, a text or chat messages",
        )
    return texts


class _Here:
    """An environment of the package openenv in this process."""

    def __init__(self, target: str) -> None:
        harness: Any = _PACKAGE.load("core.harness")
        self._action: Any = harness.HarnessAction
        module, _, name = target.partition(":")
        sys.path.insert(0, str(Path.cwd()))
        try:
            make = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{shown(target)} cannot be imported: {words_of(error)}",
                hint="name module:factory; its files may lie in the program's folder",
            ) from error
        self._loop = asyncio.Runner()
        self._environment: Any = make()

    def reset(self, parameters: Mapping[str, Any]) -> None:
        self._loop.run(self._environment.reset_async(**parameters))

    def step(self, message: str) -> _Observed:
        action = self._action(message=message)
        observation: Any = self._loop.run(self._environment.step_async(action))
        metadata = cast("dict[str, Any]", observation.metadata)
        return _Observed(_number(observation.reward), bool(observation.done), metadata)

    def close(self) -> None:
        self._environment.close()
        self._loop.close()


class _Elsewhere:
    """An environment on a server, over one WebSocket."""

    def __init__(self, url: str) -> None:
        client: Any = _WEBSOCKETS.load("sync.client")
        self._failures: Any = (OSError, _WEBSOCKETS.load("exceptions").WebSocketException)
        self._url = url.rstrip("/")
        address = "ws" + self._url.removeprefix("http") + "/ws"
        self._opened = ExitStack()
        try:
            self._socket: Any = self._opened.enter_context(
                client.connect(
                    address, max_size=_MAX_BYTES, ping_timeout=_PING_TIMEOUT_S, proxy=None
                )
            )
        except (*self._failures, ValueError) as error:
            raise self._away(error) from error

    def reset(self, parameters: Mapping[str, Any]) -> None:
        self._request("reset", parameters)

    def step(self, message: str) -> _Observed:
        data = self._request("step", {"message": message})
        info: Any = data.get("metadata")
        metadata = cast("dict[str, Any]", info) if isinstance(info, dict) else {}
        try:
            answer = Observation.model_validate({"observation": {}, **data})
        except ValidationError as error:
            raise GameError(
                f"{self._url} answered a step with {shown(data)}: {summarize(error)}",
                hint="the answer to a step has reward, a number or null, and done",
            ) from error
        return _Observed(_number(answer.reward), answer.done, metadata)

    def close(self) -> None:
        self._opened.close()

    def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer: Any = read_json(self._socket.recv())
        except self._failures as error:
            raise self._away(error) from error
        fields = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        value: Any = fields.get("data")
        content = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        if fields.get("type") != "observation":
            raise GameError(
                f"{self._url} answered {kind} with {shown(content.get('message', answer))}",
                hint="a harness environment takes the parameters of --reset, and a message a step",
            )
        return content

    def _away(self, error: BaseException) -> GameError:
        return GameError(
            f"{self._url} does not answer: {words_of(error)}",
            hint="start the server where the program reaches it, or make the environment here",
        )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


if __name__ == "__main__":
    sys.exit(main())
