"""Actors that are forked from a process with torch in it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from tinkermq.actors.node.children import (
    WITHOUT_THREADS,
    ActorStarter,
    Child,
    ForkServer,
    StartFailed,
)
from tinkermq.actors.node.sandbox import ENVIRONMENT, actor_environment
from tinkermq.actors.runtime import EXIT_DRAINED
from tinkermq.schemas.node import WantedActor

from tests.support.processes import alive
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]

NOBODY = "nats://127.0.0.1:1"
IDLE_S = 1.0
WANTED = WantedActor(user="u", job="j", name="learner-7", role="learner", threads=3, run_dir="/")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[ForkServer]:
    """One fork server for the module: to import torch takes seconds."""
    made = ForkServer(idle_s=IDLE_S)
    yield made
    await made.close()


class Actor:
    """A learner that looks for a broker which is not there."""

    def __init__(self, child: Child, output: asyncio.StreamReader) -> None:
        self.child = child
        self.output = output

    @classmethod
    async def start(cls, server: ForkServer, url: str = NOBODY) -> "Actor":
        reading, writing = os.pipe()
        stream = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", 0)
        )
        try:
            return cls(await server.fork(WANTED, actor_environment(WANTED, url), writing), stream)
        finally:
            os.close(writing)

    def takes(self, number: int) -> bool:
        """Whether the process has a handler of its own for a signal."""
        (caught,) = (line for line in self.read("status").splitlines() if "SigCgt" in line)
        return bool(int(caught.split()[1], 16) & 1 << number - 1)

    def read(self, name: str) -> str:
        return Path(f"/proc/{self.child.pid}/{name}").read_text()

    async def until(self, line: str) -> None:
        """Wait for a line of its output."""
        async with asyncio.timeout(PATIENCE_S):
            while line not in (await self.output.readline()).decode():
                assert not self.output.at_eof(), f"it ended without {line!r}"


async def test_a_forked_actor_is_one_like_any_other(server: ForkServer) -> None:
    actor = await Actor.start(server)
    other = await Actor.start(server)
    await until(
        lambda: "tinkermq.actors.learner --user u" in actor.read("cmdline"),
        "the name of the process",
    )
    assert os.getpgid(actor.child.pid) == os.getsid(actor.child.pid) == actor.child.pid
    assert "libtorch" in actor.read("maps")
    os.kill(other.child.pid, signal.SIGKILL)
    assert await asyncio.wait_for(other.child.wait(), PATIENCE_S) == -signal.SIGKILL
    await until(lambda: actor.takes(signal.SIGTERM), "the actor to be up")
    os.kill(actor.child.pid, signal.SIGTERM)
    await actor.until("actor_draining")
    assert await asyncio.wait_for(actor.child.wait(), PATIENCE_S) == EXIT_DRAINED


async def test_what_an_actor_says_and_how_it_ends_comes_back(server: ForkServer) -> None:
    actor = await Actor.start(server, url="no url at all")
    await actor.until("actor_failed")
    assert await asyncio.wait_for(actor.child.wait(), PATIENCE_S) == 1


async def test_actors_die_with_the_server_and_the_next_one_comes_with_another(
    server: ForkServer,
) -> None:
    actor = await Actor.start(server)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert await asyncio.wait_for(actor.child.wait(), PATIENCE_S) == -signal.SIGKILL
    await until(lambda: not alive(actor.child.pid), "the actor to end")
    again = await Actor.start(server)
    os.kill(again.child.pid, signal.SIGKILL)
    await asyncio.wait_for(again.child.wait(), PATIENCE_S)


async def test_a_start_amid_which_the_server_is_killed_is_repeated_and_no_crash() -> None:
    server = ForkServer()
    for _ in range(2):
        starting = asyncio.create_task(Actor.start(server))
        await until(lambda: server.pid is not None, "a server")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(StartFailed):
            await starting
    actor = await Actor.start(server)
    os.kill(actor.child.pid, signal.SIGKILL)
    await asyncio.wait_for(actor.child.wait(), PATIENCE_S)
    await server.close()


async def test_a_server_without_actors_ends_after_a_while(server: ForkServer) -> None:
    actor = await Actor.start(server)
    pid = server.pid
    assert pid is not None
    await asyncio.sleep(1.5 * IDLE_S)
    assert alive(pid), "an actor of it runs"
    os.kill(actor.child.pid, signal.SIGKILL)
    await until(lambda: not alive(pid), "the server to end")
    assert server.pid is None


async def test_where_a_library_starts_threads_actors_start_as_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = "threading.Thread(target=time.sleep, args=(600,), daemon=True)"
    library = f"import threading, time\n{thread}.start()"
    (tmp_path / "sitecustomize.py").write_text(library)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    starter = ActorStarter()
    with (tmp_path / "output").open("wb") as output:
        start = partial(starter.start, WANTED, actor_environment(WANTED, NOBODY), output.fileno())
        children = await asyncio.gather(start(), start())
    assert [type(child) for child in children] == [asyncio.subprocess.Process] * 2
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.wait_for(child.wait(), PATIENCE_S)
    await starter.close()


async def test_arrow_starts_no_thread_in_the_server() -> None:
    """scikit-learn imports it, where that is installed, and transformers imports that."""
    environment = os.environ | ENVIRONMENT | WITHOUT_THREADS
    counted = "import pyarrow, os; print(len(os.listdir('/proc/self/task')))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", counted, env=environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.strip() == b"1"


FORKS_ON_DEMAND = """
import errno, os, pathlib, sys
from tinkermq.actors.node import fork_server
real = os.fork
def fork():
    if pathlib.Path("full").exists():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()
os.fork = fork
fork_server._HEAVY = ()
sys.exit(fork_server.main(sys.argv[1:]))
"""
"""A fork server on a machine that has no room for a process while a file is there."""


@pytest.fixture
def forks_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nodes start that server; it works in `tmp_path`."""
    (tmp_path / "server.py").write_text(FORKS_ON_DEMAND)
    monkeypatch.chdir(tmp_path)
    run = partial(asyncio.create_subprocess_exec, sys.executable, "server.py")
    monkeypatch.setattr(
        asyncio, "create_subprocess_exec", lambda *words, **options: run(words[-1], **options)
    )


@pytest.mark.usefixtures("forks_on_demand")
async def test_a_machine_without_room_for_a_process_fails_that_start_alone(tmp_path: Path) -> None:
    server = ForkServer()
    try:
        first = await Actor.start(server)
        (tmp_path / "full").touch()
        with pytest.raises(OSError, match=r"no process could be made: .*temporarily"):
            await Actor.start(server)
        assert alive(first.child.pid)
        (tmp_path / "full").unlink()
        second = await Actor.start(server)
        for actor in (first, second):
            os.kill(actor.child.pid, signal.SIGKILL)
            assert await asyncio.wait_for(actor.child.wait(), PATIENCE_S) == -signal.SIGKILL
    finally:
        await server.close()


@pytest.mark.usefixtures("forks_on_demand")
async def test_a_server_that_stands_still_is_killed_and_the_next_actor_has_another() -> None:
    server = ForkServer(silence_s=3.0)
    first = await Actor.start(server)
    stopped = server.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    assert await asyncio.wait_for(first.child.wait(), PATIENCE_S) == -signal.SIGKILL
    await until(lambda: not alive(stopped) and not alive(first.child.pid), "their end")
    second = await Actor.start(server)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.wait_for(server.close(), PATIENCE_S)
    await until(lambda: not alive(second.child.pid), "the end of the actor")
