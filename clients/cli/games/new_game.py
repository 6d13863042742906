"""`tinkermq env new`: a small package with a game, its data, configuration and test."""

import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path
from string import Template

from ....schemas.wire.errors import ConfigError
from ..output import literal, say

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_PLACES = {
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    "train.yaml": "train.yaml",
    "__init__.py": "{module}/__init__.py",
    "game.py": "{module}/game.py",
    "train.jsonl": "data/train.jsonl",
    "val.jsonl": "data/val.jsonl",
    "test_game.py": "tests/test_game.py",
}
"""Where each template of `clients/new_game` goes."""


def new(name: str, /, *, into: Path = Path()) -> int:
    """Make a package with a game of your own: game, data, configuration, test, entry point.

    Parameters
    ----------
    name
        Name of the game and of its folder: small letters, digits and hyphens.
    into
        Folder in which the package's folder is made.
    """
    folder = write_package(name, into)
    say(f"made {folder}")
    steps = {
        f"cd {folder}": "the package",
        "pip install -e '.[test]'": "register the game",
        "pytest": "its own test",
        "tinkermq env check train.yaml": "prove that it is sound",
        "tinkermq env play train.yaml": "play it yourself",
        "tinkermq train train.yaml": "train a model on it",
    }
    width = max(map(len, steps))
    for step, meaning in steps.items():
        say(f"  {literal(f'{step:<{width}}')}   [dim]{meaning}[/]")
    return 0


def write_package(name: str, into: Path) -> Path:
    """Write the package of a game into a new folder of `into`; return it. Raises ConfigError."""
    module = name.replace("-", "_")
    _check_name(name, module)
    folder = into / name
    if folder.exists():
        raise ConfigError(
            f"{folder} is there already", hint="choose another name, or remove it first"
        )
    words = {
        "name": name,
        "module": module,
        "class_name": "".join(part.capitalize() for part in module.split("_")) + "Game",
    }
    templates = files("tinkermq.clients") / "new_game"
    for source, place in _PLACES.items():
        file = folder / place.format(module=module)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = (templates / f"{source}.in").read_text(encoding="utf-8")
        file.write_text(Template(text).substitute(words), encoding="utf-8")
    return folder


def _check_name(name: str, module: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of a game",
            hint="write small letters and digits, with hyphens between words: word-chain",
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module == "tinkermq":
        raise ConfigError(
            f"a package named {module} would hide Python's own or ours", hint="choose another name"
        )
