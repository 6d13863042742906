"""`tinkermq config show|schema`."""

import textwrap
from pathlib import Path
from typing import Any

from .output import print_json, print_plain

_WIDTH = 100


def show(config: Path, /, *overrides: str, json: bool = False) -> int:
    """Print the effective configuration: defaults, then the file, then the overrides.

    Parameters
    ----------
    config
        YAML file; examples/ has one for each game.
    overrides
        `section.key=value`, such as `learner.lr=1e-5`.
    json
        Print JSON instead of YAML.
    """
    from ...schemas.config.load_config import load_config

    effective = load_config(config, overrides).model_dump(mode="json")
    if json:
        print_json(effective)
    else:
        from ...schemas.config.load_config import write_yaml

        print_plain(write_yaml(effective).rstrip())
    return 0


def schema(key: str | None = None, /, *, json: bool = False) -> int:
    """Print every configuration key with its type, default and meaning.

    Parameters
    ----------
    key
        Only this section or key, such as `learner`.
    json
        Print the JSON Schema, for editors.
    """
    from ...schemas.config.job import JobConfig

    if json:
        print_json(JobConfig.model_json_schema())
        return 0
    rows = [row for row in _rows(JobConfig, "") if _selected(row[0], key)]
    if not rows:
        from ...schemas.wire.errors import NotFoundError
        from ..validation import did_you_mean

        known = [row[0] for row in _rows(JobConfig, "")]
        raise NotFoundError(
            f"there is no configuration key {key!r}", hint=did_you_mean(str(key), known)
        )
    for name, kind, default, text in rows:
        default_note = default if default == "required" else f"default {default}"
        lines = textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
        print_plain("\n".join([f"{name}: {kind}; {default_note}", *lines]))
    return 0


def _selected(name: str, key: str | None) -> bool:
    return key is None or name == key or name.startswith(f"{key}.")


def _rows(model: type[Any], prefix: str) -> list[tuple[str, str, str, str]]:
    from pydantic import BaseModel

    from ...schemas.config.sections import only_while
    from ...schemas.wire.field_docs import field_docs
    from ...schemas.wire.field_text import default_text, type_text

    texts = field_docs(model)
    rows: list[tuple[str, str, str, str]] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            rows += _rows(inner, f"{prefix}{name}.")
            continue
        text = " ".join(texts[name].split()) + only_while(field)
        kind, default, text = (
            cell.replace("`", "") for cell in (type_text(field), default_text(field), text)
        )
        rows.append((f"{prefix}{name}", kind, default, text))
    return rows
