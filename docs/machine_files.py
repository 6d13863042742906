"""Files of the documentation for programs: JSON Schemas, AsyncAPI, llms.txt.

`docs.generate` writes them beside its pages. The schemas are those of the messages that others than
the pool's processes see; the AsyncAPI file has the subjects on which these travel.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic.json_schema import models_json_schema
from tinkermq.schemas.wire.message import SCHEMA_VERSION, Message

from docs.topics import TOPICS, Topic

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile("client|admin|user|external agent|anyone")
"""In a route: a sender or receiver that is not a process of the pool."""
SCHEMAS = "messages.schema.json"
_PARAMETERS = {
    "u": ("user", "Name of the user, `local` in a pool without users."),
    "j": ("run", "Id of the run."),
    "n": ("number", "Number of the task."),
    "e": ("episode", "Id of the episode."),
}
"""Placeholders of subjects: their names in the AsyncAPI file, and what they are."""


def as_text(document: dict[str, Any]) -> str:
    """Return a document as JSON, as it is committed."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def json_schemas(models: set[type[Message]]) -> dict[str, Any]:
    """Return the JSON Schemas of these messages and of what they hold, under `$defs`."""
    ordered = sorted(models, key=lambda model: model.__name__)
    _, document = models_json_schema([(model, "validation") for model in ordered])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Messages of tinkermq, without the key `v` (docs/messages.md)",
        "$defs": document["$defs"],
    }


# -- AsyncAPI ------------------------------------------------------------------------------------


def asyncapi() -> dict[str, Any]:
    """Return the AsyncAPI document, from the point of view of a program outside the pool."""
    topics = [topic for topic in TOPICS if OUTSIDE.search(topic.route)]
    replies = {topic.reply for topic in topics if topic.reply}
    sent = {topic.message for topic in topics} | replies
    names = sorted(model.__name__ for model in sent)
    channels = {_name(topic): _channel(topic) for topic in topics}
    channels["reply"] = {
        "address": None,
        "description": "The subject in a request's `reply`. ErrorReply answers what failed.",
        "messages": _references({"ErrorReply", *(model.__name__ for model in replies)}),
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "tinkermq",
            "version": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
            "description": "Subjects for programs outside a pool (docs/messages.md).",
        },
        "defaultContentType": "application/msgpack",
        "channels": channels,
        "operations": {_name(topic): _operation(topic) for topic in topics},
        "components": {
            "messages": {name: _message(name) for name in sorted({"ErrorReply", *names})},
            "schemas": {
                "Version": {
                    "type": "object",
                    "properties": {"v": {"const": SCHEMA_VERSION}},
                    "required": ["v"],
                }
            },
        },
    }


def _name(topic: Topic) -> str:
    """Return the name of a topic's channel and operation: its subject without `tmq.v1`."""
    return re.sub(r"[^\w-]+", "_", topic.subject.removeprefix("tmq.v1.")).strip("_")


def _channel(topic: Topic) -> dict[str, Any]:
    found = [_PARAMETERS.get(key, (key, "")) for key in re.findall(r"<(\w+)>", topic.subject)]
    address = re.sub(
        r"<(\w+)>", lambda part: f"{{{_PARAMETERS.get(part[1], (part[1],))[0]}}}", topic.subject
    )
    channel: dict[str, Any] = {
        "address": address,
        "description": f"{topic.kind}: {topic.route}",
        "messages": _references({topic.message.__name__}),
    }
    if found:
        channel["parameters"] = {name: {"description": about} for name, about in found}
    return channel


def _operation(topic: Topic) -> dict[str, Any]:
    sender, _, _ = topic.route.partition("→")
    name = _name(topic)
    operation: dict[str, Any] = {
        "action": "send" if OUTSIDE.search(sender) else "receive",
        "channel": {"$ref": f"#/channels/{name}"},
    }
    if topic.reply:
        messages = [topic.reply.__name__, "ErrorReply"]
        operation["reply"] = {
            "channel": {"$ref": "#/channels/reply"},
            "messages": [{"$ref": f"#/channels/reply/messages/{one}"} for one in messages],
        }
    return operation


def _references(names: set[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in sorted(names)}


def _message(name: str) -> dict[str, Any]:
    both = [{"$ref": "#/components/schemas/Version"}, {"$ref": f"{SCHEMAS}#/$defs/{name}"}]
    return {"name": name, "payload": {"allOf": both}}


# -- llms.txt ------------------------------------------------------------------------------------


def llms_txt() -> str:
    """Return the list of pages for language models, in the order of the site (llmstxt.org)."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    lines = [
        "# tinkermq",
        "",
        "> Reinforcement learning of language models as a service over NATS: games and agent "
        "programs, asynchronous training, serving, many users on one pool.",
        "",
        "People who change the code, and their agents, begin with AGENTS.md.",
    ]
    for entry in nav:
        ((title, inside),) = entry.items()
        pages = [inside] if isinstance(inside, str) else list(_pages(inside))
        lines += ["", f"## {title}", "", *(_entry(page) for page in pages)]
    return "\n".join(lines) + "\n"


def _pages(entries: list[Any]) -> Iterator[str]:
    """Yield the files of a part of the navigation."""
    for entry in entries:
        inside = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(inside, str):
            yield inside
        else:
            yield from _pages(inside)


def _entry(page: str) -> str:
    """Return a page's line: its title, and for whom it is or what it says first."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    title, about = re.match(r"# (.+)\n+((?:[^\n#].*\n)+)", text).groups()  # pyright: ignore
    words = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", " ".join(about.split()))
    return f"- [{title}]({page}): {words.partition('. ')[0].rstrip('.')}."
