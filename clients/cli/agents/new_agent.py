"""`tinkermq agent new`: a folder with an agent program, its tasks, its reward and configuration."""

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Literal, TypeAlias

from ....schemas.wire.errors import ConfigError
from ..output import literal, say

Kind: TypeAlias = Literal["openai", "anthropic", "command"]

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_PLACES: Mapping[str, str] = {
    "README.md": "README.md",
    "Makefile": "Makefile",
    "agent.yaml": "agent.yaml",
    "tool.py": "program/tool.py",
    "grade.py": "grader/grade.py",
    "train.jsonl": "data/train.jsonl",
    "val.jsonl": "data/val.jsonl",
    "demonstrations.py": "tiny/demonstrations.py",
    "sft.yaml": "tiny/sft.yaml",
    "tiny.yaml": "tiny/agent.yaml",
    "play.py": "tiny/play.py",
}
"""Where each template of `clients/new_agent` goes."""
_PROGRAM = "program/agent.py"
_CLIENTS: Mapping[Kind, str] = {
    "openai": "model.openai()",
    "anthropic": "model.anthropic()",
    "command": "model.openai_base_url, model.api_key",
}
"""What the program's function `answer` takes beside the question, of an episode."""


def new(name: str, /, *, kind: Kind = "openai", into: Path = Path()) -> int:
    """Make a folder with an agent of your own: program, tasks, reward, configuration.

    Parameters
    ----------
    name
        Name of the agent and of its folder: small letters, digits and hyphens.
    kind
        How its program asks the model: by the package openai or anthropic, or as any command may,
        by plain HTTP.
    into
        Folder in which the agent's folder is made.
    """
    folder = write_agent(name, kind, into)
    say(f"made {literal(str(folder))}")
    steps = {
        f"cd {folder}": "the agent",
        "tinkermq agent check agent.yaml": "run it against a scripted model",
        "tinkermq agent play agent.yaml": "be its model yourself",
        "make train": "let a tiny model learn to use the tool, in some minutes",
        "tinkermq train agent.yaml": "train a model under it",
    }
    width = max(map(len, steps))
    for step, meaning in steps.items():
        say(f"  {literal(f'{step:<{width}}')}   [dim]{meaning}[/]")
    return 0


def write_agent(name: str, kind: Kind, into: Path) -> Path:
    """Write an agent into a new folder of `into`; return it. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of an agent",
            hint="write small letters and digits, with hyphens between words: file-finder",
        )
    folder = into / name
    if folder.exists():
        raise ConfigError(
            f"{folder} is there already", hint="choose another name, or remove it first"
        )
    words = {"name": name, "client": _CLIENTS[kind]}
    templates = files("tinkermq.clients") / "new_agent"
    for source, place in {**_PLACES, f"{kind}.py": _PROGRAM}.items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        text = (templates / f"{source}.in").read_text(encoding="utf-8")
        file.write_text(Template(text).substitute(words), encoding="utf-8")
    return folder
