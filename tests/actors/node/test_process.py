"""An actor's process: started, watched, started again, stopped; and what it writes."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.node.children import ActorStarter, Child, programs
from tinkermq.actors.node.process import (
    MAX_LINE_BYTES,
    MAX_REASON_CHARS,
    MAX_WAITING_LINES,
    SILENCE_VARIABLE,
    TAIL_LINES,
    ActorOutput,
    ActorProcess,
    Backoff,
    ErrorMemory,
    LineSplitter,
    LogFile,
    ReadBeat,
    no_beat,
    read_lines,
    silence_bound,
)
from tinkermq.schemas.metric import LogLines, Presence
from tinkermq.schemas.node import WantedActor
from tinkermq.schemas.wire.errors import BrokerError, ConfigError, DeadlineError, MessageError

from tests.support.processes import alive
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, until

pytestmark = pytest.mark.full


def wanted(run_dir: Path, **changes: object) -> WantedActor:
    fields = {"user": "local", "job": "j1", "name": "learner", "role": "learner"}
    return WantedActor.model_validate({**fields, "run_dir": str(run_dir), **changes})


def script(text: str) -> Callable[[WantedActor], list[str]]:
    return lambda _: [sys.executable, "-c", text]


class Sink:
    """Takes the lines that would go to the broker."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def __call__(self, lines: LogLines) -> None:
        self.lines += lines.lines


def process(
    run_dir: Path,
    text: str,
    sink: Sink | None = None,
    *,
    last_beat: ReadBeat = no_beat,
    stop_deadline_s: float = AFTER_PATIENCE_S,
    **changes: object,
) -> ActorProcess:
    return ActorProcess(
        wanted(run_dir, **changes),
        start=programs(script(text)),
        nats_url="nats://127.0.0.1:1",
        send=sink or Sink(),
        stop_deadline_s=stop_deadline_s,
        last_beat=last_beat,
    )


async def test_exit_zero_is_done_and_its_output_is_kept_and_sent(tmp_path: Path) -> None:
    sink = Sink()
    actor = process(tmp_path, "print('hello'); print('no line end', end='')", sink)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.ended
    assert (actor.status.state, actor.status.exit_code) == ("exited", 0)
    assert actor.status.slots == 0
    assert sink.lines == ["hello", "no line end"]
    log = tmp_path / "logs" / "attempt_1" / "learner.log"
    assert log.read_text() == "hello\nno line end\n"


async def test_exit_two_is_final_and_tells_the_error_of_the_actor(tmp_path: Path) -> None:
    told = {"event": "actor_failed", "code": "data", "message": "no file 'x'", "hint": "make it"}
    text = f"import sys; print({json.dumps(told)!r}); print('bye'); sys.exit(2)"
    actor = process(tmp_path, text)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert (actor.status.state, actor.status.restarts) == ("failed", 0)
    assert actor.status.error == "data: no file 'x'\n  make it"


async def test_a_crash_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    text = (
        "import sys, pathlib; p = pathlib.Path('count'); "
        f"p = pathlib.Path({str(tmp_path)!r}) / 'count'; "
        "n = int(p.read_text()) if p.exists() else 0; p.write_text(str(n + 1)); "
        "sys.exit(0 if n == 2 else 1)"
    )
    actor = process(tmp_path, text)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert (actor.status.state, actor.status.restarts) == ("exited", 2)


async def test_too_many_crashes_are_final_and_show_the_end_of_the_output(tmp_path: Path) -> None:
    text = "import sys; print('last words'); sys.exit(1)"
    actor = process(tmp_path, text, max_restarts=1)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert (actor.status.state, actor.status.restarts) == ("failed", 1)
    assert actor.status.error == "crashed 2 times: exit code 1\nlast words"


async def test_a_failed_actor_is_asked_what_it_had_done_before_it_is_counted(
    tmp_path: Path,
) -> None:
    asked: list[int] = []

    async def last_beat() -> Presence:
        asked.append(actor.status.fruitless)
        when = 0.0 if len(asked) == 3 else time.time()  # that of an earlier process
        return Presence(
            actor="learner",
            role="learner",
            host="here",
            pid=1,
            state="working",
            progress=5 if len(asked) in (2, 3) else 0,
            time=when,
        )

    actor = process(tmp_path, "import sys; sys.exit(1)", last_beat=last_beat, max_restarts=3)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert asked == [0, 1, 0, 1]
    assert actor.status.fruitless == 2


def beat_of(told: float) -> Presence:
    return Presence(actor="a", role="generator", host="h", pid=1, state="working", time=told)


def watched(
    run_dir: Path,
    last_beat: ReadBeat,
    text: str = "import time; time.sleep(600)",
    sink: Sink | None = None,
    **bounds: Any,
) -> ActorProcess:
    """Return an actor whose heartbeats are looked at, with bounds of its silence."""
    return ActorProcess(
        wanted(run_dir, role="generator"),
        start=programs(script(text)),
        nats_url="nats://127.0.0.1:1",
        send=sink or Sink(),
        last_beat=last_beat,
        **bounds,
    )


async def test_an_actor_that_is_frozen_is_told_and_started_again(tmp_path: Path) -> None:
    sink = Sink()
    beats = tmp_path / "beats"
    text = (
        "import os, pathlib, time\n"
        f"beats = pathlib.Path({str(beats)!r})\n"
        "print('started', flush=True)\n"
        "while True:\n    beats.write_text(str(time.time()))\n    time.sleep(0.02)\n"
    )

    looks = 0

    async def last_beat() -> Presence | None:
        nonlocal looks
        looks += 1
        try:
            told = float(await asyncio.to_thread(beats.read_text))
        except (OSError, ValueError):
            return None
        return beat_of(told)

    actor = watched(tmp_path, last_beat, text, sink, silence_s=3.0, silence_look_s=0.1)
    run = asyncio.create_task(actor.run())
    await until(beats.exists, "a heartbeat")
    seen = looks
    await until(lambda: looks > seen + 3, "looks that find it well")
    first = actor.status.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    await until(lambda: actor.status.silent_s > 0, "the silence to be told")
    await until(lambda: sink.lines.count("started") >= 2, "a new process")
    await until(lambda: actor.status.pid not in (None, first), "its number")
    assert actor.status.restarts >= 1
    assert actor.status.error.startswith("deadline: no heartbeat came for")
    assert not alive(first)
    actor.stop(kill=True)
    await asyncio.wait_for(run, PATIENCE_S)


async def test_an_actor_is_not_silent_while_no_heartbeat_can_be_read(tmp_path: Path) -> None:
    looks = 0

    async def last_beat() -> Presence | None:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise DeadlineError("the broker stores nothing")
        return beat_of(time.time())

    actor = watched(tmp_path, last_beat, silence_s=0.5, silence_look_s=0.02)
    run = asyncio.create_task(actor.run())
    await until(lambda: looks > 60, "many looks")
    assert (actor.status.silent_s, actor.status.restarts) == (0.0, 0)
    actor.stop(kill=True)
    await asyncio.wait_for(run, PATIENCE_S)


@pytest.mark.parametrize("step_s", [1.0, -1.0, 3600.0, -3600.0])
async def test_an_actor_whose_clock_is_set_back_is_not_silent(
    tmp_path: Path, step_s: float
) -> None:
    looks = 0

    async def last_beat() -> Presence | None:
        nonlocal looks
        looks += 1
        told = time.time() + step_s * (looks // 3)  # another one with every third look
        return beat_of(told)

    actor = watched(tmp_path, last_beat, silence_s=1.0, silence_look_s=0.02)
    run = asyncio.create_task(actor.run())
    await until(lambda: looks > 120, "many looks")
    assert (actor.status.silent_s, actor.status.restarts) == (0.0, 0)
    actor.stop(kill=True)
    await asyncio.wait_for(run, PATIENCE_S)


async def test_an_actor_whose_last_heartbeat_has_vanished_is_silent(tmp_path: Path) -> None:
    told = time.time() + 60.0
    looks = 0

    async def last_beat() -> Presence | None:
        nonlocal looks
        looks += 1
        if looks > 2:
            return None
        return beat_of(told + looks)

    actor = watched(tmp_path, last_beat, silence_s=0.5, silence_look_s=0.05)
    run = asyncio.create_task(actor.run())
    await until(lambda: actor.status.restarts >= 1, "a new process")
    actor.stop(kill=True)
    await asyncio.wait_for(run, PATIENCE_S)


async def test_an_actor_that_never_tells_a_heartbeat_is_started_again(tmp_path: Path) -> None:
    """Of an earlier process one may still be there."""
    before = beat_of(time.time() - 60)

    async def last_beat() -> Presence | None:
        return before

    actor = watched(tmp_path, last_beat, silence_s=0.1, start_silence_s=1.0, silence_look_s=0.05)
    run = asyncio.create_task(actor.run())
    await until(lambda: actor.status.silent_s >= 0.5, "the silence to be told")
    await until(lambda: actor.status.restarts >= 1, "a new process")
    actor.stop(kill=True)
    await asyncio.wait_for(run, PATIENCE_S)


@pytest.mark.parametrize("given", ["0", "-1", "soon", "inf", "nan"])
def test_a_bound_of_silence_that_is_none_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, given)
    with pytest.raises(ConfigError, match=SILENCE_VARIABLE):
        silence_bound()


def test_a_bound_of_silence_counts_for_every_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SILENCE_VARIABLE, raising=False)
    assert silence_bound() is None
    monkeypatch.setenv(SILENCE_VARIABLE, "45.5")
    assert silence_bound() == 45.5


async def test_a_drain_that_nobody_here_asked_for_is_no_failure(tmp_path: Path) -> None:
    sink = Sink()
    actor = process(tmp_path, "import sys; print('drained'); sys.exit(3)", sink, max_restarts=0)
    run = asyncio.create_task(actor.run())
    await until(lambda: sink.lines.count("drained") >= 2, "started again")
    actor.stop()
    await asyncio.wait_for(run, PATIENCE_S)
    assert actor.status.state == "exited"


async def test_a_killed_actor_is_started_again(tmp_path: Path) -> None:
    actor = process(tmp_path, "import time; time.sleep(600)")
    run = asyncio.create_task(actor.run())
    await until(lambda: actor.status.pid is not None, "started")
    first = actor.status.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: actor.status.pid not in (None, first), "started again")
    assert actor.status.restarts == 1
    actor.stop()
    await asyncio.wait_for(run, PATIENCE_S)
    assert actor.status.state == "exited"


async def test_kills_from_outside_are_no_failures_however_many_they_are(tmp_path: Path) -> None:
    actor = process(tmp_path, "import time; time.sleep(600)", max_restarts=0)
    run = asyncio.create_task(actor.run())
    killed: set[int | None] = {None}
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        await until(lambda: actor.status.pid not in killed, "another process")
        assert actor.status.pid is not None
        killed.add(actor.status.pid)
        os.kill(actor.status.pid, number)
    await until(lambda: actor.status.pid not in killed, "another process")
    assert (actor.status.restarts, actor.status.fruitless) == (3, 0)
    actor.stop(kill=True)
    await asyncio.wait_for(run, PATIENCE_S)


async def test_stop_lets_an_actor_drain(tmp_path: Path) -> None:
    sink = Sink()
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('drained'), sys.exit(0)))\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    actor = process(tmp_path, text, sink)
    run = asyncio.create_task(actor.run())
    await until(lambda: "up" in sink.lines, "started")
    actor.stop()
    await asyncio.wait_for(run, PATIENCE_S)
    assert sink.lines == ["up", "drained"]
    assert (actor.status.state, actor.status.exit_code) == ("exited", 0)


HANGS = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True)\ntime.sleep(600)"
)


async def test_an_actor_that_ignores_the_stop_is_killed_after_the_deadline(tmp_path: Path) -> None:
    sink = Sink()
    actor = process(tmp_path, HANGS, sink, stop_deadline_s=0.5)
    run = asyncio.create_task(actor.run())
    await until(lambda: "up" in sink.lines, "started")
    started = time.monotonic()
    actor.stop()
    await asyncio.wait_for(run, PATIENCE_S)
    assert time.monotonic() - started >= 0.5
    assert (actor.status.state, actor.status.exit_code) == ("exited", -9)


async def test_kill_does_not_wait_for_draining(tmp_path: Path) -> None:
    sink = Sink()
    actor = process(tmp_path, HANGS, sink)
    run = asyncio.create_task(actor.run())
    await until(lambda: "up" in sink.lines, "started")
    actor.stop()
    await asyncio.sleep(0.05)
    actor.stop(kill=True)
    await asyncio.wait_for(run, PATIENCE_S)
    assert actor.status.exit_code == -9


async def test_grandchildren_end_with_their_actor(tmp_path: Path) -> None:
    sink = Sink()
    text = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(p.pid, flush=True)"
    )
    actor = process(tmp_path, text, sink)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    pid = int(sink.lines[0])
    await until(lambda: not alive(pid), "the grandchild has ended")
    assert actor.status.state == "exited"


async def test_a_program_that_cannot_be_started_fails_like_a_crash(tmp_path: Path) -> None:
    actor = ActorProcess(
        wanted(tmp_path, max_restarts=0),
        start=programs(lambda _: ["/nonexistent/python"]),
        nats_url="",
        send=Sink(),
    )
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.state == "failed"
    assert "cannot start learner" in actor.status.error
    assert "/nonexistent/python" in actor.status.error


ODD_NAMES = ["~nobody-of-this-name/a", "a\0b"]


@pytest.mark.parametrize(
    "folder", ["/etc", "runs/bob/r2", "runs", "link", "elsewhere", "/", *ODD_NAMES]
)
async def test_an_agent_folder_that_may_not_be_shown_is_tried_once(
    tmp_path: Path, folder: str
) -> None:
    for name in ("runs/ada/r1", "runs/bob/r2", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "runs/bob/r2")
    await assert_tried_once(
        wanted(
            tmp_path / "runs/ada/r1",
            role="environment",
            user="ada",
            output_roots=[str(tmp_path / "runs")],
            programs=[folder if folder in ODD_NAMES else str(tmp_path / folder)],
            max_restarts=5,
        ),
        "agent programs of user 'ada' may not be shown",
    )


async def test_a_start_that_goes_wrong_in_whatever_way_is_a_crash_of_that_actor(
    tmp_path: Path,
) -> None:
    """The node of all others goes on."""

    async def start(*_: object) -> Child:
        raise RuntimeError("a name that nobody thought of")

    actor = ActorProcess(wanted(tmp_path, max_restarts=1), start=start, nats_url="", send=Sink())
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert (actor.status.state, actor.status.restarts) == ("failed", 1)
    assert "a name that nobody thought of" in actor.status.error


@pytest.mark.parametrize("role", ["learner", "generator", "environment", "evaluator"])
async def test_a_run_folder_outside_of_the_roots_is_tried_once(tmp_path: Path, role: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    roots = [str(tmp_path / "runs")]
    outside = wanted(tmp_path / "elsewhere", role=role, output_roots=roots, max_restarts=5)
    await assert_tried_once(outside, "run_dir")


async def assert_tried_once(wanted: WantedActor, said: str) -> None:
    starter = ActorStarter(sandbox_games=True)
    actor = ActorProcess(wanted, start=starter.start, nats_url="", send=Sink())
    try:
        await asyncio.wait_for(actor.run(), PATIENCE_S)
    finally:
        await starter.close()
    assert (actor.status.state, actor.status.restarts) == ("failed", 0)
    assert said in actor.status.error


async def test_threads_and_broker_reach_the_actor_by_its_environment(tmp_path: Path) -> None:
    sink = Sink()
    text = (
        "import os; e = os.environ; "
        "print(e['OMP_NUM_THREADS'], e['TINKERMQ_NATS_URL'], e['TINKERMQ_LOG_FORMAT'])"
    )
    await asyncio.wait_for(process(tmp_path, text, sink, threads=3).run(), PATIENCE_S)
    assert sink.lines == ["3 nats://127.0.0.1:1 json"]


NODE = """
import asyncio, sys
from tinkermq.actors.node.children import programs
from tinkermq.actors.node.process import ActorProcess
from tinkermq.schemas.node import WantedActor
from tinkermq.schemas.wire.errors import DeadlineError

async def send(_): pass

async def main():
    wanted = WantedActor(user="u", job="j", name="a", role="learner", run_dir=sys.argv[1])
    command = lambda _: [sys.executable, "-c", "import time; time.sleep(600)"]
    actor = ActorProcess(wanted, start=programs(command), nats_url="", send=send)
    run = asyncio.create_task(actor.run())
    while actor.status.pid is None:
        await asyncio.sleep(0.01)
    print(f'pid={actor.status.pid}', flush=True)
    await run

asyncio.run(main())
"""


async def test_actors_die_with_a_killed_node(tmp_path: Path) -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert node.stdout is not None
    pid = 0
    async with asyncio.timeout(PATIENCE_S):
        while not pid:
            line = (await node.stdout.readline()).decode()
            pid = int(line.removeprefix("pid=")) if line.startswith("pid=") else 0
    assert alive(pid)
    node.kill()
    await node.wait()
    await until(lambda: not alive(pid), "the actor died with its node")


@pytest.mark.parametrize("size", [0, 1, 5_000])
async def test_output_in_one_long_line_is_cut_not_lost(tmp_path: Path, size: int) -> None:
    sink = Sink()
    await asyncio.wait_for(process(tmp_path, f"print('x' * {size * 20})", sink).run(), PATIENCE_S)
    assert "".join(sink.lines) == "x" * size * 20


# -- What an actor writes: lines, file, error ------------------------------------------------------


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


@pytest.mark.parametrize("line", [b"\xff" * MAX_LINE_BYTES, b"x" * 4000])
async def test_much_output_at_once_fits_the_messages_of_any_server(
    tmp_path: Path, line: bytes
) -> None:
    """Bytes that are no UTF-8 become three each."""
    sent: list[str] = []

    async def send(lines: LogLines) -> None:
        if len(lines.to_bytes()) > 1 << 20:  # nats-server's own bound
            raise MessageError("too large")
        sent.extend(lines.lines)

    output = ActorOutput("a", 1, LogFile(tmp_path, "a.log"), send)
    splitter = LineSplitter()
    output.add(splitter.feed((line + b"\n") * 600))
    output.add(["the end"])
    await output.drain()
    assert len(sent) == 601
    assert sent[-1] == "the end"


async def test_what_a_pipe_still_holds_is_read_by_who_no_longer_waits_for_its_end() -> None:
    reading, writing = os.pipe()
    found: list[str] = []

    async def take(lines: list[str]) -> None:
        found.extend(lines)

    reader = asyncio.create_task(read_lines(reading, take))
    os.write(writing, b"one\n")
    await until(lambda: found == ["one"], "a first line")
    os.write(writing, b"two\nthree")
    reader.cancel()
    await asyncio.wait([reader])
    os.close(writing)  # as a grandchild does later
    assert found == ["one", "two", "three"]


async def test_what_is_on_its_way_when_an_actor_ends_is_waited_for_and_not_sent_twice(
    tmp_path: Path,
) -> None:
    sent: list[str] = []
    stored = asyncio.Event()

    async def send(lines: LogLines) -> None:
        sent.extend(lines.lines)
        await stored.wait()

    file = LogFile(tmp_path, "a.log")
    output = ActorOutput("a", 1, file, send)
    flusher = asyncio.create_task(output.flush_forever())
    output.add(["one"])
    await until(lambda: sent == ["one"], "a line to be sent")
    flusher.cancel()
    stored.set()
    await output.drain()
    assert sent == ["one"]

    with file._lock:  # the disk takes its time
        flusher = asyncio.create_task(output.flush_forever())
        output.add(["two"])
        await until(lambda: not output._unwritten, "a line to be written")
        flusher.cancel()
        draining = asyncio.create_task(output.drain())
        await asyncio.wait([draining], timeout=0.2)
        assert not draining.done()
    await draining
    assert (tmp_path / "a.log").read_text() == "one\ntwo\n"
    assert sent == ["one", "two"]


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


# -- When a crashed actor is started again ---------------------------------------------------------


def test_each_failure_doubles_the_delay_up_to_ten_seconds() -> None:
    backoff = Backoff(max_restarts=8)
    delays = [backoff.after_failure(float(second)) for second in range(8)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_one_failure_over_the_limit_is_final() -> None:
    backoff = Backoff(max_restarts=1)
    assert backoff.after_failure(0.0) == 0.2
    assert backoff.after_failure(599.0) is None


def test_failures_of_more_than_ten_minutes_ago_are_forgiven() -> None:
    backoff = Backoff(max_restarts=1)
    assert backoff.after_failure(0.0) == 0.2
    assert backoff.after_failure(600.0, progress=True) == 0.2
    assert backoff.num_failures == 2


def test_failures_without_any_work_in_between_are_final_however_much_time_they_take() -> None:
    backoff = Backoff(max_restarts=2)
    assert backoff.after_failure(0.0) == 0.2
    assert backoff.after_failure(3600.0) == 0.2
    assert backoff.after_failure(7200.0) is None


def test_work_in_between_is_what_counts_and_the_unknown_does_not() -> None:
    backoff = Backoff(max_restarts=1)
    for hour, progress in enumerate([False, None, True, False, None, None, True]):
        assert backoff.after_failure(3600.0 * hour, progress=progress) == 0.2
    assert backoff.num_fruitless == 0
