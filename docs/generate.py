"""Write docs/messages.md and docs/configuration.md from the schemas.

`python -m docs.generate [FOLDER]` writes both pages; a test compares the committed ones
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
from typing import cast

import tinkermq.schemas
import tinkermq.schemas.machines
import tinkermq.schemas.tinker
import tinkermq.schemas.wire
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import Section, only_while
from tinkermq.schemas.wire import array_codec, bounds, codec, errors
from tinkermq.schemas.wire.errors import InternalError, TinkermqError
from tinkermq.schemas.wire.field_docs import field_docs
from tinkermq.schemas.wire.field_text import default_text, type_text
from tinkermq.schemas.wire.message import SCHEMA_VERSION, Message
from tinkermq.schemas.wire.subjects import PREFIX, acting

from docs.topics import STORES, TOPICS

_WRITTEN = "<!-- Written by `make docs` from {source}: change that, not this page. -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Write both pages into a folder (default: docs); return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    folder = Path(words[0] if words else "docs")
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


def pages() -> dict[str, str]:
    """Return the text of every generated page, by file name."""
    return {"messages.md": messages_page(), "configuration.md": configuration_page()}


# -- docs/messages.md ----------------------------------------------------------------------------


def messages_page() -> str:
    """Return the reference of subjects, stores, messages and errors."""
    parts = [
        "# Messages",
        _WRITTEN.format(source="`schemas/`"),
        _encoding(),
        "## Subjects",
        f"All subjects start with `{PREFIX}`. `<u>` is the user, `<j>` the job id, `<n>` the "
        "number of a task. A request has a reply; what is sent on a stream is stored; an "
        "announcement is heard or lost. An admin who acts for a user sends on "
        f"`{acting('<admin>', '<u>', 'scheduler', '<method>')}`, and likewise for `store` and for "
        f"`ctl` (`{acting('<admin>', '<u>', '<j>', 'ctl.<actor>')}`): nobody else may, so who asks "
        "is always told by the subject.",
        _table(("subject", "kind", "message", "reply", "from → to"), _topic_rows()),
        "## Streams and buckets",
        "Every job has the stores whose names hold `<u>` and `<j>`; all jobs share the others.",
        _table(("name", "kind", "subjects or keys", "holds", "keeps it"), _store_rows()),
    ]
    for title, models in message_modules():
        parts.append(f"## {title}")
        parts += [_message(model) for model in models]
    return "\n\n".join([*parts, "## Error codes", _error_codes()]) + "\n"


def message_modules() -> Iterator[tuple[str, list[type[Message]]]]:
    """Yield every module that defines messages: its first docstring line, and its messages."""
    schemas = tinkermq.schemas
    found = [
        (info.name, f"{package.__name__}.{info.name}")
        for package in (schemas, schemas.machines, schemas.tinker, schemas.wire)
        for info in pkgutil.iter_modules(package.__path__)
        if not info.ispkg
    ]
    for name, full_name in sorted(found):
        module = importlib.import_module(full_name)
        models = [model for model in vars(module).values() if _is_message(model, module)]
        if models:
            title = (module.__doc__ or name).partition("\n")[0].partition(":")[0].rstrip(".")
            yield title, models


def _is_message(value: object, module: types.ModuleType) -> bool:
    if not (isinstance(value, type) and issubclass(value, Message)):
        return False
    return value is not Message and value.__module__ == module.__name__


def _encoding() -> str:
    longest = f"{codec.MAX_CONTAINER_LENGTH:,}"
    return f"""\
Every payload is a msgpack map with the keys below and `v`, the schema version (now
{SCHEMA_VERSION}). Unknown keys are ignored, an unknown `v` is refused. `tinkermq decode` prints a
payload: `nats sub --translate "tinkermq decode" '{PREFIX}.job.>'`.

A numeric array is msgpack extension type {array_codec.ARRAY_EXT}, little endian throughout:

| bytes | meaning |
|---|---|
| 1 | length `s` of the dtype string |
| 1 | number of dimensions `d`, at most 8 |
| `s` | dtype in NumPy's notation: {_dtypes()} |
| `8 d` | the shape, unsigned 64-bit integers |
| the rest | the elements, row major |

A payload has at most {codec.MAX_MESSAGE_BYTES // 2**20} MiB, a list or map at most {longest}
entries. A request that breaks a rule gets an
[ErrorReply](#errorreply), whose headers `Nats-Service-Error-Code` and `Nats-Service-Error` say the
same to the ordinary NATS tools."""


def _dtypes() -> str:
    return _cell(", ".join(f"`{name}`" for name in sorted(array_codec.ARRAY_DTYPES)))


def _topic_rows() -> list[tuple[str, ...]]:
    return [
        (f"`{topic.subject}`", topic.kind, _link(topic.message), _link(topic.reply), topic.route)
        for topic in TOPICS
    ]


def _store_rows() -> list[tuple[str, ...]]:
    return [
        (f"`{store.name}`", store.kind, store.entries, _link(store.message), store.keeps)
        for store in STORES
    ]


def _link(model: type[Message] | None) -> str:
    return f"[{model.__name__}](#{model.__name__.lower()})" if model else ""


def _message(model: type[Message]) -> str:
    rows = [
        (f"`{name}`", type_text(field), default_text(field), text_of(model, name))
        for name, field in model.model_fields.items()
    ]
    about = _unwrap(inspect.getdoc(model) or "")
    heading = f"### {model.__name__}\n\n{about}"
    return (
        f"{heading}\n\n{_table(('key', 'type', 'default', 'meaning'), rows)}" if rows else heading
    )


def _error_codes() -> str:
    about = {found: _unwrap(inspect.getdoc(found) or "") for found in _errors()}
    del about[TinkermqError]
    about[InternalError] = "Something that nobody foresaw; the log of the actor says what."
    rows = [
        (f"`{found.code}`", f"`{found.__name__}`", about[found])
        for found in sorted(about, key=lambda found: found.code)
    ]
    return _table(("code", "raised at the caller as", "meaning"), rows)


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
        "A job's configuration comes from its defaults, then the YAML file, then the overrides on "
        "the command line (`section.key=value`). An unknown key is an error that names the "
        "closest known one; a key that has no effect beside the others is an error, too. "
        "`tinkermq config show FILE [section.key=value …]` prints what is in effect.",
        "The type of a key says how its value is read, in the file and in an override alike. A "
        "text is what is written: `name: 007`, `notes: 1.10`, `project: yes` and `2024-11-25` "
        "are these texts; in an override it may hold `#`, `: ` and brackets without quotes. A "
        "number may be `1e-5`, `1_000`, `0x1f`, `0o17`, `.inf` or stand in quotes; a boolean is "
        "true or false, yes or no, on or off; `null`, `~` and nothing unset what may be unset. "
        "A map of your own has no types: there, YAML 1.2's core schema holds for what is not "
        "quoted, so `1e-3` is a number, `007` is 7, `true` a boolean, and `yes`, `on`, `1_000` "
        "and `2024-11-25` are texts. Keys are texts, and one that stands twice is an error, "
        "like an alias.",
        f"Where a key names no bound, a text has at most {bounds.MAX_CHARS:,} characters, a list "
        f"or map {bounds.MAX_ITEMS:,} entries, a whole number lies within "
        f"±{bounds.MAX_NUMBER:,}, and a map of your own (`env.kwargs`) holds "
        f"{bounds.MAX_TREE_VALUES:,} values and {bounds.MAX_TREE_CHARS:,} characters in "
        f"{bounds.MAX_TREE_DEPTH} levels.",
    ]
    for title, model in _sections(JobConfig, ""):
        heading = f"## {title}" if title else "## Top level"
        parts += [heading, _unwrap(inspect.getdoc(model) or ""), _keys(model)]
    return "\n\n".join(parts) + "\n"


def _sections(model: type[Section], name: str) -> Iterator[tuple[str, type[Section]]]:
    yield name, model
    for key, field in model.model_fields.items():
        if is_section(field):
            inner = cast("type[Section]", field.annotation)
            yield from _sections(inner, f"{name}.{key}".lstrip("."))


def _keys(model: type[Section]) -> str:
    rows = [
        (
            f"`{name}`",
            type_text(field),
            default_text(field),
            text_of(model, name) + only_while(field),
        )
        for name, field in model.model_fields.items()
        if not is_section(field)
    ]
    return _table(("key", "type", "default", "meaning"), rows)


def is_section(field: FieldInfo) -> bool:
    """Whether a key is a section with keys of its own."""
    inner = field.annotation
    return isinstance(inner, type) and issubclass(inner, Section)


# -- fields --------------------------------------------------------------------------------------


def text_of(model: type[BaseModel], name: str) -> str:
    """Return the text below a field, on one line."""
    return _unwrap(field_docs(model)[name])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _unwrap(text: str) -> str:
    """Put each paragraph of a docstring on one line."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


if __name__ == "__main__":
    sys.exit(main())
