"""Grammars over tokens: which token may follow those that an answer has so far.

A grammar is a text in llguidance's form of Lark and says all of an answer, the token that ends it
included. What it allows depends on the answer's tokens alone, so that an answer which was begun
elsewhere goes on, and newer weights change nothing of it. Compiling is bounded: by the size of the
text, by the library's own limits on states and steps, and by a deadline in a thread of its own.
"""

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy as copied
from typing import TYPE_CHECKING, Any, TypeVar, cast

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from ....schemas.wire.errors import BusyError, ConfigError, DeadlineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
COMPILE_S = 10.0
"""Longest time that a grammar may take to be compiled."""
MAX_GRAMMARS = 64
"""Compiled grammars that are kept for the next request."""
MAX_GRAMMAR_CHARS = 512 << 10
"""Of one grammar."""
MAX_KEPT_CHARS = 4 << 20
"""Of all that are kept: what a compiled grammar takes grows with its text."""
_MAX_WAITING = 64
_SHOWN = 300
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_LINES = re.compile(r"\n +\d+ \| ")
_WORDS = 32
"""Bits of one word of a mask."""


def _limits() -> llguidance.LLParserLimits:
    """Return the library's defaults, but for memory (1-2 kB a state) and its errors' length."""
    return llguidance.LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


class TokenGrammar:
    """A compiled grammar of one tokenizer."""

    def __init__(self, text: str, matcher: llguidance.LLMatcher, num_tokens: int) -> None:
        """Take a matcher that has read nothing; a `GrammarCompiler` makes one."""
        self.text = text
        self.num_tokens = num_tokens
        """Tokens of the tokenizer."""
        self._matcher = matcher

    def begin(self, drawn: Sequence[int] = ()) -> "GrammarState":
        """Return the state of an answer behind the tokens that it has already."""
        state = GrammarState(self._matcher.deep_copy(), self.num_tokens)
        for token in drawn:
            state.take(int(token))
        return state


class GrammarState:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, num_tokens: int) -> None:
        self.matcher = matcher
        self.num_tokens = num_tokens
        self.error = ""
        """Why the answer cannot go on; empty: it can."""

    def take(self, token: int) -> None:
        """Go on behind a token."""
        if not self.error and not self.matcher.consume_token(token):
            told = self.matcher.get_error() or f"token {token} is not allowed there"
            self.error = told.strip()[:_SHOWN]


class MaskFiller:
    """Fills the masks of a batch, several in parallel."""

    def __init__(self) -> None:
        self._executor: llguidance.LLExecutor | None = None

    def allowed(self, states: Sequence[GrammarState], num_tokens: int) -> NDArray[np.bool_]:
        """Return bool[rows, num_tokens]: what may follow, by the states of one tokenizer.

        What the model has beyond the tokenizer never may. A state that fails says so in its
        `error`, and allows everything.
        """
        known = states[0].num_tokens
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
                state.error = state.matcher.get_error().strip()[:_SHOWN]
            if state.error:
                allowed[row] = True
        return allowed


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the latest ones."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Compile for `tokenizer`; nothing is read of it before the first grammar."""
        self._tokenizer = tokenizer
        self._read: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, TokenGrammar] = OrderedDict()
        self._running: dict[str, asyncio.Future[TokenGrammar]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    async def compile(self, text: str) -> TokenGrammar:
        """Return a grammar, compiled beside the event loop.

        Raises ConfigError for one that is too large, malformed or not supported, DeadlineError for
        one that takes too long, BusyError where too many others wait.
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
            running = self._aside(lambda: self.compile_here(text))
            self._running[text] = running
            running.add_done_callback(lambda done: self._ended(text, done))
        done, _ = await asyncio.wait({running}, timeout=COMPILE_S)
        if not done:
            raise DeadlineError(
                f"the output format was not compiled within {COMPILE_S:g} s",
                hint="give a smaller schema",
            )
        return running.result()

    async def aside(self, work: Callable[[], T]) -> T:
        """Do something in the thread that compiles; DeadlineError where that takes too long."""
        running = self._aside(work)
        done, _ = await asyncio.wait({running}, timeout=COMPILE_S)
        if not done:
            running.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise DeadlineError("the compiler of output formats is busy", hint="ask again later")
        return running.result()

    def _aside(self, work: Callable[[], T]) -> "asyncio.Future[T]":
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
        with self._lock:
            self._kept[text] = grammar
            while len(self._kept) > MAX_GRAMMARS or sum(map(len, self._kept)) > MAX_KEPT_CHARS:
                self._kept.popitem(last=False)
        return grammar

    def _remembered(self, text: str) -> TokenGrammar | None:
        with self._lock:
            known = self._kept.get(text)
            if known is not None:
                self._kept.move_to_end(text)
            return known

    def _ended(self, text: str, done: "asyncio.Future[TokenGrammar]") -> None:
        self._running.pop(text, None)
        if not done.cancelled():
            done.exception()  # told to who waits for it


def read_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> llguidance.LLTokenizer:
    """Return a tokenizer as grammars need it; ConfigError for one whose tokens are not known."""
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
            f"output formats cannot be had with this tokenizer: {str(error)[:_SHOWN]}",
            hint="use a model with a byte-level or SentencePiece-like tokenizer",
        ) from error


def check_grammar(text: str) -> str:
    """Return what is wrong with a grammar whatever the tokenizer; empty: nothing."""
    told = llguidance.LLMatcher.validate_grammar(text, limits=_limits())
    return _reason(told) if told else ""


def _reason(told: str) -> str:
    """Return the library's reason without the grammar's lines, which nobody wrote by hand."""
    first = _LINES.split(told)[0]
    return " ".join(_PLACE.sub("", first).split())[:_SHOWN].removeprefix(
        "failed to compile JSON schema: "
    )
