"""What a job of a pool with users may not name: others' files, and code that nobody looked at.

All actors of a node but the hosts of games, which are enclosed, run as one user of the operating
system, who can read every run folder.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from ...schemas.config import JobConfig
from ...schemas.errors import ConfigError
from ..lora import base_of, is_adapter


def refuse_code_of_others(config: JobConfig) -> None:
    """Raise ConfigError for a job that would run the code which comes with a model."""
    if config.model.trust_remote_code:
        raise ConfigError(
            "model.trust_remote_code=true: on a pool with users, code that comes with a model is "
            "run for admins only",
            hint="let an admin submit the job, or take a model that transformers has itself",
        )


def refuse_runs_of_others(config: JobConfig, others: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError for a value that is a path into the run folder of somebody else.

    `others` are those folders, each with its owner; what the owner's runs lie in is fenced, too.
    """
    folders = [(Path(folder), user) for folder, user in others if folder]
    fenced = {folder for folder, _ in folders}
    fenced |= {folder.parent for folder, user in folders if folder.parent.name == user}
    texts = texts_of(config.model_dump(mode="json"))
    for key, value in (named for text in texts for named in _with_bases(*text)):
        if "/" not in value or "\0" in value:  # no path into another folder
            continue
        path = Path(os.path.realpath(os.path.expanduser(value)))  # noqa: PTH111  a strange ~name stays
        if not fenced.isdisjoint((path, *path.parents)):
            raise ConfigError(
                f"{key}={value!r} is in a run folder of another user",
                hint="ask its owner for a copy in a folder that is yours",
            )


def _with_bases(key: str, value: str) -> Iterator[tuple[str, str]]:
    """Yield a text and, where it is the folder of an adapter, the base of that, and so on."""
    yield key, value
    seen: set[str] = set()
    while is_adapter(value) and value not in seen:
        seen.add(value)
        value = base_of(value)
        yield f"the base of the adapter in {key}", value


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a tree, each with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, one in cast("dict[str, Any]", value).items():
            yield from texts_of(one, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from texts_of(one, key)
