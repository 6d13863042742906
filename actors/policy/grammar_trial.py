"""Compiling a grammar: how, and tried first in a process that a bound on memory and time ends.

The library bounds states and steps of a grammar, not the memory and time that it takes to find out
that a schema exceeds them. So each grammar is compiled in a child of a small process, which the
kernel refuses more than `MEMORY_BYTES` and which is killed after `COMPILE_S`. A compiled grammar
cannot be sent: the engine's process compiles it again, which takes as much.

`python -m tinkermq.actors.policy.grammar_trial SECONDS BYTES` is that process. Standard input has
a line with the tokenizer, then one for each grammar, all JSON; each is answered with a line. It
forks for each grammar, so that none pays for another.
"""

import json
import os
import re
import resource
import select
import signal
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import llguidance
import llguidance.numpy
import numpy as np

from ...schemas.local.line_worker import LineWorker, WorkerEnded, answer_lines, write_all
from ...schemas.local.process import die_with
from ...schemas.output_format import closed
from ...schemas.wire.errors import BusyError, ConfigError

COMPILE_S = 10.0
"""Time limit for compiling a grammar."""
MEMORY_BYTES = 256 << 20
"""Memory limit for compiling a grammar."""
MAX_GRAMMAR_CHARS = 512 << 10
"""Size of one grammar."""
WORD_BITS = 32
"""Bits of one word of a mask."""
_START_S = 60.0
_SHOWN = 300
_MOST_TRIED = 200
"""Parts of a schema that are compiled separately to find an unsupported one."""
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_LINES = re.compile(r"\n +\d+ \| ")
_SPACE = r"( |\n {0,24})?"
"""One space, or a line break and an indentation."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_KIB = 1 << 10

Schemas = Sequence[tuple[str, Any]]
"""Schemas with their places in a request."""


def _limits() -> llguidance.LLParserLimits:
    """Return the library's defaults with less memory (1-2 kB a state) and shorter errors."""
    return llguidance.LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


def compiled(read: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    """Return the matcher of a grammar at its start; raises ConfigError."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ConfigError(
            f"the output format has {len(text):,} characters as a grammar, and may have "
            f"{MAX_GRAMMAR_CHARS:,}",
            hint="give smaller schemas, or fewer tools",
        )
    matcher = llguidance.LLMatcher(read, text, log_level=0, limits=_limits())
    if error := matcher.get_error():
        raise ConfigError(
            f"the output format is not supported: {_reason(error)}",
            hint="change the schema accordingly",
        )
    first = matcher.deep_copy()
    words = np.zeros((1, -(-read.vocab_size // WORD_BITS)), np.int32)
    llguidance.numpy.fill_next_token_bitmask(first, words, 0)
    if first.is_error():
        raise ConfigError(
            "the output format allows no answer at all: "
            f"{first.get_error().strip()[:_SHOWN].splitlines()[0]}",
            hint="check that no $ref leads only to itself",
        )
    return matcher


def json_rule(schema: Any) -> str:
    """Return the expression of a grammar for JSON of a schema."""
    closed_schema: dict[str, Any] | bool = closed(schema)
    if isinstance(closed_schema, bool):
        nothing: list[Any] = []
        closed_schema = {} if closed_schema else {"enum": nothing}
    options = {"whitespace_flexible": True, "whitespace_pattern": _SPACE}
    return f"%json {json.dumps({**closed_schema, 'x-guidance': options}, ensure_ascii=False)}"


def _reason(message: str) -> str:
    """Return the library's reason without lines of the generated grammar."""
    first = _LINES.split(message)[0]
    return " ".join(_PLACE.sub("", first).split())[:_SHOWN].removeprefix(
        "failed to compile JSON schema: "
    )


# -- the unsupported part of a schema --------------------------------------------------------------


def _unsupported(schemas: Schemas) -> str:
    """Return the place of the innermost unsupported part; empty: unknown."""
    tried = 0
    for place, schema in schemas:
        named = place
        inner: list[tuple[str, Any]] = [(place, schema)]
        while inner and tried < _MOST_TRIED:
            tried += 1
            at, part = inner.pop(0)
            if _is_wrong(part, schema):
                named, inner = at, [] if at.endswith(".pattern") else _parts(part, at)
        if named != place or _is_wrong(schema, schema):
            return named
    return ""


def _is_wrong(part: Any, root: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(root, dict):
        return False
    known = cast("dict[str, Any]", root)
    shared = {name: known[name] for name in ("$defs", "definitions") if name in known}
    own = cast("dict[str, Any]", part)
    rule = f"start: {json_rule({**shared, **own})}\n"
    return bool(llguidance.LLMatcher.validate_grammar(rule, limits=_limits()))


def _parts(schema: Any, place: str) -> list[tuple[str, Any]]:
    """Return the schemas directly within one, with their places."""
    inner_parts: list[tuple[str, Any]] = []
    for key, value in cast("dict[str, Any]", schema).items() if isinstance(schema, dict) else ():
        at = f"{place}.{key}"
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(value, dict):
                parts = cast("dict[str, Any]", value)
                inner_parts += [(f"{at}.{name}", inner) for name, inner in parts.items()]
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            listed = cast("list[Any]", value)
            inner_parts += [(f"{at}[{number}]", inner) for number, inner in enumerate(listed)]
        elif key in ("items", "additionalProperties"):
            inner_parts.append((at, value))
        elif key == "pattern":
            inner_parts.append((at, {"type": "string", "pattern": value}))
    return inner_parts


# -- in the engine's process -----------------------------------------------------------------------


class Verdict(NamedTuple):
    """The result of a trial."""

    error: str
    """Why the grammar is refused; empty: it is not."""
    hint: str
    num_bytes: int
    """Memory that compiling took."""


class GrammarTrials:
    """The process that compiles grammars of one tokenizer for trial; not safe among threads."""

    def __init__(self, tokenizer: str, eos: int | None) -> None:
        """`tokenizer` is the text of a tokenizer.json; the process starts with the first trial."""
        self._head = {"tokenizer": tokenizer, "eos": eos}
        self._worker: LineWorker | None = None

    def run(self, text: str, schemas: Schemas) -> Verdict:
        """Try a grammar; if it is not supported, the error names which part of `schemas` is not.

        Raises ConfigError for a tokenizer without grammars, BusyError if the process ends.
        """
        trial = {"text": text, "schemas": schemas}
        try:
            worker = self._worker = self._worker or self._start()
            return Verdict(*worker.ask(trial, _START_S + 2 * COMPILE_S))
        except WorkerEnded as ended:
            self._worker = None
            raise BusyError(
                "the process that compiles output formats has ended", hint="ask again: it restarts"
            ) from ended

    def _start(self) -> LineWorker:
        limits = (str(COMPILE_S), str(MEMORY_BYTES))
        worker = LineWorker(__name__, *limits, in_child=die_with(os.getpid()))
        weakref.finalize(self, worker.end)
        error = worker.ask(self._head, _START_S)
        if error is not None:
            worker.end()
            raise ConfigError(
                f"output formats do not work with this tokenizer: {error}",
                hint="use a model with a byte-level or SentencePiece-like tokenizer",
            )
        return worker


# -- in the process --------------------------------------------------------------------------------


def main() -> None:
    """Answer line by line until standard input ends."""
    seconds, most_bytes = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: llguidance.LLTokenizer | None = None

    def answer(message: dict[str, Any]) -> Any:
        nonlocal tokenizer
        if tokenizer is not None:
            return _try(tokenizer, message, seconds, most_bytes)
        try:
            tokenizer = llguidance.LLTokenizer(message["tokenizer"], eos_token=message["eos"])
        except ValueError as error:
            return str(error)[:_SHOWN]
        return None

    answer_lines(answer)


def _try(
    read: llguidance.LLTokenizer, trial: Mapping[str, Any], seconds: float, most_bytes: int
) -> Verdict:
    """Compile a grammar in a child, which is killed at its bounds."""
    own_size, own_resident = _memory()
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            die_with(parent)()
            os.close(reader)
            size = own_size + most_bytes
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
            _compile(read, trial, writer)
        except BaseException:  # noqa: BLE001  the child must not return into the loop
            os._exit(1)
        os._exit(0)
    os.close(writer)
    lines, in_time = _read(reader, seconds)
    os.close(reader)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, _, used = os.wait4(child, 0)
    num_bytes = max(0, used.ru_maxrss * _KIB - own_resident)
    smaller = "give a smaller schema, with fewer and simpler patterns"
    if lines:
        (error, hint), *place = lines
        return Verdict(f"{error} (at {place[0]})" if place and place[0] else error, hint, num_bytes)
    if not in_time:
        return Verdict(f"the output format was not compiled within {seconds:g} s", smaller, 0)
    most = f"{most_bytes >> 20} MiB"
    return Verdict(f"the output format takes more than {most} to compile", smaller, 0)


def _compile(read: llguidance.LLTokenizer, trial: Mapping[str, Any], writer: int) -> None:
    """Write a line with error and hint, and after an error one with the unsupported part."""
    try:
        compiled(read, trial["text"])
    except ConfigError as error:
        write_all(writer, json.dumps([error.message, error.hint]).encode() + b"\n")
        write_all(writer, json.dumps(_unsupported(trial["schemas"])).encode() + b"\n")
    else:
        write_all(writer, json.dumps(["", ""]).encode() + b"\n")


def _read(reader: int, seconds: float) -> tuple[list[Any], bool]:
    """Return the child's lines, and whether it ended within its time."""
    until, written = time.monotonic() + seconds, bytearray()
    while select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return [json.loads(line) for line in written.splitlines()], True
        written += chunk
    return [json.loads(line) for line in written.splitlines() if line], False


def _memory() -> tuple[int, int]:
    """Return this process's address space and resident memory in bytes."""
    size, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(size) * _PAGE_BYTES, int(resident) * _PAGE_BYTES


if __name__ == "__main__":
    main()
