"""Names of jobs, from whatever of the configuration is there.

A run is `<env>-<model>-<two words>`; what serves or evaluates says so, and of which run:
`serve-<run>-<step>`.
"""

import re
from collections.abc import Iterator
from typing import Any, cast

from ....schemas.config.agent import runs_programs
from ....schemas.wire.errors import ConfigError, MessageError
from ....schemas.wire.subjects import token

_PART_CHARS = 20
_SOURCE_CHARS = 36
_NOT_NAME = re.compile(r"[^a-z0-9]+")


_HELPERS = {"infer": "serve", "eval": "eval"}


def names(config: dict[str, Any], kind: str, source: str) -> Iterator[str]:
    """Yield names for a job that was given none, for ever; `source` is the run that it is for."""
    helps = _HELPERS.get(kind, "")
    if not helps:
        while True:
            yield run_name(config)
    from coolname import generate_slug

    what = _NOT_NAME.sub("-", source.lower()).strip("-")[:_SOURCE_CHARS].strip("-")
    if what:
        yield f"{helps}-{what}"
    while True:
        yield f"{helps}-{what}-{generate_slug(2)}" if what else f"{helps}-{run_name(config)}"[:64]


def run_name(config: dict[str, Any]) -> str:
    """Make a readable name for a run that was given none."""
    from coolname import generate_slug  # loads word lists that an idle scheduler does without

    game = _leaf(config, "env", "game").rsplit(":", 1)[-1].rsplit(".", 1)[-1]
    game = game or ("agent" if runs_programs(config) else "")
    model = _leaf(config, "model", "path").rstrip("/").rsplit("/", 1)[-1]
    parts = [part for part in (_plain(game), _plain(model)) if part]
    return "-".join([*(parts or ["job"]), generate_slug(2)])[:64]


def _leaf(config: dict[str, Any], section: str, key: str) -> str:
    inner = config.get(section)
    value = cast("dict[str, Any]", inner).get(key) if isinstance(inner, dict) else None
    return value if isinstance(value, str) else ""


def _plain(text: str) -> str:
    return _NOT_NAME.sub("-", text.lower()).strip("-")[:_PART_CHARS].strip("-")


def check_name(name: Any) -> None:
    """Raise ConfigError if a run cannot have this name."""
    try:
        token(str(name), what="run name")
    except MessageError as error:
        raise ConfigError(error.message, hint=error.hint) from error
