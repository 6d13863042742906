"""What an actor writes: lines, file, error."""

import asyncio
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.node.output import (
    MAX_LINE_BYTES,
    MAX_REASON_CHARS,
    MAX_WAITING_LINES,
    TAIL_LINES,
    ActorOutput,
    ErrorMemory,
    LineSplitter,
    LogFile,
)
from tinkermq.schemas.metric import LogLines
from tinkermq.schemas.wire.errors import BrokerError


@given(st.lists(st.binary(max_size=30)))
def test_lines_do_not_depend_on_how_the_pipe_cuts_them(chunks: list[bytes]) -> None:
    whole, parts = LineSplitter(), LineSplitter()
    together = whole.feed(b"".join(chunks)) + whole.end()
    apart = [line for chunk in chunks for line in parts.feed(chunk)] + parts.end()
    assert apart == together


def test_a_line_without_end_is_cut_at_the_limit() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * (MAX_LINE_BYTES + 1)) + splitter.end()
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, 1]


def test_bytes_that_are_no_utf8_are_shown_not_raised() -> None:
    assert LineSplitter().feed(b"\xff\n") == ["�"]


def test_a_full_log_file_is_renamed_and_only_one_old_one_is_kept(tmp_path: Path) -> None:
    file = LogFile(tmp_path, "logs/a.log", max_bytes=10)
    for number in range(5):
        file.append([f"line {number:04}"])
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"a.log.1"}
    assert (tmp_path / "logs" / "a.log.1").read_text() == "line 0004\n"


def test_the_last_error_that_an_actor_told_is_its_reason() -> None:
    memory = ErrorMemory()
    memory.note('{"event": "actor_failed", "code": "data", "message": "first"}')
    memory.note('{"event": "actor_failed", "code": "model", "message": "second"}')
    memory.note('not "actor_failed" json')
    assert memory.reason(2) == "model: second"
    memory.note('{"event": "actor_crashed", "exception": "Traceback\\n  ...\\nKeyError: 3\\n"}')
    memory.note("what libraries say at exit")
    assert memory.reason(1) == "crashed:\nTraceback\n  ...\nKeyError: 3"


def test_without_a_told_error_the_reason_is_the_end_of_the_output() -> None:
    memory = ErrorMemory()
    for number in range(30):
        memory.note(f"line {number}")
    assert memory.reason(-9).splitlines()[:2] == ["killed by signal 9", "line 10"]


async def test_lines_wait_for_a_broker_that_is_away_and_the_oldest_go(tmp_path: Path) -> None:
    sent: list[str] = []
    away = True
    tried = asyncio.Event()

    async def send(lines: LogLines) -> None:
        tried.set()
        if away:
            raise BrokerError("away")
        sent.extend(lines.lines)

    output = ActorOutput("a", 1, LogFile(tmp_path, "a.log"), send)
    flusher = asyncio.create_task(output.flush_forever())
    output.add(["first"])
    await tried.wait()
    output.add([str(number) for number in range(MAX_WAITING_LINES + 1)])
    away = False
    await output.drain()
    flusher.cancel()
    assert sent[0] == "first"
    assert len(sent) == 1 + MAX_WAITING_LINES
    assert sent[-1] == str(MAX_WAITING_LINES)
    assert len((tmp_path / "a.log").read_text().splitlines()) == MAX_WAITING_LINES + 2


async def test_a_file_that_cannot_be_written_does_not_stop_the_lines(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    sent: list[str] = []

    async def send(lines: LogLines) -> None:
        sent.extend(lines.lines)

    output = ActorOutput("a", 1, LogFile(tmp_path, "logs/a.log"), send)
    output.add(["one"])
    await output.drain()
    assert sent == ["one"]


def test_why_an_actor_ended_is_short_however_much_it_wrote() -> None:
    memory = ErrorMemory()
    for _ in range(TAIL_LINES):
        memory.note("x" * 16_000)
    assert len(memory.reason(1)) < 2 * MAX_REASON_CHARS
    memory.note(json.dumps({"event": "actor_failed", "code": "game", "message": "x" * 16_000}))
    assert memory.reason(1).startswith("game: xxx")
    assert len(memory.reason(1)) == MAX_REASON_CHARS
