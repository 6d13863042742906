"""Fixtures of the client tests: the command line in this process, and jobs without a scheduler."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jobs import JobStore
from tinkermq.clients.cli import main
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.command import Outcome

Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run one command as the console script does, but in this process."""
    monkeypatch.setenv("TINKERMQ_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TINKERMQ_NATS_URL", raising=False)

    def run(*words: str) -> Outcome:
        code = main(words)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run


def new_record(scope: JobScope, **fields: Any) -> JobRecord:
    """Return the record of a job that runs."""
    config = {"model": {"path": "m"}, "env": {"game": "bandit"}, "training": {"num_steps": 3}}
    defaults: dict[str, Any] = {
        "name": f"run-of-{scope.job}",
        "state": "RUNNING",
        "config": config,
        "created": time.time(),
        "run_dir": "/tmp/run",
    }
    return JobRecord(job=scope.job, user=scope.user, **{**defaults, **fields})


@pytest.fixture
async def record(broker: Broker, scope: JobScope) -> JobRecord:
    """A job that runs, as far as its record says."""
    return await JobStore(broker).create(new_record(scope), "test")
