"""`tinkermq env new` and `agent new`: a folder with a game or an agent program of one's own."""

import importlib.metadata
import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Literal, TypeAlias

from ...envs.registry import registered_games
from ...schemas.wire.errors import ConfigError
from .output import literal, print_plain, print_text

# `tinkermq agent new`: a folder with an agent program, its tasks, its reward and configuration.

AgentKind: TypeAlias = Literal["openai", "anthropic", "command"]

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
"""Target path of each template of `clients/new_agent`."""
_PROGRAM = "program/agent.py"
_CLIENTS: Mapping[AgentKind, str] = {
    "openai": "model.openai()",
    "anthropic": "model.anthropic()",
    "command": "model.openai_base_url, model.api_key",
}
"""Arguments of the program's function `answer`, besides the question."""


def new_agent(name: str, /, *, kind: AgentKind = "openai", into: Path = Path()) -> int:
    """Create a folder with a new agent: program, tasks, reward, configuration.

    Parameters
    ----------
    name
        Name of the agent and of its folder: small letters, digits and hyphens.
    kind
        How its program calls the model: with the openai or anthropic package, or, as any command
        can, by plain HTTP.
    into
        Parent folder of the new folder.
    """
    steps = {
        "tinkermq agent check agent.yaml": "run it against a scripted model",
        "make train": "let a tiny model learn to use the tool, in some minutes",
        "tinkermq train agent.yaml": "train a model under it",
    }
    return _report(write_agent(name, kind, into), "the agent", steps)


def write_agent(name: str, kind: AgentKind, into: Path) -> Path:
    """Write an agent into a new folder of `into`; return it. Raises ConfigError."""
    folder = _new_folder(name, into, "an agent", "file-finder")
    words = {"name": name, "client": _CLIENTS[kind]}
    _fill(folder, "new_agent", {**_PLACES, f"{kind}.py": _PROGRAM}, words)
    return folder


GameKind: TypeAlias = Literal["dataset", "generated", "tools", "multi-agent", "vision"]
EnvironmentKind: TypeAlias = Literal["openenv", "mcp", "trl"]
Kind: TypeAlias = Literal[GameKind, EnvironmentKind, "agent"]

_COMMON = {
    "README.md": "README.md",
    "Makefile": "Makefile",
    "pyproject.toml": "pyproject.toml",
    "train.yaml": "train.yaml",
    "tiny.yaml": "tiny/train.yaml",
    "sft.yaml": "tiny/sft.yaml",
    "__init__.py": "{module}/__init__.py",
    "test_game.py": "tests/test_game.py",
}
"""Target path of each template of `clients/new_game/common`."""
_OF_KIND = {
    "game.py": "{module}/game.py",
    "demonstrations.py": "{module}/demonstrations.py",
    "test_rules.py": "tests/test_rules.py",
    "make_data.py": "{module}/make_data.py",
    "train.jsonl": "data/train.jsonl",
    "val.jsonl": "data/val.jsonl",
}
"""Target path of each template of a kind's own folder, if there are any."""

_MAKE_DATA = "python -m {module}.make_data"
_TRAIN = (
    "python -m tinkermq.actors.make_tiny $(HERE)/blank {tiny_options}",
    "python -m {module}.demonstrations $(HERE)/chats.{chats}",
    "tinkermq up --port 0 --slots 2",
    "tinkermq sft tiny/sft.yaml name=warm",
    "tinkermq train tiny/train.yaml name=tiny --from warm",
)
"""What `make train` does."""


@dataclass(frozen=True)
class _Kind:
    """Template values of a kind of game; sizes are for training the tiny model."""

    max_turns: int = 1
    max_prompt: int = 96
    max_turn: int = 8
    max_response: int = 16
    max_row_tokens: int = 1024
    sft_epochs: int = 4
    num_steps: int = 40
    lr: str = "5.0e-4"
    tiny_options: str = "--width 64 --layers 2"
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    extra: str = ""
    data: str = ""
    """Ending of the data's files."""

    def words(self, module: str) -> dict[str, str]:
        """Return the template values."""
        words = {name: str(value) for name, value in vars(self).items()}
        words["env_data"] = words["data_row"] = ""
        if self.data:
            words["env_data"] = "".join(
                f"  {split}_data: [data/{split}.{self.data}]\n" for split in ("train", "val")
            )
            words["data_row"] = f"| `data/*.{self.data}` | one question a row |\n"
        words["tiny_data"] = words["env_data"]
        if self.data == "jsonl":  # a tiny model memorises so few words
            words["tiny_data"] = words["env_data"].replace("data/val", "data/train")
        has_images = self.data == "parquet"
        lines = (_MAKE_DATA, *_TRAIN) if has_images else _TRAIN
        words["chats"] = "parquet" if has_images else "jsonl"
        fit = {**words, "module": module}
        words["warm_start"] = "".join(f"\t{line.format(**fit)}\n" for line in lines)
        return words


_KINDS: dict[GameKind, _Kind] = {
    "dataset": _Kind(
        max_turns=2, max_turn=10, max_response=64, num_steps=100, lr="3.0e-4", data="jsonl"
    ),
    "generated": _Kind(),
    "tools": _Kind(
        max_turns=2,
        max_turn=80,
        max_response=120,
        sft_epochs=6,
        lr="3.0e-4",
        tiny_options="--tools --width 64 --layers 2",
    ),
    "multi-agent": _Kind(num_steps=80),
    "vision": _Kind(
        model="Qwen/Qwen2-VL-2B-Instruct",
        extra="[vision]",
        data="parquet",
        tiny_options="--kind qwen2_vl --width 64 --layers 2",
    ),
}


def new(name: str, /, *, kind: Kind = "dataset", into: Path = Path()) -> int:
    """Create a package with a new game: game, data, configuration, test, entry point.

    Parameters
    ----------
    name
        Name of the game and of its folder: small letters, digits and hyphens.
    kind
        Kind of the game: dataset rows, generated states, tools, several roles, or images; an
        environment in the form of OpenEnv, of MCP tools, or of TRL's environment classes; or an
        agent program, as with `tinkermq agent new`.
    into
        Parent folder of the new package.
    """
    match kind:
        case "agent":
            return new_agent(name, into=into)
        case "openenv" | "mcp" | "trl":
            return _new_environment(name, kind, into)
        case _:
            return _new_game(name, kind, into)


def _new_game(name: str, kind: GameKind, into: Path) -> int:
    needs_data = {f"python -m {name.replace('-', '_')}.make_data": "make its pictures"}
    steps = {
        "pip install -e '.[test]'": "register the game",
        **(needs_data if kind == "vision" else {}),
        "pytest": "its own test",
        "tinkermq env check train.yaml": "prove that it is sound",
        "tinkermq env play train.yaml": "play it yourself",
        "make train": "let a tiny model learn it, in two minutes",
        "tinkermq train train.yaml": "train a model on it",
    }
    return _report(write_package(name, into, kind), "the package", steps)


_ENVIRONMENT_PLACES: Mapping[EnvironmentKind, Mapping[str, str]] = {
    "openenv": {
        "environment.py": "server/environment.py",
        "app.py": "server/app.py",
        "__init__.py": "server/__init__.py",
        "Dockerfile": "server/Dockerfile",
        "openenv.yaml": "openenv.yaml",
    },
    "mcp": {
        "server.py": "server.py",
        "reward.py": "{module}.py",
        "train.jsonl": "data/train.jsonl",
        "val.jsonl": "data/val.jsonl",
    },
    "trl": {
        "environment.py": "{module}.py",
        "train.jsonl": "data/train.jsonl",
        "val.jsonl": "data/val.jsonl",
    },
}
"""Target path of each template of a kind in `clients/new_environment`, besides `_OF_ALL`."""
_OF_ALL = {name: name for name in ("README.md", "pyproject.toml", "train.yaml")}
_TAKEN = frozenset({"tinkermq", "mcp", "openenv", "server", "trl"})
"""Names of packages that a new one may need, besides Python's own."""
_SERVE = {
    "python -m venv .venv && .venv/bin/pip install -e .": "install it, apart from tinkermq",
    ".venv/bin/server": "serve it, and leave it running",
}


def _new_environment(name: str, kind: EnvironmentKind, into: Path) -> int:
    install = _SERVE if kind == "openenv" else {"pip install -e .": "install it"}
    steps = {
        **install,
        "tinkermq env check train.yaml": "see its tools, and that it plays",
        "tinkermq train train.yaml": "train a model on it",
    }
    return _report(write_environment(name, into, kind), "the environment", steps)


def write_environment(name: str, into: Path, kind: EnvironmentKind) -> Path:
    """Write an environment into a new folder of `into`; return it. Raises ConfigError."""
    folder, module = _new_package(name, into)
    words = {
        "name": name,
        "module": module,
        "folder": str(folder.absolute()),
        "class_name": _class_name(module),
    }
    _fill(folder, f"new_environment/{kind}", {**_ENVIRONMENT_PLACES[kind], **_OF_ALL}, words)
    return folder


def write_package(name: str, into: Path, kind: GameKind = "dataset") -> Path:
    """Write the package of a game into a new folder of `into`; return it. Raises ConfigError."""
    folder, module = _new_package(name, into)
    words = {"name": name, "module": module, "class_name": f"{_class_name(module)}Game"}
    words |= _KINDS[kind].words(module)
    _fill(folder, "new_game/common", _COMMON, words)
    _fill(folder, f"new_game/{kind.replace('-', '_')}", _OF_KIND, words)
    return folder


def _fill(folder: Path, room: str, places: Mapping[str, str], words: Mapping[str, str]) -> None:
    """Write the templates of a folder of `clients/` that exist, filled with the words."""
    for source, place in places.items():
        template = files("tinkermq.clients") / room / f"{source}.in"
        if template.is_file():
            file = folder / place.format_map(words)
            file.parent.mkdir(parents=True, exist_ok=True)
            text = template.read_text(encoding="utf-8")
            file.write_text(Template(text).substitute(words), encoding="utf-8")


def _class_name(module: str) -> str:
    return "".join(part.capitalize() for part in module.split("_"))


def _report(folder: Path, what: str, steps: Mapping[str, str]) -> int:
    """Print what was made, and the commands that follow with what each does."""
    print_plain(f"made {folder}")
    steps = {f"cd {shlex.quote(str(folder))}": what, **steps}
    width = max(map(len, steps))
    for step, meaning in steps.items():
        print_text(f"  {literal(f'{step:<{width}}')}   [dim]{meaning}[/]")
    return 0


def _new_folder(name: str, into: Path, what: str, example: str) -> Path:
    """Return the folder for a new package; ConfigError if it exists, or the name is invalid."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid name for {what}",
            hint=f"use lower-case letters and digits, with hyphens between words: {example}",
        )
    folder = into / name
    if folder.exists():
        raise ConfigError(
            f"{folder} already exists", hint="choose another name, or remove it first"
        )
    return folder


def _new_package(name: str, into: Path) -> tuple[Path, str]:
    """Return folder and module of a new package; ConfigError if its name is taken."""
    folder, module = _new_folder(name, into, "a game", "word-chain"), name.replace("-", "_")
    is_known = keyword.iskeyword(module) or module in sys.stdlib_module_names or module in _TAKEN
    if is_known or module in importlib.metadata.packages_distributions():
        raise ConfigError(
            f"a package named {module} would hide another of this name", hint="choose another name"
        )
    if name in registered_games():
        raise ConfigError(f"there is a game {name} already", hint="choose another name")
    return folder, module
