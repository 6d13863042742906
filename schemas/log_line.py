"""A line of an actor's log as people read it."""

from typing import Any, cast

from .wire.codec import read_json

_PLAIN_FIELDS = ("timestamp", "level", "event", "role", "actor", "job")


def readable(line: str) -> str:
    """Return a structured log line as text; any other line as it is."""
    try:
        entry = read_json(line)
    except ValueError:
        return line
    if not isinstance(entry, dict):
        return line
    fields = cast("dict[str, Any]", entry)
    clock = str(fields.get("timestamp", ""))[11:19]
    rest = [f"{key}={value}" for key, value in fields.items() if key not in _PLAIN_FIELDS]
    words = [clock, str(fields.get("level", "")), str(fields.get("event", "")), *rest]
    return " ".join(word for word in words if word)
