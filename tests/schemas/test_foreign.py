"""Code of others: whatever it raises names the one to blame, and what it returns can travel."""

import asyncio
import contextlib
import enum
import signal
import threading
from collections import OrderedDict, defaultdict
from types import MappingProxyType

import numpy as np
import pytest
from tinkermq.schemas.wire.codec import MAX_MESSAGE_BYTES, pack, unpack
from tinkermq.schemas.wire.errors import GameError, MessageError, SandboxError
from tinkermq.schemas.wire.foreign import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    blaming,
    blaming_awaited,
    clean_text,
    lines_of,
    plain_text,
    plain_value,
    shown,
    words_of,
)


class Unsayable(Exception):
    """Raises as it is shown."""

    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


class Own(BaseException):
    """No `Exception`."""


def raise_deeply():
    raise_deeply()


def raise_from_value():
    try:
        int("seven")
    except ValueError as error:
        raise Own("no number") from error


RAISED = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit": SystemExit(3),
    "SystemExit with a text": SystemExit("bye"),
    "GeneratorExit": GeneratorExit(),
    "a subclass of BaseException": Own("mine"),
    "CancelledError": asyncio.CancelledError(),
    "a group of none": BaseExceptionGroup("two", [KeyboardInterrupt(), Own("deep")]),
    "a group in a group": ExceptionGroup("out", [ExceptionGroup("in", [KeyError("k")])]),
    "StopIteration": StopIteration(7),
    "StopAsyncIteration": StopAsyncIteration(),
    "MemoryError": MemoryError(),
    "one that cannot be shown": Unsayable(),
    "half a character": ValueError("cut \ud83d here"),
    "a very long text": ValueError("x" * 10_000_000),
    "no text but bytes": ValueError(b"\xff\xfe"),
    "TimeoutError": TimeoutError("the game's own"),
    "RuntimeError": RuntimeError("coroutine raised StopIteration"),
}


def told(error: BaseException) -> GameError:
    return GameError(f"it raised {words_of(error)}\n{lines_of(error)}")


@pytest.mark.parametrize("raised", RAISED.values(), ids=RAISED)
def test_whatever_a_block_raises_is_blamed_with_its_traceback(raised):
    with pytest.raises(GameError) as failure, blaming(told):
        raise raised
    message = failure.value.message
    assert type(raised).__name__ in message
    assert "raise raised" in message
    assert len(message) < 10_000
    message.encode()  # it can travel


@pytest.mark.parametrize("raised", RAISED.values(), ids=RAISED)
async def test_whatever_a_coroutine_raises_is_blamed_too(raised):
    async def play():
        await asyncio.sleep(0)
        raise raised

    with pytest.raises(GameError) as failure, blaming_awaited(told):
        await play()
    expected = "RuntimeError" if isinstance(raised, StopIteration) else ""  # Python's own rule
    assert (expected or type(raised).__name__) in failure.value.message


def test_a_recursion_without_end_is_blamed():
    with pytest.raises(GameError, match="RecursionError"), blaming(told):
        raise_deeply()


def test_what_a_group_holds_is_named():
    inner = BaseExceptionGroup("in", [Own("right")])
    group = BaseExceptionGroup("both", [KeyError("left"), inner])
    assert words_of(group) == (
        "BaseExceptionGroup: both (2 sub-exceptions): KeyError: 'left'; Own: right"
    )


def test_an_error_of_ours_stays_what_it_is():
    error = SandboxError("no room")
    with pytest.raises(SandboxError) as raised, blaming(lambda _: error):
        raise error
    assert raised.value is error


async def test_the_cancellation_of_the_running_task_goes_on():
    waiting = asyncio.Event()

    async def play():
        with blaming_awaited(told):
            waiting.set()
            await asyncio.sleep(3600)

    task = asyncio.create_task(play())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_around_it_still_ends_it():
    async def play():
        with blaming_awaited(told):
            await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(play(), 0.01)


async def test_a_cancelled_task_that_is_awaited_is_no_cancellation_of_ours():
    other = asyncio.create_task(asyncio.sleep(3600))
    asyncio.get_running_loop().call_soon(other.cancel)
    with pytest.raises(GameError, match="CancelledError"), blaming_awaited(told):
        await other


def test_a_coroutine_that_is_closed_ends_without_an_error():
    async def play():
        with blaming_awaited(told):
            await asyncio.sleep(3600)

    async def begun():
        running = asyncio.ensure_future(play())
        await asyncio.sleep(0)
        return running

    loop = asyncio.new_event_loop()
    running = loop.run_until_complete(begun())
    coroutine = running.get_coro()
    assert coroutine is not None
    coroutine.close()
    with contextlib.suppress(asyncio.CancelledError, RuntimeError):
        running.cancel()
        loop.run_until_complete(running)
    loop.close()


def test_an_interrupt_that_came_as_a_signal_goes_on():
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), blaming(told):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(GameError), blaming(told):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


class Level(enum.IntEnum):
    HARD = 3


class Named(str):
    """A text with more to it."""


TRAVELLING = {
    "plain values": {"a": [1, 2.5, True, None, "é", b"\xff"], "b": {"c": {}}},
    "a pair": (1, 2),
    "kinds of maps": OrderedDict(a=defaultdict(int, b=1)),
    "an enumeration of numbers": Level.HARD,
    "a text with more to it": Named("x"),
    "the largest numbers": [2**64 - 1, -(2**63)],
    "no numbers": [float("nan"), float("inf")],
    "NumPy's numbers": {"n": np.float32(1.5), "b": np.bool_(True)},
    "arrays": {"x": np.arange(6).reshape(2, 3)},
    "as deep as may be": None,
}


def nested(depth):
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", TRAVELLING.values(), ids=TRAVELLING)
def test_what_can_travel_comes_back_as_it_arrives(value):
    value = nested(MAX_DEPTH) if value is None else value
    plain = plain_value(value, "info")
    assert pack(plain) == pack(unpack(pack(value)))


def looped():
    value: dict[str, object] = {}
    value["self"] = [value]
    return value


class Strange:
    def __repr__(self):
        raise Own("nobody looks at me")


NOT_TRAVELLING = {
    "half a character": ({"said": ["ok", "ok \udcff"]}, "info['said'][1] has half a character"),
    "the first half of an emoji": ({"said": "\ud83d"}, "info['said'] has half a character"),
    "half a character in a key": ({"\ud83d": 1}, "a key of info has half a character"),
    "an object": ({"board": [1, object()]}, "info['board'][1] is <object object"),
    "an object that cannot be shown": ({"it": Strange()}, "info['it'] is <Strange"),
    "a class": ({"it": int}, "info['it'] is <class 'int'> (type)"),
    "a function": ({"it": len}, "info['it'] is <built-in function len>"),
    "a set": ({"seen": {1}}, "info['seen'] is {1} (set)"),
    "a complex number": ({"z": 1j}, "info['z'] is 1j (complex)"),
    "a number of 65 bits": ({"n": {"deep": 2**64}}, "info['n']['deep'] is 18446744073709551616"),
    "a negative number of 64 bits": ({"n": -(2**63) - 1}, "info['n'] is -9223372036854775809"),
    "a number without end": ({"n": 10**5000}, "info['n'] is an integer of some"),
    "a number as a key": ({"moves": {3: "e4"}}, "info['moves'] has the key 3 (int)"),
    "bytes as a key": ({b"k": 1}, "info has the key b'k' (bytes)"),
    "bytes as a key within": ({"m": {b"k": 1}}, "info['m'] has the key b'k' (bytes)"),
    "a pair as a key": ({(1, 2): 1}, "info has the key (1, 2) (tuple)"),
    "a loop": (looped(), "info['self'][0] holds itself"),
    "too deep": ({"x": nested(MAX_DEPTH)}, "nests deeper than 64"),
    "far too deep": (nested(900), "nests deeper than 64"),
    "as deep as Python can": (nested(50_000), "nests deeper than 64"),
    "too many lists": ([[] for _ in range(MAX_CONTAINERS + 1)], "holds more than 10,000 lists"),
    "too large": ({"x": b"0" * (MAX_MESSAGE_BYTES + 1)}, "info takes 8,388,"),
    "an array of objects": ({"x": np.array([object()])}, "info['x'] is object array"),
    "an array of texts": ({"x": np.array(["a", "b"])}, "info['x'] is <U1 array"),
    "complex arrays": ({"x": np.zeros(2, complex)}, "info['x'] is complex128 array"),
    "a date": ({"x": np.datetime64("2024-11-25")}, "info['x'] is"),
    "a view of a map": ({"x": MappingProxyType({})}, "info['x'] is mappingproxy"),
    "an exception": ({"x": [ValueError("no")]}, "info['x'][0] is ValueError('no')"),
}


@pytest.mark.parametrize(("value", "words"), NOT_TRAVELLING.values(), ids=NOT_TRAVELLING)
def test_what_cannot_travel_is_named_by_its_place(value, words):
    with pytest.raises(MessageError) as error:
        plain_value(value, "info")
    assert words in error.value.message
    error.value.message.encode()
    assert len(error.value.message) < 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a \ud800", "half a character ('\\ud800') at place 2"),
        ("\udcff" * 3, "half a character"),
        ("é" * (MAX_MESSAGE_BYTES // 2 + 1), "takes 8,388,610 bytes"),
        ("x" * (MAX_MESSAGE_BYTES + 1), "takes 8,388,609 bytes"),
    ],
    ids=["one", "three", "long", "long and plain"],
)
def test_a_text_that_cannot_travel_is_named(text, words):
    with pytest.raises(MessageError, match="observation"):
        plain_text(text, "observation")
    with pytest.raises(MessageError) as error:
        plain_text(text, "observation")
    assert words in error.value.message


@pytest.mark.parametrize("text", ["", "plain", "é 😀 \0 \x1b", Named("x"), np.str_("y")])
def test_any_other_text_travels_as_a_text(text):
    plain = plain_text(text, "observation")
    assert plain == text
    assert type(plain) is str


SHOWN = [Strange(), 10**5000, "\ud83d", nested(5000), np.zeros(10**6)]


@pytest.mark.parametrize("value", SHOWN, ids=["strange", "long", "half", "deep", "large"])
def test_any_value_can_be_shown(value):
    assert len(shown(value)) <= 80
    shown(value).encode()
    clean_text(value).encode()
