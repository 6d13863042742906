"""A proven sandbox with low limits, which never leaves a process or an open file behind."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tinkermq.envs.sandbox.interpreters import LocalCodeSandbox, Outcome, SandboxSettings

from tests.support.processes import Below
from tests.support.waiting import PATIENCE_S

LIMITS: dict[str, Any] = {
    "time_s": 120,
    "memory_mb": 128,
    "processes": 6,
    "disk_mb": 16,
    "at_once": 4,
}


@pytest.fixture(scope="session")
def bubblewrap() -> LocalCodeSandbox:
    """Return a sandbox; fails with the remedy where there can be none."""
    sandbox = LocalCodeSandbox(SandboxSettings(packages=[], **LIMITS))
    sandbox.self_test()
    return sandbox


@pytest.fixture
def sandbox(bubblewrap: LocalCodeSandbox) -> Iterator[LocalCodeSandbox]:
    """The same, with a look at what is left when the test is over."""
    below, files = Below(), num_open_files()
    yield bubblewrap
    assert not below.pids()
    deadline = time.monotonic() + PATIENCE_S
    while num_open_files() > files and time.monotonic() < deadline:
        time.sleep(0.02)  # threads of this process have files open for a moment
    assert num_open_files() <= files  # what an earlier test left may go meanwhile


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """Hold so many files open that those of a sandbox get numbers above a hundred."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(Path(os.devnull).open("rb"))
        yield


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def run(sandbox: LocalCodeSandbox) -> Callable[..., Outcome]:
    """Run one program by itself."""

    def run_one(code: str, **limits: float) -> Outcome:
        with contextlib.closing(sandbox.session()) as session:
            return session.run(code, **limits)

    return run_one
