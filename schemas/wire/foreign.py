"""Boundary to foreign code: its exceptions and return values.

Games, rewards, agents, users' functions and libraries may raise any exception and return any value.
Here these become errors that name the culprit, or plain values for messages; the process continues.

The cancellation of the running task, the end of its coroutine, and an interrupt by signal are not
foreign and are passed on.
"""

import asyncio
import contextlib
import functools
import importlib
import reprlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, cast

from .codec import MAX_MESSAGE_BYTES, pack, unpack
from .errors import MessageError, TinkermqError

Blame = Callable[[BaseException], TinkermqError]
"""Returns the error that names the culprit of an exception; may return the exception itself."""

MAX_DEPTH = 64
"""Nested lists and maps of one value."""
MAX_CONTAINERS = 10_000
"""Lists and maps of one value: a message holds values of many episodes."""
_MAX_TEXT_CHARS = MAX_MESSAGE_BYTES // 4
_NUM_FRAMES = 6
_NUM_INNER = 5
_MOST_CHARS = 2000
_SHOWN_CHARS = 80
_INT64 = range(-(2**63), 2**64)
_IMPORTERS = (__file__, str(importlib.__file__))
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


# -- import of foreign modules ---------------------------------------------------------------------


def look_here() -> None:
    """Append the working folder to the import path, unless it no longer exists."""
    with contextlib.suppress(FileNotFoundError):
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)


# -- exceptions of foreign code --------------------------------------------------------------------


def blaming(blame: Blame) -> AbstractContextManager[None]:
    """Turn any exception of the block into the error that `blame` returns.

    The block calls foreign code and does not await.
    """
    if threading.current_thread() is threading.main_thread():
        return _BlamingInMainThread(blame)
    return _Blaming(blame)


def clear_frames(error: BaseException | None) -> None:
    """Clear the ended frames of an error and of its causes, which hold the objects of its code.

    Otherwise these live until the next run of the garbage collector, with the sessions, files and
    processes that they own.
    """
    known = set[int]()
    while error is not None and id(error) not in known:
        known.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Blaming:
    """A context manager without a generator, for speed: it surrounds every step of a game."""

    __slots__ = ("_blame",)

    def __init__(self, blame: Blame) -> None:
        self._blame = blame

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            _raise_blamed(self._blame, error)


class _BlamingInMainThread:
    """The same for the main thread, where SIGINT may interrupt the block; that is not its own
    exception.
    """

    def __init__(self, blame: Blame) -> None:
        self._blame = blame
        self._before: Any = None
        self._noticed = False

    def __enter__(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler or isinstance(before, functools.partial):
            self._before = before  # Python's own, or asyncio's: the ones that raise
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._before is not None and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, self._before)  # unless the foreign code has set its own
        if error is None or (self._noticed and isinstance(error, KeyboardInterrupt)):
            return
        _raise_blamed(self._blame, error)

    def _note(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before(number, frame)
        except KeyboardInterrupt:
            self._noticed = True
            raise


@contextlib.contextmanager
def blaming_awaited(blame: Blame) -> Iterator[None]:
    """Turn any exception of an awaiting block into the error of `blame`.

    A CancelledError is foreign unless the running task was cancelled.
    """
    task = asyncio.current_task()
    try:
        yield
    except BaseException as error:
        if _ends(task, error):
            raise
        _raise_blamed(blame, error)


def ends_this_task(error: BaseException) -> bool:
    """Return whether an error cancels the running task, rather than a foreign CancelledError."""
    return _ends(_current_task(), error)


def _ends(task: "asyncio.Task[Any] | None", error: BaseException) -> bool:
    if isinstance(error, GeneratorExit):  # the coroutine is closed, and belongs to no task any more
        return _current_task() is not task
    is_cancelled = isinstance(error, asyncio.CancelledError)
    return is_cancelled and task is not None and task.cancelling() > 0


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return None


def _raise_blamed(blame: Blame, error: BaseException) -> None:
    blamed = blame(error)
    if blamed is error:
        raise error
    raise blamed from error


def words_of(error: BaseException) -> str:
    """Return `Type: message` of an exception; for a group, also of its members."""
    words = f"{type(error).__name__}: {_text_of(error)}".removesuffix(": ")
    if isinstance(error, BaseExceptionGroup):
        inner = _leaves(cast("BaseExceptionGroup[BaseException]", error))
        words += f": {'; '.join(words_of(item) for item in inner)}"
    return clean_text(words)


def lines_of(error: BaseException, skip: Collection[str] = ()) -> str:
    """Return the end of a traceback and its exception, without frames of files in `skip`.

    For a group, also its members' tracebacks.
    """
    try:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename not in {__file__, *skip}]
        lines = traceback.format_list(own[-_NUM_FRAMES:])
        lines += map(clean_text, traceback.format_exception_only(type(error), error))
        if not own and error.__cause__ is not None:  # it is Python's own, for a StopIteration
            lines.insert(0, f"{lines_of(error.__cause__, skip)}\n")
    except BaseException as failure:  # noqa: BLE001 - formatting runs foreign code
        lines = [
            f"{type(error).__name__} (its traceback cannot be shown: {type(failure).__name__})"
        ]
    if isinstance(error, BaseExceptionGroup):
        inner = _leaves(cast("BaseExceptionGroup[BaseException]", error))
        lines += [f"\n{lines_of(item, skip)}\n" for item in inner]
    return clean_text("".join(lines).rstrip(), 3 * _MOST_CHARS, keep_end=True)


def place_of(error: BaseException, skip: Collection[str] = ()) -> str:
    """Return `file.py, line 3` of an exception while importing foreign code, or "".

    Frames of files in `skip`, and of the import machinery, do not count.
    """
    try:
        frames = traceback.extract_tb(error.__traceback__)
    except BaseException:  # noqa: BLE001 - the foreign loader returns the source
        return ""
    others = ("<frozen ", *_IMPORTERS, *skip)
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    return clean_text(f"{Path(own[-1].filename).name}, line {own[-1].lineno}") if own else ""


def clean_text(text: object, most_chars: int = _MOST_CHARS, *, keep_end: bool = False) -> str:
    """Return any value as a text that can be sent and logged."""
    cleaned = str.__str__(text) if isinstance(text, str) else shown(text)
    cleaned = _cut(cleaned, most_chars, keep_end=keep_end)
    return _cut(cleaned.encode(errors="backslashreplace").decode(), most_chars, keep_end=keep_end)


def _cut(text: str, most_chars: int, *, keep_end: bool) -> str:
    if len(text) <= most_chars:
        return text
    return f"… {text[-most_chars:]}" if keep_end else f"{text[:most_chars]} …"


def shown(value: object) -> str:
    """Return a short form of any value for a message."""
    try:
        text = _short.repr(value)
    except BaseException:  # noqa: BLE001 - its `repr` is foreign code
        text = f"<{type(value).__name__}>"
    text = text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
    return text.encode(errors="backslashreplace").decode()


def _text_of(error: BaseException) -> str:
    try:
        return str.__str__(str(error))
    except BaseException as failure:  # noqa: BLE001 - its `str` is foreign code
        return f"(its text cannot be had: {type(failure).__name__})"


def _leaves(group: "BaseExceptionGroup[BaseException]") -> list[BaseException]:
    """Return the members of a group that are not groups."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting and len(leaves) < _NUM_INNER:
        item = waiting.pop(0)
        if isinstance(item, BaseExceptionGroup):
            waiting[:0] = cast("BaseExceptionGroup[BaseException]", item).exceptions
        else:
            leaves.append(item)
    return leaves


class _Shown(reprlib.Repr):
    """Short forms of values: NumPy's own are slow, and a large int may have no text."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _SHOWN_CHARS

    def repr_ndarray(self, array: Any, _: int) -> str:
        return f"{array.dtype} array of {array.shape}"

    def repr_int(self, x: int, level: int) -> str:
        digits = x.bit_length() * 3 // 10
        return repr(x) if digits < _SHOWN_CHARS else f"an integer of some {digits:,} digits"


_short = _Shown()


# -- values returned by foreign code ---------------------------------------------------------------


def plain_text(value: str, name: str) -> str:
    """Return a text that can be sent; MessageError naming `name` for others.

    Texts with lone surrogates ("\\ud83d" in JSON) and too long texts cannot be sent.
    """
    text = value if type(value) is str else str.__str__(value)
    if text.isascii() and len(text) <= _MAX_TEXT_CHARS:
        return text
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise MessageError(
            f"{name} has half a character ({text[error.start]!a}) at place {error.start:,}: "
            f"{shown(text[max(0, error.start - 20) : error.start + 20])}",
            hint="decode bytes with errors='replace'; an emoji is one character or two escapes",
        ) from error
    _check_size(num_bytes, name)
    return text


def plain_value(value: Any, name: str) -> Any:
    """Return a copy of a value as its receiver will read it.

    Maps with text keys, lists, texts, 64-bit numbers, bytes, arrays and None can be sent. Raises
    MessageError that names the first other item, as `info["board"][3]`.
    """
    if value is None or type(value) in (bool, float):
        return value
    try:
        packed = pack(value)
        _check_size(len(packed), name)
        plain = unpack(packed)
    except MessageError as error:
        _find_culprit(value, name, ())
        raise MessageError(f"{name} cannot travel: {error.message}", hint=error.hint) from error
    _check_shape(plain, name)
    return plain


def _check_size(num_bytes: int, name: str) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"{name} takes {num_bytes:,} bytes, and {MAX_MESSAGE_BYTES:,} travel at most",
            hint="return less: write large values to a file, and return its name",
        )


def _check_shape(plain: Any, name: str) -> None:
    """Raise MessageError for a value that nests too deep or has unsupported types."""
    level, depth, count = [plain], 0, 0
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                values = cast("dict[Any, Any]", item)
                if not all(type(key) is str for key in values):
                    _find_culprit(plain, name, ())
                inner += values.values()
            elif isinstance(item, list):
                inner += cast("list[Any]", item)
            elif type(item) not in _PLAIN and not _is_array(item):
                _find_culprit(plain, name, ())
        level = [item for item in inner if type(item) not in _PLAIN]
        depth, count = depth + 1, count + len(level)
        if depth > MAX_DEPTH:
            raise _too_deep(name)
        if count > MAX_CONTAINERS:
            raise MessageError(
                f"{name} holds more than {MAX_CONTAINERS:,} lists, maps and arrays",
                hint="return an array in place of many lists",
            )


def _find_culprit(value: Any, name: str, within: tuple[Any, ...]) -> None:
    """Raise MessageError for the first item that cannot be sent."""
    if len(within) > MAX_DEPTH:
        raise _too_deep(name)
    if any(value is item for item in within):
        raise MessageError(f"{name} holds itself", hint="return a value without such a loop")
    inside: tuple[Any, ...] = (*within, value)
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise MessageError(
                    f"{name} has the key {shown(key)} ({type(key).__name__}): keys are texts",
                    hint="write str(key)",
                )
            plain_text(key, f"a key of {name}")
            _find_culprit(item, f"{name}[{shown(key)}]", inside)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(cast("list[Any]", value)):
            _find_culprit(item, f"{name}[{number}]", inside)
    elif isinstance(value, str):
        plain_text(value, name)
    elif isinstance(value, int):
        if int(value) not in _INT64:
            raise MessageError(
                f"{name} is {shown(value)}, and numbers of 64 bits travel",
                hint="return it as a text, or as a float",
            )
    elif not isinstance(value, float | bytes | bytearray | memoryview | None):
        _pack_item(value, name)


def _pack_item(value: Any, name: str) -> None:
    try:
        travels = _is_array(unpack(pack(value)))
    except MessageError:
        travels = False
    if not travels:
        raise MessageError(
            f"{name} is {shown(value)} ({type(value).__name__}), which has no plain form",
            hint="return maps with text keys, lists, texts, numbers, bytes and numeric arrays",
        )


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "tobytes")


def _too_deep(name: str) -> MessageError:
    return MessageError(
        f"{name if len(name) <= _SHOWN_CHARS else name[:_SHOWN_CHARS] + '…'} nests deeper than "
        f"{MAX_DEPTH} lists and maps",
        hint="return a flatter value",
    )
