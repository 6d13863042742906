"""What a configuration of nats-server says at its top level: enough to see who can reach it.

The server judges the rest itself (`nats-server -t`).
"""

import re
from collections.abc import Mapping
from pathlib import Path

_TOKEN = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|#[^\n]*|//[^\n]*|[{}\[\]\n;,]|[^\s{}\[\];,\"']+")
_STATEMENT = re.compile(r"([\w-]+)\s*[:=]?\s*(.*)")
_ANYWHERE = "all addresses"


def read_nats_conf(path: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the keys at the top level, also of included files; of blocks only that they are there.

    `$NAME` is looked up in `variables`. Raises OSError for a file that cannot be read.
    """
    found: dict[str, str] = {}
    for statement in _statements(path.read_text(encoding="utf-8")):
        match = _STATEMENT.match(statement)
        if match is None:
            continue
        key, value = match[1], match[2].strip("\"'")
        if key == "include":
            found |= read_nats_conf(path.parent / value, variables)
        else:
            found[key] = variables.get(value[1:], value) if value.startswith("$") else value
    return found


def _statements(text: str) -> list[str]:
    """Return the statements at the top level, without comments and what is inside of brackets."""
    done, words, depth = list[str](), list[str](), 0
    for part in [*_TOKEN.findall(text), "\n"]:
        if part.startswith(("#", "//")):
            continue
        depth += (part in "{[") - (part in "}]")
        if depth == 0 and part in "\n;,":
            done.append(" ".join(words))
            words = []
        elif depth == 0 and part not in "}]":
            words.append(part)
    return [statement for statement in done if statement]


def listening_host(conf: Mapping[str, str]) -> str:
    """Return the address on which clients are listened to; nats-server's default is everywhere."""
    host, colon, _ = conf.get("listen", "").rpartition(":")
    return (host.strip("[]") if colon else conf.get("host", conf.get("net", ""))) or _ANYWHERE
