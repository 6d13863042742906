"""A pool whose machines a real cluster gives: `tinkermq up --on` a file, in a home of its own."""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.clients.home import Home
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.machines import MachineList
from tinkermq.schemas.wire.errors import BrokerError

from tests.clients.command import Outcome, tinkermq
from tests.support.configs import REPOSITORY, small_job
from tests.support.processes import alive
from tests.support.waiting import PATIENCE_S, eventually

SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.3}, "num_val": 0}


class OnCluster:
    """The pool; `config` says where its machines are from, `environment` how they are reached."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._config = {"look_s": 0.5, "idle_s": 2, **config}
        self._environment = {
            **os.environ,
            **environment,
            "TINKERMQ_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }

    async def command(self, *words: str) -> Outcome:
        return await asyncio.to_thread(tinkermq, *words, env=self._environment, timeout=PATIENCE_S)

    async def up(self, **config: Any) -> Broker:
        file = self._folder / "machines.yaml"
        file.write_text(yaml.safe_dump({**self._config, **config}), encoding="utf-8")
        up = await self.command("up", "--on", str(file), "--port", "0", "--no-gateway", "--json")
        assert up.code == 0, up.err
        return await connect(yaml.safe_load(up.out)["url"], name="test")

    async def down(self) -> None:
        down = await self.command("down")
        assert down.code == 0, down.err

    def url(self) -> str:
        """Return where the broker of the pool is."""
        state = Home(self._folder / "home").read_running_stack()
        assert state is not None
        return state.url

    def scheduler_pid(self) -> int:
        """Return the process of the scheduler that runs, waiting for one that is started again."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            state = Home(self._folder / "home").read_running_stack()
            if state is not None and alive(state.children["scheduler"]):
                return state.children["scheduler"]
            time.sleep(0.1)
        raise TimeoutError("no scheduler was started again")

    async def submit(self, pool: Pool, model: Path, **sections: Any) -> JobRecord:
        config = {**small_job(model, **sections), "output_dir": str(self._folder / "runs")}
        return await pool.submit(config)


async def machines(pool: Pool, *states: str) -> MachineList:
    """Wait until the machines have these states."""

    async def look() -> MachineList | None:
        told = await pool.machines()
        return told if sorted(one.state for one in told.machines) == sorted(states) else None

    return await eventually(look, f"machines that are {states}")


async def job_is(pool: Pool, job: str, *states: str) -> JobRecord:
    """Wait until a job is in one of the states."""

    async def look() -> JobRecord | None:
        with contextlib.suppress(BrokerError):  # a scheduler that was killed, too
            record = await pool.get(job)
            return record if record.state in states else None

    return await eventually(look, f"a job that is {states}")
