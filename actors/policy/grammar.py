"""Grammars over tokens: which tokens may follow those of an answer.

A grammar is a text in llguidance's form of Lark and describes a whole answer: reasoning, if the
prompt opened it, then JSON or tool calls in the form of the model's chat template, and the token
that ends the turn. White space within JSON is bounded, so that no model continues it for ever.

The allowed tokens depend only on the answer's tokens, so that an answer can be continued elsewhere
and by newer weights. Compiling is bounded by the size of the text, by the library's limits on
states and steps, and by a deadline in a thread of its own.
"""

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy as copied
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from ...schemas.model_apis.canonical import THOUGHT
from ...schemas.output_format import OutputFormat, check_multiples, check_schema, closed
from ...schemas.tool_calls import CLOSE, OPEN, parse_tool_calls
from ...schemas.wire.errors import BusyError, ConfigError, DeadlineError, ModelError
from .chat import ChatTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
COMPILE_S = 10.0
"""Time limit for compiling a grammar."""
MAX_GRAMMARS = 64
"""Cached compiled grammars."""
MAX_GRAMMAR_CHARS = 512 << 10
"""Size of one grammar."""
MAX_KEPT_CHARS = 4 << 20
"""Size of all cached grammars: the memory of a compiled one grows with its text."""
_MAX_WAITING = 64
_SHOWN = 300
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_LINES = re.compile(r"\n +\d+ \| ")
_WORDS = 32
"""Bits of one word of a mask."""


def _limits() -> llguidance.LLParserLimits:
    """Return the library's defaults with less memory (1-2 kB a state) and shorter errors."""
    return llguidance.LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


class TokenGrammar:
    """A compiled grammar of one tokenizer."""

    def __init__(self, text: str, matcher: llguidance.LLMatcher, num_tokens: int) -> None:
        """Wrap a matcher at its start; use `GrammarCompiler`."""
        self.text = text
        self.num_tokens = num_tokens
        """Tokens of the tokenizer."""
        self.failed = False
        """Whether an answer became too complex to continue, which takes much memory."""
        self._matcher = matcher

    def begin(self, drawn: Sequence[int] = ()) -> "GrammarState":
        """Return the state of an answer after its first tokens."""
        state = GrammarState(self, self._matcher.deep_copy())
        for token in drawn:
            state.accept_token(int(token))
        return state


class GrammarState:
    """The state of one answer in its grammar."""

    def __init__(self, grammar: TokenGrammar, matcher: llguidance.LLMatcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.error = ""
        """Why the answer cannot continue; empty: it can."""

    def accept_token(self, token: int) -> None:
        """Read the next token."""
        if not self.error and not self.matcher.consume_token(token):
            self.fail(self.matcher.get_error() or f"token {token} is not allowed there")

    def fail(self, reason: str) -> None:
        """Record why the answer cannot continue."""
        self.error = reason.strip()[:_SHOWN]
        self.grammar.failed = True


class MaskFiller:
    """Fills the masks of a batch, several in parallel."""

    def __init__(self) -> None:
        self._executor: llguidance.LLExecutor | None = None

    def allowed(self, states: Sequence[GrammarState], num_tokens: int) -> NDArray[np.bool_]:
        """Return bool[rows, num_tokens]: the tokens that may follow each state of one tokenizer.

        Ids of the model beyond the tokenizer are never allowed. A state that fails sets its
        `error`, and allows everything.
        """
        known = states[0].grammar.num_tokens
        words = np.zeros((len(states), -(-known // _WORDS)), np.int32)
        if len(states) == 1:
            llguidance.numpy.fill_next_token_bitmask(states[0].matcher, words, 0)
        else:
            self._executor = self._executor or llguidance.LLExecutor(None)
            rows = [(state.matcher, row) for row, state in enumerate(states)]
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, rows, words)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        allowed = np.zeros((len(states), num_tokens), np.bool_)
        both = min(known, num_tokens)
        allowed[:, :both] = bits[:, :both]
        for row, state in enumerate(states):
            if state.matcher.is_error() and not state.error:
                state.fail(state.matcher.get_error())
            if state.error:
                allowed[row] = True
        return allowed


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and caches the latest ones."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Compile for `tokenizer`, which is read with the first grammar."""
        self._tokenizer = tokenizer
        self._read: llguidance.LLTokenizer | None = None
        self._cached: OrderedDict[str, TokenGrammar] = OrderedDict()
        self._running: dict[str, asyncio.Future[TokenGrammar]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    async def compile(self, text: str) -> TokenGrammar:
        """Return a grammar, compiled in a thread.

        Raises ConfigError for one that is too large, malformed or not supported, DeadlineError if
        it takes too long, BusyError if too many others wait.
        """
        known = self._remembered(text)
        if known is not None:
            return known
        running = self._running.get(text)
        if running is None:
            if len(self._running) >= _MAX_WAITING:
                raise BusyError(
                    f"{len(self._running)} output formats are being compiled",
                    hint="ask again later",
                )
            running = self._submit(lambda: self.compile_here(text))
            self._running[text] = running
            running.add_done_callback(lambda done: self._ended(text, done))
        done, _ = await asyncio.wait({running}, timeout=COMPILE_S)
        if not done:
            raise DeadlineError(
                f"the output format was not compiled within {COMPILE_S:g} s",
                hint="give a smaller schema",
            )
        return running.result()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Call a function in the compiling thread; raises DeadlineError if that takes too long."""
        running = self._submit(work)
        done, _ = await asyncio.wait({running}, timeout=COMPILE_S)
        if not done:
            running.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise DeadlineError("the compiler of output formats is busy", hint="ask again later")
        return running.result()

    def _submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grammar")
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def compile_here(self, text: str) -> TokenGrammar:
        """Return a grammar, compiled in this thread; raises ConfigError."""
        if (known := self._remembered(text)) is not None:
            return known
        if len(text) > MAX_GRAMMAR_CHARS:
            raise ConfigError(
                f"the output format has {len(text):,} characters as a grammar, and may have "
                f"{MAX_GRAMMAR_CHARS:,}",
                hint="give smaller schemas, or fewer tools",
            )
        read = self._read = self._read or read_tokenizer(self._tokenizer)
        matcher = llguidance.LLMatcher(read, text, log_level=0, limits=_limits())
        if error := matcher.get_error():
            raise ConfigError(
                f"the output format is not supported: {_reason(error)}",
                hint="change the schema accordingly",
            )
        grammar = TokenGrammar(text, matcher, read.vocab_size)
        first = grammar.begin()
        MaskFiller().allowed([first], grammar.num_tokens)
        if first.error:
            raise ConfigError(
                f"the output format allows no answer at all: {first.error.splitlines()[0]}",
                hint="check that no $ref leads only to itself",
            )
        with self._lock:
            for failed in [key for key, grammar in self._cached.items() if grammar.failed]:
                del self._cached[failed]
            self._cached[text] = grammar
            while len(self._cached) > MAX_GRAMMARS or sum(map(len, self._cached)) > MAX_KEPT_CHARS:
                self._cached.popitem(last=False)
        return grammar

    def _remembered(self, text: str) -> TokenGrammar | None:
        with self._lock:
            known = self._cached.get(text)
            if known is None or known.failed:
                return None
            self._cached.move_to_end(text)
            return known

    def _ended(self, text: str, done: "asyncio.Future[TokenGrammar]") -> None:
        self._running.pop(text, None)
        if not done.cancelled():
            done.exception()  # raised for the waiting request


def read_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> llguidance.LLTokenizer:
    """Return a tokenizer for grammars; raises ConfigError if its tokens cannot be read."""
    backend = cast("Any", getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise ConfigError(
            f"output formats need a tokenizer of the tokenizers library, and "
            f"{type(tokenizer).__name__} is none",
            hint="save it as tokenizer.json (`save_pretrained` of a fast tokenizer)",
        )
    eos = cast("int | None", tokenizer.eos_token_id)
    copy: Any = copied(backend)
    copy.no_padding()
    copy.no_truncation()
    try:
        return llguidance.LLTokenizer(copy.to_str(), eos_token=eos)
    except ValueError as error:
        raise ConfigError(
            f"output formats do not work with this tokenizer: {str(error)[:_SHOWN]}",
            hint="use a model with a byte-level or SentencePiece-like tokenizer",
        ) from error


def check_grammar(text: str) -> str:
    """Return the error of a grammar for any tokenizer; empty: none."""
    message = llguidance.LLMatcher.validate_grammar(text, limits=_limits())
    return _reason(message) if message else ""


def _reason(message: str) -> str:
    """Return the library's reason without lines of the generated grammar."""
    first = _LINES.split(message)[0]
    return " ".join(_PLACE.sub("", first).split())[:_SHOWN].removeprefix(
        "failed to compile JSON schema: "
    )


# -- the grammar of an output format ---------------------------------------------------------------

_SPACE = r"( |\n {0,24})?"
"""One space, or a line break and an indentation."""
_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_NAME, _ARGUMENTS = "stand_in", {"stand": "in"}
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A stand-in.",
        "parameters": {
            "type": "object",
            "properties": {"stand": {"type": "string"}},
            "required": ["stand"],
        },
    },
}
_MOST_TRIED = 200
"""Parts of a schema that are compiled separately to find an unsupported one."""


class OtherCallForm(ConfigError):
    """The model's chat template writes calls in a form without a grammar."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a chat template writes a call: texts around the name and the arguments."""

    before: str
    between: str
    after: str
    separator: str | None
    """Text between two calls; None: the template has no second one."""


class OutputGrammars:
    """The grammars of one model's answers."""

    def __init__(self, chat: ChatTokenizer) -> None:
        """The template is examined with the first answer that needs a form."""
        self._chat = chat
        self._compiler = GrammarCompiler(chat.tokenizer)
        self._form: CallSyntax | None = None

    async def of(
        self,
        form: OutputFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
    ) -> TokenGrammar:
        """Return the grammar of answers to a prompt; `thinking`: it opened the reasoning.

        Raises ConfigError for an unsupported format, or a template that writes calls in another
        form than `<tool_call>{"name": …, "arguments": …}</tool_call>`;
        DeadlineError and BusyError as `GrammarCompiler.compile` does.
        """
        text = self.text(form, tools, thinking=thinking)
        try:
            return await self._compiler.compile(text)
        except ConfigError as error:
            if place := await self._compiler.in_thread(lambda: _unsupported(form, tools)):
                raise ConfigError(f"{error.message} (at {place})", hint=error.hint) from error
            raise

    def text(
        self, form: OutputFormat, tools: Sequence[Mapping[str, Any]], *, thinking: bool = False
    ) -> str:
        """Return the grammar's text; raises ConfigError."""
        schemas = _schemas(form, tools)
        for place, schema in schemas:  # not every client checks them
            check_schema(schema, place)
        check_multiples([schema for _, schema in schemas])
        rules: list[str] = []
        kinds: list[str] = []
        if form.json_schema is not None:
            rules.append(f"json: {_json(form.json_schema)}")
            kinds.append("json")
        if form.functions:
            rules += self._calls(form, tools)
            kinds.append("calls")
        if not kinds:
            raise ConfigError("an output format is empty", hint="leave it out")
        thought = ""
        if thinking:
            thought = "thought "
            rules += self._thought()
        stops = ",".join(str(token) for token in self._chat.stop_token_ids)
        start = f"start: {thought}body stop"
        return "\n".join([start, f"body: {' | '.join(kinds)}", *rules, f"stop: <[{stops}]>", ""])

    def _thought(self) -> list[str]:
        mark = self._chat.special_token(THOUGHT)
        if mark is None:
            end = THOUGHT.replace("/", "\\/")
            return ["thought: reasoned SPACE", f"reasoned[lazy]: /(.|\\n)*{end}/", _space_rule()]
        return [f"thought: THOUGHT <[{mark}]> SPACE", "THOUGHT: /(.|\\n)*/", _space_rule()]

    def _calls(self, output: OutputFormat, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        form = self._form = self._form or call_form(self._chat)
        places = {_function(tool).get("name"): number for number, tool in enumerate(tools)}
        more = "" if output.is_single or form.separator is None else "more*"
        rules = [f"calls: call {more}".rstrip()]
        if more:
            rules.append(f"more: {self._with_mark_tokens(form.separator or '')} call")
        names = [f"call_{number}" for number in range(len(output.functions))]
        rules.append(f"call: {' | '.join(names)}")
        for rule, name in zip(names, output.functions, strict=True):
            if name not in places:
                raise ConfigError(
                    f"tool_choice names the tool {name!r:.80}, which is not among the tools",
                    hint="name one of `tools`",
                )
            place = f"tools[{places[name]}].function.parameters"
            schema = _function(tools[places[name]]).get("parameters") or _NO_PARAMETERS
            parts = (
                self._with_mark_tokens(form.before),
                _text(json.dumps(name, ensure_ascii=False)[1:-1]),  # within a text of JSON
                self._with_mark_tokens(form.between),
                _json(_arguments(schema, place)),
                self._with_mark_tokens(form.after),
            )
            rules.append(f"{rule}: {' '.join(part for part in parts if part)}")
        return rules

    def _with_mark_tokens(self, text: str) -> str:
        """Return a text of the template, with markers of calls as tokens if there are such.

        A marker in several tokens would make another prompt of the next turn.
        """
        parts: list[str] = []
        while text:
            at, mark = min((text.find(tag) % (len(text) + 1), tag) for tag in (OPEN, CLOSE))
            parts.append(_text(text[:at]))
            if at < len(text):
                token = self._chat.special_token(mark)
                parts.append(_text(mark) if token is None else f"<[{token}]>")
            text = text[at + len(mark) :]
        return " ".join(part for part in parts if part)


def call_form(chat: ChatTokenizer) -> CallSyntax:
    """Return how a template writes calls; raises OtherCallForm for a form other than Hermes'."""
    rendered = _rendered_calls(chat, 1)
    arguments = next(
        (
            written_arguments
            for written_arguments in (json.dumps(_ARGUMENTS), '{"stand":"in"}')
            if written_arguments in rendered
        ),
        "",
    )
    start, end = rendered.find(OPEN), rendered.rfind(CLOSE) + len(CLOSE)
    written = rendered[start:end] if start >= 0 else ""
    _, calls = parse_tool_calls(written)
    name_at, at = written.find(_NAME), written.rfind(arguments) if arguments else -1
    if not calls or not 0 <= name_at < at:
        raise OtherCallForm(
            "this model's chat template writes tool calls in a form that cannot be enforced",
            hint='only <tool_call>{"name": …, "arguments": …}</tool_call> can be: let tool_choice '
            "be auto, or use a template that writes calls so",
        )
    try:
        two = _rendered_calls(chat, 2)
    except ConfigError:
        two = ""
    first = two.find(written)
    second = two.find(written, first + len(written)) if first >= 0 else -1
    return CallSyntax(
        written[:name_at],
        written[name_at + len(_NAME) : at],
        written[at + len(arguments) :],
        two[first + len(written) : second] if second >= 0 else None,
    )


def _rendered_calls(chat: ChatTokenizer, num: int) -> str:
    """Return the rendering of a turn with calls."""
    call = {"type": "function", "id": "c00000000", "function": _sample_call()}
    conversation = [
        {"role": "user", "content": "stand-in"},
        {"role": "assistant", "content": "", "tool_calls": [call] * num},
    ]
    try:
        prompt = chat.render(conversation[:1], prompt=True, tools=[_TOOL])
        whole = chat.render(conversation, prompt=False, tools=[_TOOL])
    except ModelError as error:
        raise OtherCallForm(
            f"this model's chat template refuses tool calls: {error.message}",
            hint="let tool_choice be auto or none, or use a template with tools",
        ) from error
    same = next(
        (n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt)
    )
    return whole[same:]


def _sample_call() -> dict[str, Any]:
    return {"name": _NAME, "arguments": dict(_ARGUMENTS)}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else tool


def _arguments(schema: Any, place: str) -> dict[str, Any]:
    """Return the schema of arguments, which must be an object."""
    fields = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    types: Any = fields.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise ConfigError(
            f"{place}.type is {types!r:.80}: the arguments of a call must be an object",
            hint="send an object with a property for each argument",
        )
    return {**fields, "type": "object"}


def _json(schema: Any) -> str:
    closed_schema: dict[str, Any] | bool = closed(schema)
    if isinstance(closed_schema, bool):
        nothing: list[Any] = []
        closed_schema = {} if closed_schema else {"enum": nothing}
    options = {"whitespace_flexible": True, "whitespace_pattern": _SPACE}
    return f"%json {json.dumps({**closed_schema, 'x-guidance': options}, ensure_ascii=False)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _space_rule() -> str:
    return r"SPACE: /\s{0,4}/"


def _schemas(form: OutputFormat, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return the schemas of an output format with their places in a request."""
    schemas: list[tuple[str, Any]] = []
    if form.json_schema is not None:
        schemas.append(("schema", form.json_schema))
    for number, tool in enumerate(tools):
        function = _function(tool)
        if function.get("name") in form.functions and function.get("parameters"):
            schemas.append((f"tools[{number}].function.parameters", function["parameters"]))
    return schemas


def _unsupported(form: OutputFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the place of the innermost unsupported part; empty: unknown."""
    tried = 0
    for place, schema in _schemas(form, tools):
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
    return bool(check_grammar(f"start: {_json({**shared, **own})}\n"))


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
