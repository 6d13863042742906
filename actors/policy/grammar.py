"""Grammars over tokens: which tokens may follow those of an answer.

A grammar is a text in llguidance's form of Lark and describes a whole answer: reasoning, if the
prompt opened it, then JSON or tool calls in the form of the model's chat template, and the token
that ends the turn. White space within JSON is bounded, so that no model continues it for ever.

The allowed tokens depend only on the answer's tokens, so that an answer can be continued elsewhere
and by newer weights. A grammar is compiled once `grammar_trial` has shown what that takes; users
are served in turn, one grammar at a time, and the memory of a user's grammars is bounded.
"""

import asyncio
import json
import re
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy as copied
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import llguidance
import llguidance.numpy
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from numpy.typing import NDArray

from ...broker.client.fair_queue import FairLock
from ...schemas.call_formats import MARKS
from ...schemas.output_format import OutputFormat, check_multiples, check_schema
from ...schemas.tool_calls import CLOSE, OPEN, parse_tool_calls
from ...schemas.wire.errors import BusyError, ConfigError, DeadlineError, ModelError
from .chat import ChatTokenizer
from .grammar_trial import WORD_BITS, GrammarTrials, Schemas, Verdict, compiled, json_rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WAIT_S = 30.0
"""Time limit for compiling a grammar after those of other users."""
MAX_GRAMMARS = 64
"""Cached compiled grammars."""
MAX_USER_BYTES = 512 << 20
"""Memory of one user's grammars, cached ones and those of answers in progress."""
MAX_BYTES = 2 << 30
"""Memory of all grammars."""
_MAX_WAITING = 64
_SHOWN = 300


class TokenGrammar:
    """A compiled grammar of one tokenizer."""

    def __init__(
        self,
        text: str,
        matcher: llguidance.LLMatcher,
        num_tokens: int,
        user: str = "",
        num_bytes: int = 0,
    ) -> None:
        """Wrap a matcher at its start; use `GrammarCompiler`."""
        self.text = text
        self.user = user
        """The user for whom it was compiled."""
        self.num_bytes = num_bytes
        """Memory that it took to compile."""
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
        words = np.zeros((len(states), -(-known // WORD_BITS)), np.int32)
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
        self._trials: GrammarTrials | None = None
        self._cached: OrderedDict[str, TokenGrammar] = OrderedDict()
        self._in_use: weakref.WeakSet[TokenGrammar] = weakref.WeakSet()
        self._running: dict[tuple[str, str], asyncio.Task[TokenGrammar]] = {}
        self._turns = FairLock()
        self._thread: ThreadPoolExecutor | None = None

    async def compile(self, text: str, user: str = "", schemas: Schemas = ()) -> TokenGrammar:
        """Return a grammar, compiled in the user's turn; errors name the part of `schemas`.

        Raises ConfigError for one that is too large, malformed or not supported, DeadlineError if
        it waits too long, BusyError if too many of the user's wait or too many are in use.
        """
        if (known := self._remembered(text)) is not None:
            return known
        running = self._running.get((user, text))
        if running is None:
            if sum(owner == user for owner, _ in self._running) >= _MAX_WAITING:
                raise BusyError(
                    f"{_MAX_WAITING} output formats of this user are being compiled",
                    hint="ask again later",
                )
            running = asyncio.create_task(self._in_turn(text, user, schemas), name="grammar")
            self._running[user, text] = running
            running.add_done_callback(partial(self._ended, (user, text)))
        done, _ = await asyncio.wait({running}, timeout=WAIT_S)
        if not done:
            raise DeadlineError(
                f"the output format was not compiled within {WAIT_S:g} s, in turn with others",
                hint="ask again later",
            )
        return running.result()

    async def _in_turn(self, text: str, user: str, schemas: Schemas) -> TokenGrammar:
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grammar")
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        async with self._turns.turn(user):
            if (known := self._remembered(text)) is not None:
                return known
            verdict = await in_thread(self._try, text, schemas)
            if verdict.error:
                raise ConfigError(verdict.error, hint=verdict.hint)
            num_bytes = verdict.num_bytes + len(text)
            self._make_room(user, num_bytes)
            return self._keep(await in_thread(self._compile, text, user, num_bytes))

    def _try(self, text: str, schemas: Schemas) -> Verdict:
        if self._trials is None:
            tokenizer = tokenizer_text(self._tokenizer)
            self._trials = GrammarTrials(
                tokenizer, cast("int | None", self._tokenizer.eos_token_id)
            )
        return self._trials.run(text, schemas)

    def compile_here(self, text: str) -> TokenGrammar:
        """Return a grammar that `compile` has accepted in another process, compiled at once."""
        return self._remembered(text) or self._keep(self._compile(text, "", len(text)))

    def _compile(self, text: str, user: str, num_bytes: int) -> TokenGrammar:
        read = self._read = self._read or read_tokenizer(self._tokenizer)
        return TokenGrammar(text, compiled(read, text), read.vocab_size, user, num_bytes)

    def _keep(self, grammar: TokenGrammar) -> TokenGrammar:
        self._cached[grammar.text] = grammar
        self._in_use.add(grammar)
        while len(self._cached) > MAX_GRAMMARS:
            self._cached.popitem(last=False)
        return grammar

    def _make_room(self, user: str, num_bytes: int) -> None:
        """Drop cached grammars until another fits; BusyError if answers use too many."""
        for failed in [key for key, grammar in self._cached.items() if grammar.failed]:
            del self._cached[failed]
        for whose, most in ((user, MAX_USER_BYTES), (None, MAX_BYTES)):
            for key in [key for key, known in self._cached.items() if whose in (None, known.user)]:
                if self._held(whose) + num_bytes > most:
                    del self._cached[key]
            if (held := self._held(whose)) + num_bytes > most:
                raise BusyError(
                    f"answers in progress use output formats of {held >> 20:,} MiB, and this one "
                    f"has {num_bytes >> 20:,} MiB: {most >> 20:,} MiB are allowed",
                    hint="wait for some answers, or give smaller schemas",
                )

    def _held(self, user: str | None) -> int:
        """Return the memory of the grammars of a user, or of all, that are cached or in use."""
        return sum(item.num_bytes for item in self._in_use if user in (None, item.user))

    def _remembered(self, text: str) -> TokenGrammar | None:
        known = self._cached.get(text)
        if known is None or known.failed:
            return None
        self._cached.move_to_end(text)
        return known

    def _ended(self, key: tuple[str, str], done: "asyncio.Task[TokenGrammar]") -> None:
        self._running.pop(key, None)
        if not done.cancelled():
            done.exception()  # raised for the waiting request


def read_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> llguidance.LLTokenizer:
    """Return a tokenizer for grammars; raises ConfigError if its tokens cannot be read."""
    text = tokenizer_text(tokenizer)
    try:
        return llguidance.LLTokenizer(text, eos_token=cast("int | None", tokenizer.eos_token_id))
    except ValueError as error:
        raise ConfigError(
            f"output formats do not work with this tokenizer: {str(error)[:_SHOWN]}",
            hint="use a model with a byte-level or SentencePiece-like tokenizer",
        ) from error


def tokenizer_text(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the tokenizer.json of a tokenizer; ConfigError for one of another library."""
    backend = cast("Any", getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise ConfigError(
            f"output formats need a tokenizer of the tokenizers library, and "
            f"{type(tokenizer).__name__} is none",
            hint="save it as tokenizer.json (`save_pretrained` of a fast tokenizer)",
        )
    copy: Any = copied(backend)
    copy.no_padding()
    copy.no_truncation()
    return str(copy.to_str())


# -- the grammar of an output format ---------------------------------------------------------------

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
        user: str = "",
    ) -> TokenGrammar:
        """Return the grammar of answers to a user's prompt; `thinking`: it opened the reasoning.

        Raises ConfigError for an unsupported format, or a template that writes calls in another
        form than `<tool_call>{"name": …, "arguments": …}</tool_call>`;
        DeadlineError and BusyError as `GrammarCompiler.compile` does.
        """
        text = self.text(form, tools, thinking=thinking)
        return await self._compiler.compile(text, user, _schemas(form, tools))

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
            rules.append(f"json: {json_rule(form.json_schema)}")
            kinds.append("json")
        if form.functions:
            rules += self._calls(form, tools)
            kinds.append("calls")
        if form.regex or form.choices or form.grammar:
            rules.append(f"text: {_text_rule(form)}")
            kinds.append("text")
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
        close = MARKS[self._chat.reasoning_mark]
        mark = self._chat.special_token(close)
        if mark is None:
            end = re.escape(close).replace("/", "\\/")
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
                json_rule(_arguments(schema, place)),
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


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _text_rule(form: OutputFormat) -> str:
    """Return the expression of a text other than JSON."""
    if form.choices:
        return " | ".join(map(_text, form.choices))
    if form.grammar:
        return f"%lark {{\n{_as_lark(form.grammar)}\n}}"
    whole = form.regex.removeprefix("^")
    if whole.endswith("$") and not whole.endswith("\\$"):
        whole = whole[:-1]
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", whole, flags=re.DOTALL)
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"


def _as_lark(grammar: str) -> str:
    """Return a grammar in Lark's form; one with `::=` is in GBNF's. Raises ConfigError."""
    if "::=" not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except GbnfToLarkError as error:
        raise ConfigError(
            f"the grammar cannot be read as GBNF: {str(error)[:_SHOWN]}",
            hint="give one in GBNF's or Lark's form",
        ) from error


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
