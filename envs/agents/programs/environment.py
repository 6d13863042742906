"""The command, variables and task files of a program."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ....schemas.chat_messages import json_default
from ....schemas.config.agent import AgentConfig
from ....schemas.wire.errors import DataError
from ...dataset import TRUTH_COLUMNS, Record
from ...game import ChatMessage
from ...running.episodes import Opening
from ..episode import ProgramEpisode
from .sandbox import GRADER, HOME, TASK, TMP, WORK, TaskEnvironment

INPUT = f"{TASK}/input.json"
ROW = f"{TASK}/row.json"
REWARD = f"{TASK}/reward"
"""File for a program's own reward."""
MCP = f"{TASK}/mcp.json"
"""File with the MCP servers of a program, in the form that clients read."""
_PYTHON_OF_IMAGE = "python3"
_KEPT = ("LANG", "TZ")
_LOOPBACK = "127.0.0.1,localhost"
_MAX_WORD_BYTES = 128 * 1024
"""Linux's limit for one argument, its last zero byte included."""
_ANSWERS = frozenset({*TRUTH_COLUMNS, "solution"})


def task_input(opening: Opening) -> dict[str, Any]:
    """Return a task for its program: the row without its gold answer."""
    record = opening.record
    fields = {} if record is None else _public(record)
    return {**fields, **opening.kwargs}


def whole_row(opening: Opening) -> dict[str, Any]:
    """Return a task for the reward command: the row with its gold answer, and the task."""
    record = opening.record
    fields = task_input(opening)
    if record is not None:
        fields |= {**record.columns, "answer": record.ground_truth, "extra_info": record.extra_info}
    return {**fields, "episode": opening.episode, "seed": opening.seed}


def prompt_of(opening: Opening) -> list[ChatMessage]:
    """Return the chat messages that identify the task; without any, its seed."""
    prompt = opening.kwargs.get("prompt")
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    messages = [] if opening.record is None else opening.record.messages()
    return messages or [{"role": "user", "content": f"seed {opening.seed}"}]


def last_user_text(messages: Sequence[ChatMessage]) -> str:
    """Return the last message of the user, as text."""
    texts = [message["content"] for message in messages if message.get("role") == "user"]
    content = texts[-1] if texts else ""
    if isinstance(content, str):
        return content
    parts = cast("list[dict[str, Any]]", content)
    return "".join(str(part.get("text", "")) for part in parts)


def filled(
    config: AgentConfig,
    command: Sequence[str],
    prompt: str = "",
    task: TaskEnvironment | None = None,
) -> list[str]:
    """Return a command with the names in braces replaced; each word stays one word.

    Raises DataError for a word that cannot be passed to a program.
    """
    has_image = config.image is not None or (task is not None and task.is_image)
    values = {
        "{prompt}": prompt,
        "{workdir}": WORK if task is None else task.workdir,
        "{files}": WORK,
        "{input}": INPUT,
        "{python}": _PYTHON_OF_IMAGE if has_image else sys.executable,
        "{grader}": GRADER,
        "{mcp}": MCP,
    }
    return [passable(_filled(word, values), word) for word in command]


def passable(text: str, source: str) -> str:
    """Return a word of a command; DataError if Linux cannot pass it to a program.

    `source` is what it was made of, for the error.
    """
    num_bytes = len(text.encode(errors="surrogateescape")) + 1
    fault = (
        f"has {num_bytes:,} bytes, over {_MAX_WORD_BYTES:,}" if num_bytes > _MAX_WORD_BYTES else ""
    )
    if "\0" in text:
        fault = "has a zero byte"
    if fault:
        raise DataError(
            f"{source!r:.200} cannot be passed to a program: it {fault}",
            hint="let the program read the text from the file that $TINKERMQ_TASK names ({input}, "
            "its key `prompt`) in place of {prompt}",
        )
    return text


def variables(
    config: AgentConfig,
    episode: ProgramEpisode,
    model: Mapping[str, str],
    task: TaskEnvironment | None = None,
) -> dict[str, str]:
    """Return the variables of a program; `model` are those for the model's API."""
    return {
        **_own(),
        **model,
        **config.environment,
        "TINKERMQ_TASK": INPUT,
        "TINKERMQ_EPISODE": episode.episode,
        "TINKERMQ_SEED": str(episode.seed),
        "TINKERMQ_SPLIT": episode.split,
        "TINKERMQ_WORKDIR": WORK if task is None else task.workdir,
        **({"TINKERMQ_REWARD": REWARD} if task is None else {}),
        **({"TINKERMQ_MCP": MCP} if config.mcp else {}),
    }


def mcp_servers(config: AgentConfig) -> dict[str, Any]:
    """Return the MCP servers of a program in the form that most clients read."""
    servers: dict[str, Any] = {}
    for server in config.named_mcp():
        if server.url:
            servers[server.name] = {"type": "http", "url": server.url, "headers": server.headers}
        else:
            command, *arguments = filled(config, [server.command, *server.args])
            servers[server.name] = {"command": command, "args": arguments, "env": server.env}
    return {"mcpServers": servers}


def plain_variables(config: AgentConfig) -> dict[str, str]:
    """Return the variables of a program outside of an episode."""
    return {**_own(), **config.environment}


def reward_variables(config: AgentConfig, episode: ProgramEpisode) -> dict[str, str]:
    """Return the variables of the reward command, which reaches no model."""
    program = variables(config, episode, {})
    del program["TINKERMQ_REWARD"]
    return {**program, "TINKERMQ_ROW": ROW}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object for a program to read; bytes are written as base64."""
    path.write_text(json.dumps(value, default=json_default, ensure_ascii=False), "utf-8", "replace")


def _own() -> dict[str, str]:
    variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {
        **variables,
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": HOME,
        "IS_SANDBOX": "1",
        "USER": "agent",
        "LOGNAME": "agent",
        "TMPDIR": TMP,
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "XDG_CONFIG_HOME": f"{HOME}/.config",
        "XDG_DATA_HOME": f"{HOME}/.local/share",
        "XDG_STATE_HOME": f"{HOME}/.local/state",
        "NO_PROXY": _LOOPBACK,
        "no_proxy": _LOOPBACK,
    }


def _public(record: Record) -> dict[str, Any]:
    """Return a row without the columns that name an answer."""
    extra = {name: value for name, value in record.extra_info.items() if name not in _ANSWERS}
    fields: dict[str, Any] = {
        **{name: value for name, value in record.columns.items() if name not in _ANSWERS},
        "prompt": record.prompt,
        "data_source": record.data_source,
        "extra_info": extra,
        "images": record.images,
    }
    return {name: value for name, value in fields.items() if value}


def _filled(word: str, values: Mapping[str, str]) -> str:
    """Replace the names in one word; the values are not expanded again."""
    parts: list[str] = []
    while word:
        at, name = min(
            ((word.find(value), value) for value in values if value in word), default=(-1, "")
        )
        if at < 0:
            break
        parts += [word[:at], values[name]]
        word = word[at + len(name) :]
    return "".join([*parts, word])
