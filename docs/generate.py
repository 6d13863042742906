"""Write docs/messages.md, docs/configuration.md and the files for programs from the schemas.

`python -m docs.generate [FOLDER]` writes them; a test compares the committed ones
with what this module makes. All text about a message or a key comes from the docstring below it.
"""

import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard, cast, get_args

import tinkermq.schemas
import tinkermq.schemas.model_apis
import tinkermq.schemas.tinker
import tinkermq.schemas.wire
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import OWN_FUNCTION, Section, only_while
from tinkermq.schemas.wire import array_codec, bounds, codec, errors
from tinkermq.schemas.wire.errors import TinkermqError
from tinkermq.schemas.wire.field_docs import field_docs
from tinkermq.schemas.wire.field_text import default_text, type_text
from tinkermq.schemas.wire.message import SCHEMA_VERSION, Message, Request
from tinkermq.schemas.wire.subjects import PREFIX, acting

from docs.machine_files import (
    OUTSIDE,
    SCHEMAS,
    as_text,
    asyncapi,
    json_schemas,
    llms_txt,
)
from docs.topics import STORES, TOPICS

_WRITTEN = "<!-- Written by `make docs` from {source}: change that, not this page. -->"
_NOTATION = """\
`text[]` is a list of texts, `map[int]` a map from texts to integers; bounds of texts, lists and \
maps are those of their length."""
"""How the page shows types."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write all of them into a folder (default: docs); return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    folder = Path(words[0] if words else "docs")
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


def pages() -> dict[str, str]:
    """Return the text of every generated page and file, by file name."""
    return {
        "messages.md": messages_page(),
        "configuration.md": configuration_page(),
        SCHEMAS: as_text(json_schemas(public_messages())),
        "asyncapi.json": as_text(asyncapi()),
        "llms.txt": llms_txt(),
    }


# -- docs/messages.md ----------------------------------------------------------------------------


def messages_page() -> str:
    """Return the reference of encoding, subjects, stores and errors."""
    shown = public_messages()
    parts = [
        "# Messages",
        _WRITTEN.format(source="`schemas/`"),
        "For those who read or write the pool's messages with tools of their own. The keys of the "
        f"messages that others than the pool's processes see are in [{SCHEMAS}]({SCHEMAS}) (JSON "
        "Schema), and their subjects also in [asyncapi.json](asyncapi.json). A message in italics "
        "goes only from one process of the pool to another; its class in `schemas/` explains it.",
        _encoding(),
        "## Subjects",
        f"`<u>` is the user, `<j>` the job id, `<n>` a task number, `<e>` an episode id. A request "
        "has a reply, a message on a stream is stored, an announcement is not. An admin who acts "
        f"for a user sends on `{acting('<admin>', '<u>', 'scheduler', '<method>')}`, and likewise "
        f"for `store` and `ctl` (`{acting('<admin>', '<u>', '<j>', 'ctl.<actor>')}`). No one else "
        "may, so the subject always names the sender.",
        *_subjects(shown),
        "## Streams and buckets",
        "Each job has its own stores with `<u>` and `<j>` in the name. All jobs share the others.",
        _table(("name", "kind", "subjects or keys", "entry", "kept"), _store_rows(shown)),
        "## Error codes",
        "With the class that is raised at the caller:",
        _error_codes(),
    ]
    return "\n\n".join(parts) + "\n"


def message_modules() -> Iterator[tuple[str, list[type[Message]]]]:
    """Yield every module that defines messages: its first docstring line, and its messages."""
    schemas = tinkermq.schemas
    found = [
        (info.name, f"{package.__name__}.{info.name}")
        for package in (schemas, schemas.model_apis, schemas.tinker, schemas.wire)
        for info in pkgutil.iter_modules(package.__path__)
        if not info.ispkg
    ]
    for name, full_name in sorted(found):
        module = importlib.import_module(full_name)
        models = [model for model in vars(module).values() if _is_message(model, module)]
        if models:
            title = (module.__doc__ or name).partition("\n")[0].partition(":")[0].rstrip(".")
            yield title, models


def public_messages() -> set[type[Message]]:
    """Return the messages that others than the pool's processes see, with their parts."""
    topics = [topic for topic in TOPICS if OUTSIDE.search(topic.route)]
    return _with_parts([topic.message for topic in topics] + [topic.reply for topic in topics])


def _with_parts(models: Sequence[type[Message] | None]) -> set[type[Message]]:
    """Return messages with all that they extend and hold."""
    waiting = list(models)
    found: set[type[Message]] = set()
    while waiting:
        model = waiting.pop()
        if model is None or model in found:
            continue
        found.add(model)
        waiting += [base for base in model.__mro__ if _is_own(base)]
        for field in model.model_fields.values():
            waiting += _messages_in(field.annotation)
    return found


def _messages_in(annotation: object) -> Iterator[type[Message]]:
    """Yield the messages that a type holds, such as that of `list[Task] | None`."""
    if _is_own(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from _messages_in(part)


def _is_own(value: object) -> TypeGuard[type[Message]]:
    """Whether a type is a message with keys of its own."""
    is_message = isinstance(value, type) and issubclass(value, Message)
    return is_message and value not in (Message, Request)


def _is_message(value: object, module: types.ModuleType) -> bool:
    return _is_own(value) and value.__module__ == module.__name__


def _encoding() -> str:
    longest = f"{codec.MAX_CONTAINER_LENGTH:,}"
    return f"""\
Every payload is a msgpack map with its message's keys and `v`, the schema version (now
{SCHEMA_VERSION}). Unknown keys are ignored, an unknown `v` is refused. `tinkermq decode` prints
a payload: `nats sub --translate "tinkermq decode" '{PREFIX}.job.>'`.

A key with a default may be left out. Null and empty values mean none, unless the text says
otherwise. Times are floats, in seconds since the epoch.

A numeric array is msgpack extension type {array_codec.ARRAY_EXT}, little endian throughout:

| bytes | meaning |
|---|---|
| 1 | length `s` of the dtype string |
| 1 | number of dimensions `d`, at most 8 |
| `s` | dtype in NumPy's notation: {_dtypes()} |
| `8 d` | the shape, unsigned 64-bit integers |
| the rest | the elements, row major |

A payload has at most {codec.MAX_MESSAGE_BYTES // 2**20} MiB, a list or map at most {longest}
entries. A request that breaks a rule, or fails, gets an ErrorReply: `code` ([below](#error-codes)),
`message` and `hint`."""


def _dtypes() -> str:
    return _cell(", ".join(f"`{name}`" for name in sorted(array_codec.ARRAY_DTYPES)))


def _subjects(shown: set[type[Message]]) -> Iterator[str]:
    """Yield a heading for each route, and the subjects on it."""
    groups: dict[str, list[str]] = {}
    for topic in TOPICS:
        kind = "" if topic.kind == "request" else f" ({topic.kind})"
        reply = f" → {_link(topic.reply, shown)}" if topic.reply else ""
        line = f"- `{topic.subject}`: {_link(topic.message, shown)}{reply}"
        groups.setdefault(f"**{topic.route}**{kind}", []).append(line)
    for heading, lines in groups.items():
        yield f"{heading}\n\n" + "\n".join(lines)


def _store_rows(shown: set[type[Message]]) -> list[tuple[str, ...]]:
    return [
        (f"`{store.name}`", store.kind, store.entries, _link(store.message, shown), store.keeps)
        for store in STORES
    ]


def _link(model: type[Message] | None, shown: set[type[Message]]) -> str:
    """Return the name of a message: in italics if only processes of the pool see it."""
    if model is None:
        return ""
    return f"`{model.__name__}`" if model in shown else f"*{model.__name__}*"


def _error_codes() -> str:
    about = {found: _unwrap(inspect.getdoc(found) or "") for found in _errors()}
    del about[TinkermqError]
    return "\n".join(
        f"- `{found.code}` (`{found.__name__}`): {about[found]}"
        for found in sorted(about, key=lambda found: found.code)
    )


def _errors() -> list[type[TinkermqError]]:
    """Return the errors that travel: those that have a code of their own."""
    found: list[object] = list(vars(errors).values())
    return [
        one
        for one in found
        if isinstance(one, type) and issubclass(one, TinkermqError) and "code" in vars(one)
    ]


# -- docs/configuration.md -----------------------------------------------------------------------


def configuration_page() -> str:
    """Return the reference of every configuration key."""
    parts = [
        "# Configuration",
        _WRITTEN.format(source="`schemas/config/job.py`"),
        "For everyone who starts a run: every key.",
        "A run's configuration is made of the defaults, the YAML file, and the overrides on the "
        "command line (`section.key=value`), in this order. An unknown key is an error that names "
        "the closest known one, and so is a key that has no effect. `tinkermq config show FILE "
        "[section.key=value …]` prints the result.",
        "Values are read by the type of their key, in files and overrides alike. A text is taken "
        "as written: `name: 007`, `project: yes` and `2024-11-25` are texts, and in an override "
        "`#`, `: ` and brackets need no quotes. A number may be `1e-5`, `1_000`, `0x1f`, `0o17`, "
        "`.inf` or quoted; a boolean is true/false, yes/no or on/off; `null`, `~` and an empty "
        "value mean null. Maps of your own, such as `env.kwargs`, follow YAML 1.2's core schema: "
        "`1e-3` is a number, `007` is 7, `true` a boolean, and `yes`, `on`, `1_000` and "
        "`2024-11-25` are texts. Duplicate keys and YAML aliases are errors.",
        "Parentheses hold a key's type, bounds and default; without a default it is required. A "
        f"key with `?` may be null, and is by default. {_NOTATION} Unless a key says otherwise, "
        f"a text has at most {bounds.MAX_CHARS:,} characters, a "
        f"list or map {bounds.MAX_ITEMS:,} entries, an integer lies within "
        f"±{bounds.MAX_NUMBER:,}, and a map of your own holds {bounds.MAX_TREE_VALUES:,} "
        f"values and {bounds.MAX_TREE_CHARS:,} characters in {bounds.MAX_TREE_DEPTH} levels.",
    ]
    for title, model in _sections(JobConfig, ""):
        heading = f"## {title}" if title else "## Top level"
        parts += [heading, _unwrap(inspect.getdoc(model) or ""), *_keys(model)]
    return "\n\n".join(parts) + "\n"


def _sections(model: type[Section], name: str) -> Iterator[tuple[str, type[Section]]]:
    yield name, model
    for key, field in model.model_fields.items():
        if is_section(field):
            inner = cast("type[Section]", field.annotation)
            yield from _sections(inner, f"{name}.{key}".lstrip("."))


def _keys(model: type[Section]) -> Iterator[str]:
    """Yield the lines of the keys of a section, grouped by the value that they depend on."""
    groups: dict[str, list[str]] = {"": []}
    for name, field in model.model_fields.items():
        if not is_section(field):
            condition = only_while(field).strip().removesuffix(".")
            groups.setdefault(condition, []).append(_config_key(model, name))
    for condition, lines in groups.items():
        keys = "\n".join(lines)
        yield f"{condition}:\n\n{keys}" if condition else keys


def is_section(field: FieldInfo) -> bool:
    """Whether a key is a section with keys of its own."""
    inner = field.annotation
    return isinstance(inner, type) and issubclass(inner, Section)


# -- fields --------------------------------------------------------------------------------------


def _config_key(model: type[BaseModel], name: str) -> str:
    """Return the line of a configuration's key: name, type, default, and text."""
    field = model.model_fields[name]
    kind, text = _kind_and_text(model, name)
    default = "" if field.is_required() else f", {default_text(field)}"
    if default == ", `null`":
        return _line(f"{name}?", kind.removesuffix(" or null"), text)
    return _line(name, f"{kind}{default}", text)


def _line(name: str, kind: str, text: str) -> str:
    mark = "?" if name.endswith("?") else ""
    return f"- `{name.removesuffix('?')}`{mark} ({kind}){f': {text}' if text else ''}"


def _kind_and_text(model: type[BaseModel], name: str) -> tuple[str, str]:
    """Return type and text of a field; the text of an array begins with its type."""
    field = model.model_fields[name]
    kind = type_text(field).replace(f" matching `{OWN_FUNCTION}`", "")
    text = text_of(model, name)
    array = re.match(r"(\w+\[[^]]+\]): ", text)
    if array:
        null = " or null" if kind.endswith(" or null") else ""
        kind, text = array[1] + null, text[array.end() :]
    return kind, text


def text_of(model: type[BaseModel], name: str) -> str:
    """Return the text below a field, on one line."""
    return _unwrap(field_docs(model)[name])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(map(_cell, line)) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _unwrap(text: str) -> str:
    """Put each paragraph of a docstring on one line."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


if __name__ == "__main__":
    sys.exit(main())
